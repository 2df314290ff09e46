"""The folders of data are found, or the message says what is wrong."""

from pathlib import Path

import pytest

from autopar.errors import AutoparError
from autopar.files import data_folder


def test_wheel_comes_before_checkout(tmp_path: Path) -> None:
    package = tmp_path / "autopar"
    (package / "_data" / "strategies").mkdir(parents=True)
    (tmp_path / "strategies").mkdir()
    (tmp_path / "pyproject.toml").touch()
    assert data_folder("strategies", package) == package / "_data" / "strategies"


def test_checkout_is_found_by_its_project_file(tmp_path: Path) -> None:
    (tmp_path / "cost_models").mkdir()
    (tmp_path / "pyproject.toml").touch()
    assert data_folder("cost_models", tmp_path / "autopar") == tmp_path / "cost_models"


def test_a_folder_of_another_project_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / "strategies").mkdir()
    with pytest.raises(AutoparError) as error:
        data_folder("strategies", tmp_path / "autopar")
    assert str(error.value) == (
        f"autopar's data folder 'strategies' is missing: neither {tmp_path}/autopar/_data/strategies nor "
        f"{tmp_path}/strategies of a checkout exists.\n"
        "Fix: install autopar again, from a wheel or with `pip install -e .` in a complete checkout."
    )
