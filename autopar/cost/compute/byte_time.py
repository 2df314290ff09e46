"""Time of ops that read and write more than they compute: a start, and the bytes at the rate of a memory stream."""

from __future__ import annotations

from autopar.cost.hardware.cluster import Device

__all__ = ["seconds_of_bytes"]


def seconds_of_bytes(count: float, device: Device, bytes_per_second: float | None = None) -> float:
    """Return the seconds of an op that reads and writes `count` bytes; 0 without bytes."""
    if not count:
        return 0.0
    seconds = device.start_seconds + count / (bytes_per_second or device.stream)
    return device.op_seconds + max(device.launch_seconds, seconds)
