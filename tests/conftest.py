"""What holds for every test."""

import torch
from hypothesis import settings


def pytest_configure() -> None:
    # The tests run in several processes; threads on top of them only get in each other's way.
    torch.set_num_threads(1)
    # Timings are benchmarks, not tests.
    settings.register_profile("autopar", deadline=None)
    settings.load_profile("autopar")
