"""Where the data that autopar ships lies on disk: in the package of a wheel, beside the package of a checkout."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from autopar.errors import AutoparError

__all__ = ["DataFolder", "data_folder"]

DataFolder = Literal["cost_models", "strategies"]


def data_folder(name: DataFolder, package: Path = Path(__file__).parent) -> Path:
    """The folder `name`, for the autopar whose modules lie in `package`."""
    in_wheel = package / "_data" / name
    if in_wheel.is_dir():
        return in_wheel
    checkout = package.parent
    in_checkout = checkout / name
    # Without the project file the parent is some site-packages, where a folder of that name is another project's.
    if (checkout / "pyproject.toml").is_file() and in_checkout.is_dir():
        return in_checkout
    raise AutoparError(
        f"autopar's data folder '{name}' is missing: neither {in_wheel} nor {in_checkout} of a checkout exists.\n"
        "Fix: install autopar again, from a wheel or with `pip install -e .` in a complete checkout."
    )
