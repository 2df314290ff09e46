"""Published measurements of collectives: which cluster a row is of, and that prices agree with rows of each kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.published.communication import READERS as BY_NAME
from benchmarks.published.communication import cluster_of, predicted_seconds, tables

SWEEP = "system,gpu,nodes,gpus,network,collective,size_bytes,dtype,oop_time_us\n"
# NVIDIA/dgxc-benchmarking@841f5466cd nccl/README.md; aws-samples/awsome-distributed-training@7217859f67
# micro-benchmarks/nccl-tests/README.md; coreweave/nccl-tests@cb86553328 README.
ROWS = """\
DGX,H100 80GB,1,8,NVLink4/NVSwitch,all_reduce,1024,float,16.94
DGX,H100 80GB,1,8,NVLink4/NVSwitch,all_reduce,1048576,float,27.37
DGX,H100 80GB,1,8,NVLink4/NVSwitch,all_reduce,16777216,float,123.8
DGX,H100 80GB,1,8,NVLink4/NVSwitch,all_reduce,1073741824,float,4029.4
p4de,A100 80GB,2,16,EFA v1 4x100Gb/node,all_reduce,1024,float,165.0
p4de,A100 80GB,2,16,EFA v1 4x100Gb/node,all_reduce,1073741824,float,26217
p5,H100 80GB,2,16,EFA v2 32x100Gb/node,all_reduce,1024,float,69.24
p5,H100 80GB,2,16,EFA v2 32x100Gb/node,all_reduce,1073741824,float,4607.6
racks,GB200,36,144,NVL72 + IB,all_reduce,8589934592,float,21493
"""


def test_prices_agree_with_measurements(tmp_path: Path) -> None:
    path = tmp_path / "micro_nccl_sweeps.csv"
    path.write_text(SWEEP + ROWS)
    whole, *systems = tables([path])
    assert (whole.rows, whole.left_out, whole.large_rows, whole.small_rows) == (9, 0, 5, 4)
    assert [one.name for one in systems] == [
        "micro_nccl_sweeps, DGX, all_reduce, 8 ranks",
        "micro_nccl_sweeps, p4de, all_reduce, 16 ranks",
        "micro_nccl_sweeps, p5, all_reduce, 16 ranks",
        "micro_nccl_sweeps, racks, all_reduce, 144 ranks",
    ]
    for one in systems:
        assert one.large_error is not None
        assert one.large_error < 0.15
        assert one.small_error is None or one.small_error < 0.30


@pytest.mark.parametrize(
    ("device", "network", "cluster", "ports", "gigabytes"),
    [
        ("H100", "NVLink4/NVSwitch", "h100", 8, 50),
        ("H100", "NDR IB 8x400Gb + SHARP", "h100", 8, 50),
        ("H100", "EFA v2 32x100Gb/node", "h100-efa", 32, 12.5),
        ("H100", "RoCE 4x200Gb", "h100-roce", 4, 25),
        ("H100", "GPUDirect-TCPXO 1.8 Tbps/node", "h100-a3mega", 8, 25),
        ("H100", "GPUDirect-TCPX 1 Tbps/node", "h100-a3high", 4, 25),
        ("H100 (4/node)", "HPE Slingshot (NCCL+CXI)", "h100-slingshot", 2, 25),
        ("B200", "8x NDR400 IB (CX-7)", "b200", 8, 50),
        ("A100", "HDR IB 8x200Gb", "a100-80", 8, 25),
        ("A100", "RoCE 8x100Gb", "a100-80", 8, 12.5),
        ("GB200", "NVL72 + IB", "gb200", 72, 50),
        ("GB300", "NVL72 + IB", "gb300", 72, 100),
        ("MI300X", "xGMI", "mi300x", 8, 50),
    ],
)
def test_clusters_of_rows(device: str, network: str, cluster: str, ports: int, gigabytes: float) -> None:
    found = cluster_of(device, network)
    assert found is not None
    assert found.name == cluster
    outer = found.level[-1]
    assert (outer.ports, outer.port_bytes_per_second) == (ports, gigabytes * 1e9)
    assert outer.rate_bytes_per_second <= outer.port_bytes_per_second


def test_what_autopar_has_no_cluster_for_is_left_out(tmp_path: Path) -> None:
    assert cluster_of("MI250X", "") is None
    path = tmp_path / "micro_nccl_sweeps.csv"
    path.write_text(SWEEP + "x,MI250X,1,8,xGMI,all_reduce,1073741824,float,6000\n")
    whole = tables([path])[0]
    assert (whole.rows, whole.left_out, whole.large_error) == (1, 1, None)


@pytest.mark.parametrize(("ranks", "measured"), [(2, 47.671), (8, 312.912)])
def test_pairs_of_devices_without_a_switch_have_a_link_each(ranks: int, measured: float) -> None:
    row = {"gpu": "MI300X", "gpus": str(ranks), "collective": "all_reduce", "algo": "", "size": "4GiB"}
    (one,) = BY_NAME["micro_collective_plateau"]([row | {"busbw_GB_s": str(measured)}])
    assert predicted_seconds(one) == pytest.approx(one.seconds, rel=0.05)


def test_bus_bandwidth_is_turned_back_into_time() -> None:
    row = {
        "gpu": "H200",
        "gpus": "8",
        "collective": "all_gather",
        "algo": "Ring",
        "size": "16GiB",
        "busbw_GB_s": "361.4",
    }
    (one,) = BY_NAME["micro_collective_plateau"]([row])
    assert one.seconds == pytest.approx(7 / 8 * 16 * 2**30 / 361.4e9)
    assert predicted_seconds(one) == pytest.approx(one.seconds, rel=0.05)
    slower = BY_NAME["micro_collective_plateau"]([row | {"collective": "all_reduce", "busbw_GB_s": "367.2"}])[0]
    assert predicted_seconds(slower) == pytest.approx(slower.seconds, rel=0.05), "the ring, though NVLS is faster"
