"""`autopar trace`: what it prints, and what it says to bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from autopar.cli import main
from examples import custom_op

ROOT = Path(__file__).parents[2]
MLP = f"{ROOT}/examples/mlp.py:mlp"


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["trace", *words])
    out, err = capsys.readouterr()
    return code, out, err


def target(tmp_path: Path, body: str) -> str:
    path = tmp_path / "user_model.py"
    path.write_text("import torch\nfrom torch import nn\n\n" + body)
    return str(path)


def test_prints_dims_tensors_and_rules(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, MLP, "--dims", "x=batch features")
    assert code == 0
    assert "features" in out
    assert "d_ff" in out
    assert "a k, n k, n -> a n" in out


def test_json_is_plain_data(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, MLP, "--json")
    assert code == 0
    data = json.loads(out)
    assert data["coverage"]["replicated"] == 0
    assert {"name", "kind", "dims", "shape", "dtype"} == set(data["tensors"][0])
    kept = {"name", "op", "operands", "outputs", "rule", "source", "factors", "module", "line", "code", "attention"}
    assert kept == set(data["ops"][0])


def test_settings_reach_the_function_and_modes_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, f"{ROOT}/examples/gpt.py:gpt", "--set", "layers=3", "--train")
    assert code == 0
    assert "(train mode)" in out
    assert "3 times the same" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["mlp.py"], "'mlp.py' names no function; a TARGET is file.py:function or package.module:function"),
        (["no_such_file.py:f"], "no_such_file.py:f: there is no file no_such_file.py"),
        (["no_such_package.models:f"], "there is no module 'no_such_package.models' here"),
        ([f"{ROOT}/examples/mlp.py:mpl"], "has no function 'mpl'; did you mean 'mlp'?"),
        ([MLP, "--set", "hidden"], "--set hidden: expected name=value"),
        ([MLP, "--set", "no_such_argument=3"], "unexpected keyword argument 'no_such_argument'"),
        ([MLP, "--dims", "x"], "--dims x: expected TENSOR=NAMES"),
        ([MLP, "--dims", "y=batch d"], "dims['y']: no input, parameter or buffer has this name"),
        ([MLP, "--dims", "x=batch"], "dims['x']: 'batch' names 1 dims, but the tensor has 2"),
        ([MLP, "--dims", "x=batch batch"], "gives the name 'batch' to two dims of one tensor"),
        ([MLP, "--dims", "x=batch (d"], "a '(' is not closed"),
    ],
)
def test_bad_words(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    code, out, err = run(capsys, *words)
    assert code == 2
    assert out == ""
    assert message in err
    assert err.startswith("autopar trace: ")
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("def f():\n    return nn.Linear(2, 2)\n", "returned Linear; it should return (model, inputs)"),
        ("def f():\n    return 3, (torch.zeros(2),)\n", "returned int as the model; it should be an nn.Module"),
        ("def f():\n    return nn.Linear(2, 2), torch.zeros(2)\n", "returned Tensor as the inputs"),
        ("def f():\n    return 1 / 0\n", "the function failed: ZeroDivisionError: division by zero"),
        ("def f(:\n", "cannot be loaded: SyntaxError"),
        ("import no_such_package\n", "cannot be loaded: ModuleNotFoundError: No module named 'no_such_package'"),
    ],
)
def test_bad_targets(capsys: pytest.CaptureFixture[str], tmp_path: Path, body: str, message: str) -> None:
    code, _, err = run(capsys, f"{target(tmp_path, body)}:f")
    assert code == 2
    assert message in err
    assert "Traceback" not in err


def test_the_failing_line_of_a_target_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    _, _, err = run(capsys, f"{target(tmp_path, 'def f():' + chr(10) + '    return 1 / 0' + chr(10))}:f")
    assert "user_model.py:5: return 1 / 0" in err


def test_a_model_that_cannot_be_traced_is_a_no(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    body = """
class Branch(nn.Module):
    def forward(self, x):
        if x.sum() > 0:
            return x
        return -x

def f():
    return Branch(), (torch.ones(3),)
"""
    code, _, err = run(capsys, f"{target(tmp_path, body)}:f")
    assert code == 1
    assert "user_model.py:7" in err
    assert "if x.sum() > 0:" in err
    assert "Traceback" not in err


def test_help_has_examples() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "autopar", "trace", "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    assert "autopar trace examples/gpt.py:gpt" in done.stdout


def test_the_package_does_not_import_torch_by_itself() -> None:
    code = "import sys, autopar, autopar.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_file_that_is_loaded_already_is_not_loaded_again(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    # A second module would register the op again, and the models of the first would call an op that PyTorch freed.
    (tmp_path / "examples").symlink_to(Path(custom_op.__file__).parent, target_is_directory=True)
    op = custom_op.squared_relu._opoverload
    code, _, _ = run(capsys, f"{tmp_path}/examples/custom_op.py:custom_op")
    assert code == 0
    assert torch.ops.mylib.squared_relu.default is op


def test_a_file_that_failed_is_loaded_again(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = target(tmp_path, "def f():\n    return nn.Linear(2, 2), (torch.ones(2),)\n\nprint(missing)\n")
    code, _, err = run(capsys, f"{path}:f")
    assert code == 2
    assert "user_model.py:7: print(missing)" in err
    Path(path).write_text(Path(path).read_text().replace("print(missing)", ""))
    code, _, _ = run(capsys, f"{path}:f")
    assert code == 0
