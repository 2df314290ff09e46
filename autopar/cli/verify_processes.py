"""Comparison of a plan on local processes with the model on one: outputs, gradients, buffers.

    autopar verify examples/gpt.py:gpt --mesh dp=2,tp=2 --layout megatron

Every process builds the model from one seed. The first one also runs it alone; all of them run it in parallel, drawing
the numbers that one process draws. Gradients start from random gradients of the outputs, so that no part of a result is
left out. Differences are relative to the largest value of the tensor.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from autopar.errors import AutoparError, AutoparWarning, VerifyError
from autopar.ir.precision import Precision, parse_precision

__all__ = ["Difference", "Verification", "differences", "results_of", "verify"]

# Standard deviation for zero parameters: the usual initialisation of a projection.
PERTURBED_BY = 0.02

# By name: `output 0`, `gradient of head.weight`, `buffer norm.running_mean`; None: no gradient.
Results = Mapping[str, Any]


@dataclass(frozen=True)
class Difference:
    name: str
    # Largest difference over the largest value; infinite if the two cannot be compared.
    relative: float
    reason: str = ""
    # True for an output or gradient that is zero on both sides: agreement proves nothing there.
    is_zero: bool = False


@dataclass(frozen=True)
class Verification:
    """Result of a verification; differences are sorted, largest first."""

    differences: tuple[Difference, ...]
    collectives: int
    # Rows of the busiest rank over the mean, by the first product of routed rows.
    imbalances: Mapping[str, float] = field(default_factory=dict)
    # Said to the user of `parallelize`.
    warnings: tuple[str, ...] = ()

    @property
    def worst(self) -> Difference:
        return self.differences[0]

    @property
    def zeros(self) -> int:
        """Return the number of outputs and gradients that are zero on both sides."""
        return sum(one.is_zero for one in self.differences)


@dataclass(frozen=True)
class VerifyTask:
    """Task of the processes, sent to them as JSON."""

    target: str
    settings: Mapping[str, Any]
    mesh: str
    layout: str | None
    dims: Mapping[str, str]
    precision: str
    device: str = "cpu"
    # True: parameters that are zero get small random values first.
    perturbed: bool = True


def verify(
    task: VerifyTask, ranks: int, seconds: float = 600, progress: Callable[[str], None] = lambda _: None
) -> Verification:
    """Run the task; raise the error of a process, or a timeout."""
    if task.device == "cuda":
        _check_gpus(task.mesh, ranks)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "task").write_text(json.dumps(asdict(task)), encoding="utf-8")
        progress(f"starting {ranks} processes")
        running = _start(place, ranks, task.device)
        try:
            _wait(running, place, time.monotonic() + seconds, seconds)
        finally:
            for process in running:
                # After a failure the others wait for the failed rank in a collective and never end by themselves.
                process.kill()
                process.wait()
        found = json.loads((place / "found").read_text(encoding="utf-8"))
    compared = tuple(Difference(**one) for one in found["differences"])
    return Verification(compared, found["collectives"], found["imbalances"], tuple(found["warnings"]))


def _check_gpus(mesh: str, ranks: int) -> None:
    """Check that each process can have a GPU of its own: NCCL serves one rank per GPU."""
    import torch

    count = torch.cuda.device_count()
    if count == 0:
        raise VerifyError("--device cuda: torch finds no GPU on this machine\nfix: --device cpu")
    if count < ranks:
        raise VerifyError(
            f"--device cuda: --mesh {mesh} is {ranks} processes with a GPU each, and this machine has {count}\n"
            "fix: verify on a smaller mesh with the same axes, or --device cpu"
        )


def _start(place: Path, ranks: int, device: str) -> list[subprocess.Popen[bytes]]:
    shared = {**os.environ, "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    shared["OMP_NUM_THREADS"] = "1"  # else the processes fight for the cores
    if device == "cpu":
        shared["CUDA_VISIBLE_DEVICES"] = ""  # a target may take the GPU where there is one
    here = Path(__file__).parent.parent
    if here == Path.cwd():  # a checkout that Python was started in: the processes must find it too
        shared["PYTHONPATH"] = os.pathsep.join(filter(None, (str(here), shared.get("PYTHONPATH"))))
    found = []
    for rank in range(ranks):
        own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        with (place / f"log{rank}").open("wb") as log:
            # -P: else a file of the current folder, such as random.py, would stand for a module of Python's.
            command = [sys.executable, "-P", "-m", "autopar.cli.verify_processes", str(place)]
            found.append(subprocess.Popen(command, env=own, stdout=log, stderr=log))
    return found


def _wait(running: Sequence[subprocess.Popen[bytes]], place: Path, deadline: float, seconds: float) -> None:
    while True:
        codes = [process.poll() for process in running]
        failed = {rank: code for rank, code in enumerate(codes) if code}
        if failed:
            raise _failure(place, failed, len(running))
        if None not in codes:
            return
        if time.monotonic() > deadline:
            late = ", ".join(str(rank) for rank, code in enumerate(codes) if code is None)
            raise VerifyError(
                f"after {seconds:.0f} seconds rank {late} had not ended\nfix: --timeout, or a smaller model"
            )
        # Short against a start of seconds, long enough to leave the cores to the ranks.
        time.sleep(0.02)


def _failure(place: Path, failed: Mapping[int, int], ranks: int) -> AutoparError:
    """Return the error of a rank; the first cause comes before errors that others report about it."""
    for each in range(ranks):
        said = place / f"error{each}"
        if said.exists():
            return VerifyError(said.read_text(encoding="utf-8"))
    killed = [rank for rank, code in failed.items() if code < 0]  # the others only say that it is gone
    # A signal is the cause, for instance of the kernel out of memory; errors of others follow from it.
    rank = killed[0] if killed else min(failed)
    log = (place / f"log{rank}").read_text(encoding="utf-8", errors="replace").strip()
    how = f"was ended by signal {-failed[rank]}" if killed else "failed"
    return VerifyError(f"rank {rank} {how}:\n{log[-3000:]}")


# -- in a process -----------------------------------------------------------------------------------------------------


def _run(place: Path) -> int:
    task = VerifyTask(**json.loads((place / "task").read_text(encoding="utf-8")))
    rank = int(os.environ["RANK"])
    try:
        found = _verify_here(task, rank, place / "meeting")
    except AutoparError as error:
        (place / f"error{rank}").write_text(str(error), encoding="utf-8")
        return 1
    if rank == 0:
        (place / "found").write_text(json.dumps(asdict(found)), encoding="utf-8")
    return 0


def _verify_here(task: VerifyTask, rank: int, meeting: Path) -> Verification:
    import torch
    import torch.distributed as dist

    from autopar.api import parallelize
    from autopar.cli.target import load_target
    from autopar.lowering.collectives.process_groups import join_local_group

    torch.set_num_threads(1)
    # Every rank builds the same model: initial weights come from one seed.
    torch.manual_seed(0)
    model, inputs = load_target(task.target, task.settings)
    precision = parse_precision(task.precision)
    if task.device == "cuda":
        torch.cuda.set_device(rank)
    model, inputs = _moved(model, inputs, precision, torch.device(task.device))
    if task.perturbed:
        perturb(model)
    expected = _alone(copy.deepcopy(model), inputs, precision) if rank == 0 else {}
    backend = "nccl" if task.device == "cuda" else "gloo"
    join_local_group(meeting, rank, int(os.environ["WORLD_SIZE"]), backend)
    dims = task.dims or None
    options: dict[str, Any] = {"layout": task.layout, "dims": dims, "precision": precision, "outputs": "full"}
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", AutoparWarning)
        parallel = parallelize(model, task.mesh, inputs, **options)
    said = tuple(str(one.message) for one in warned if issubclass(one.category, AutoparWarning))
    torch.manual_seed(2)  # the first rank has drawn more than the others
    with parallel.exact_randomness():
        found = results_of(parallel, inputs)
    collectives = len(parallel.collectives())
    compared = differences(expected, found) if rank == 0 else ()
    imbalances = {one.op: one.imbalance for one in parallel.routed_loads()}
    dist.barrier()  # no rank goes while another one still needs it
    return Verification(compared, collectives, imbalances, said)


def perturb(model: Any) -> None:
    """Give small random values, the same on every rank, to parameters all of whose values are zero.

    A zero last projection, as LoRA, ControlNet and DiT begin with, makes outputs and gradients zero. Other parameters
    keep their values: one that must be positive, say, stays so.
    """
    import torch

    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator) if parameter.is_floating_point() else None
            if drawn is not None and not parameter.any():
                parameter.copy_(PERTURBED_BY * drawn)


def _alone(model: Any, inputs: Any, precision: Precision) -> Results:
    """Return the results of the model alone, in the dtype of the compute, which it may not support."""
    dtype = precision.compute_dtype
    for parameter in model.parameters():
        if dtype is not None and parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    try:
        return results_of(model, inputs)
    except Exception as error:
        said = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        named = str(dtype or "its own dtype").removeprefix("torch.")
        raise VerifyError(
            f"{type(model).__name__} by itself, in {named}: {said}\n"
            "fix: --precision fp32 or --precision own, if the model does not run in another one; else the target"
        ) from error


def _moved(model: Any, inputs: Any, precision: Precision, device: Any) -> tuple[Any, Any]:
    """Return the model on a device in the dtype of its weights, and its inputs in that of the compute."""
    import torch
    from torch import Tensor
    from torch.utils._pytree import tree_map

    meta = [name for name, one in (*model.named_parameters(), *model.named_buffers()) if one.is_meta]
    if meta:
        raise VerifyError(
            f"{meta[0]} is on the meta device and has no values to compute with\n"
            "fix: a target that builds a small model with values, as in examples/gpt.py:gpt"
        )

    def moved(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.to(device, precision.compute_dtype if value.is_floating_point() else None)

    stored = precision.stored(torch.float32, frozen=False) if precision.compute else None
    return model.to(device, stored), tree_map(moved, inputs)


def results_of(model: Any, inputs: Any) -> dict[str, Any]:
    """Return outputs, gradients and buffers of one forward and backward; the model's buffers are restored."""
    import torch
    from torch import Tensor
    from torch.utils._pytree import tree_leaves

    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    torch.manual_seed(2)
    results = model(**inputs) if isinstance(inputs, Mapping) else model(*inputs)
    leaves = tree_leaves(dict(results) if isinstance(results, Mapping) else results)
    outputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    torch.manual_seed(1)
    differentiable = [output for output in outputs if output.requires_grad]
    # Not randn_like, which follows the strides: the same result may be transposed in one and not in the other.
    # Drawn on the CPU, so that all devices draw the same.
    gradients = [torch.randn(o.shape, dtype=o.dtype).to(o.device) for o in differentiable]
    torch.autograd.backward(differentiable, gradients)
    found: dict[str, Any] = {f"output {i}": output.detach() for i, output in enumerate(outputs)}
    for name, parameter in model.named_parameters():
        gradient: Any = parameter.grad
        found[f"gradient of {name}"] = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        parameter.grad = None
    for name, buffer in model.named_buffers():
        found[f"buffer {name}"] = buffer.clone()
        buffer.copy_(buffers[name])
    return found


def differences(expected: Results, found: Results) -> tuple[Difference, ...]:
    """Return all differences, largest first. A gradient or buffer that is zero up to rounding is compared at the
    scale of the largest one.
    """
    floors = {kind: 1e-3 * _largest_of(kind, expected) for kind in ("gradient", "buffer")}
    floors["buffer"] = min(1e-3, floors["buffer"])  # a mask among the buffers may hold any number
    compared = []
    for name in dict.fromkeys((*expected, *found)):
        if (name in expected) != (name in found):
            where = "one process" if name in expected else "the parallel model"
            compared.append(Difference(name, float("inf"), f"only {where} has it"))
            continue
        compared.append(_compared(name, expected[name], found[name], floors.get(name.split()[0], 1e-12)))
    # NaN counts as the largest difference.
    return tuple(sorted(compared, key=lambda one: (one.relative == one.relative, -one.relative)))


def _largest_of(kind: str, results: Results) -> float:
    """Return the largest absolute value of a kind of result, integers excluded."""
    floats = (one for name, one in results.items() if name.startswith(kind) and one is not None)
    return max((_largest(one) for one in floats if one.is_floating_point() or one.is_complex()), default=0.0)


def _compared(name: str, expected: Any, found: Any, floor: float) -> Difference:
    if expected is None or found is None:
        same = expected is found
        return Difference(name, 0.0 if same else float("inf"), "" if same else "one of the two is None")
    if expected.shape != found.shape:
        return Difference(name, float("inf"), f"shape {list(found.shape)}, not {list(expected.shape)}")
    # Relative to the tensor's largest value: single elements near zero have no useful relative error.
    scale = max(_largest(expected), floor)
    is_zero = not name.startswith("buffer") and _largest(expected) == _largest(found) == 0.0
    relative = _largest(_wide(found) - _wide(expected)) / scale if scale else 0.0
    return Difference(name, relative, is_zero=is_zero)


def _largest(value: Any) -> float:
    if value is None or not value.numel():
        return 0.0
    return float(_wide(value).abs().max())


def _wide(value: Any) -> Any:
    return value.cdouble() if value.is_complex() else value.double()


if __name__ == "__main__":
    code = _run(Path(sys.argv[1]))
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)  # what is to be said is written: nothing is left that taking Python and its threads down could spoil
