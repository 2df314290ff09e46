"""What tests of all commands try of each: a new command adds its rows here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

__all__ = ["AT_ONCE", "LATER", "PRINTED", "WITHOUT_DATA"]

ROOT = Path(__file__).parents[2]
MLP = f"{ROOT}/examples/mlp.py:mlp"
GPT = f"{ROOT}/examples/gpt.py:gpt"
MESH = ("--mesh", "dp=2,tp=2")
DDP = ("--layout", "ddp")
WHERE = (*MESH, "--cluster", "h100")
LAYOUT = ("--layout", "batch -> dp; d_ff -> tp; * -> none")
DIMS = ("--dims", "x=batch features")

# -- golden texts: the exit code and the words of each ----------------------------------------------------------------

# Nothing here is searched: what a search finds in a given time depends on the machine.
PRINTED: Mapping[str, tuple[int, tuple[str, ...]]] = {
    "plan": (0, ("plan", MLP, *WHERE, *DIMS, *LAYOUT, "-o", "mlp.plan.lay")),
    "plan_nothing_fits": (1, ("plan", MLP, *WHERE, *LAYOUT, "--memory", "2kB", "--time-limit", "2")),
    "explain_tensor": (0, ("explain", MLP, "up.0.weight", *WHERE, *DIMS, *LAYOUT)),
    "explain_op": (0, ("explain", MLP, "up.0/linear", *WHERE, *DIMS, *LAYOUT, "--no-alternatives")),
    "explain_why_not": (
        0,
        ("explain", MLP, "up.0.weight", *WHERE, *DIMS, *LAYOUT, "--no-alternatives", "--why-not", "* -> none"),
    ),
    "compare": (0, ("compare", "megatron", "ddp", "batch -> dp*tp; * -> none", "--target", GPT, *WHERE)),
    "check": (0, ("check", GPT, *WHERE, "--layout", "megatron")),
    "check_promises": (1, ("check", GPT, *WHERE, "--layout", "promises.lay")),
    "check_not_legal": (1, ("check", GPT, *WHERE, "--layout", "batch -> dp*tp; * -> none")),
    "verify": (0, ("verify", MLP, "--mesh", "dp=2", "--layout", "batch -> dp; * -> none")),
    "verify_differs": (1, ("verify", "odd.py:odd", "--mesh", "dp=2", "--layout", "* -> none")),
    "report": (0, ("report", MLP, *WHERE, *LAYOUT, *DIMS, "-o", "mlp.html")),
    "trace": (0, ("trace", f"{ROOT}/examples/moe.py:moe")),
    "strategies": (0, ("strategies",)),
    "clusters": (0, ("clusters",)),
    "clusters_one": (0, ("clusters", "h100")),
    "new": (0, ("new", "train.py")),
}

# Commands without --json: these write a file, or print what a person reads.
WITHOUT_DATA = ("report", "calibrate", "new", "doctor")

# -- bad input: the words, the exit code, a part of the message; five for each command --------------------------------

Case = tuple[tuple[str, ...], int, str]

# Said without torch: nothing is traced, nothing is started.
AT_ONCE: list[Case] = [
    (("plan", "gpt.py", *MESH), 2, "'gpt.py' names no function; a TARGET is file.py:function"),
    (("plan", "nowhere.py:gpt", *MESH), 2, "there is no file nowhere.py"),
    (("plan", GPT, "--mesh", "dp=2,tp"), 2, "expected '=' and a size after axis 'tp'"),
    (("plan", GPT, *MESH, "--cluster", "h10"), 2, "there is no cluster 'h10'; did you mean 'h100'?"),
    (("plan", GPT, *MESH, "--layout", "megatrom"), 2, "did you mean 'megatron'?"),
    (("plan", GPT, *MESH, "--precision", "bf61"), 2, "invalid precision 'bf61': no preset is called 'bf61'"),
    (("verify", GPT, *MESH, "--precision", "bf16, sum=fp32"), 2, "unknown field 'sum'"),
    (("verify", GPT, *MESH, "--precision", "fp8"), 2, "one process multiplies in bf16"),
    (("trace", GPT, "--precision", "int8"), 2, "no preset is called 'int8'"),
    (("plan", GPT, *MESH, "-o", "."), 2, "this is a folder"),
    (("plan", GPT, *MESH, "--solver", "ilp:high"), 2, "unknown solver 'ilp:high'; did you mean 'ilp:highs'?"),
    (("plan", GPT, *MESH, "--write-model", "plan.txt"), 2, "--write-model plan.txt: expected a file .mps or .lp"),
    (("plan", GPT, *MESH, "-o", "/proc/new.lay"), 2, "--output /proc/new.lay: cannot be written"),
    (("plan", GPT, *MESH, "--memory", "-1GiB"), 2, "as in --memory=-1"),
    (("plan", GPT, *MESH, "--memory=-1GiB"), 2, "invalid memory='-1GiB': '-' has no meaning here\nfix: write"),
    (("plan", GPT, *MESH, "--optimizer", "adammw"), 2, "no optimizer is called 'adammw'; did you mean 'adamw'?"),
    (("plan", GPT, *MESH, "-o", ""), 2, "--output: the name of the file is empty"),
    (("plan", GPT, *MESH, "--set", "layers"), 2, "--set layers: expected name=value"),
    (("explain", "nowhere.lay", "x"), 2, "there is no file nowhere.lay"),
    (("explain", "layout.lay", "x"), 2, "layout.lay is a layout and no plan"),
    (("explain", "gpt.py", "x", *MESH), 2, "names no function"),
    (("explain", GPT, "x", *MESH, "--cluster", "nowhere.toml"), 2, "nowhere.toml cannot be read"),
    (("explain", GPT, "x", *MESH, "--layout", "batch -> dp }"), 2, "E0: "),
    (("compare", "nowhere.lay"), 2, "there is no file nowhere.lay"),
    (("compare", "gpt.py:gpt", "ddp", *MESH), 2, "is a model, and PLAN a plan's file, a strategy or a layout"),
    (("compare", "ddp", "megatrom", "--target", GPT, *MESH), 2, "did you mean 'megatron'?"),
    (("compare", "ddp", "--target", "gpt.py", *MESH), 2, "names no function"),
    (("compare", "ddp", "--target", GPT, "--mesh", "dp=0"), 2, "axis 'dp' has size 0; a size is at least 1"),
    (("compare", "fsdp(fsdp=dq)", "--target", GPT, *MESH), 2, "there is no axis 'dq'"),
    (("check", GPT, *MESH, "--layout", "nowhere.lay"), 2, "nowhere.lay cannot be read"),
    (("check", "nowhere.py:gpt", *MESH, *DDP), 2, "there is no file nowhere.py"),
    (("check", GPT, *MESH, *DDP, "--cluster", "mine.toml"), 2, "unknown key 'unites'; did you mean 'units'?"),
    (("check", GPT, "--mesh", "dp=2,dp=2", *DDP), 2, "axis 'dp' stands twice"),
    (("check", GPT, *MESH, *DDP, "--memory", "70GX"), 2, "there is no unit 'GX'"),
    (("check", GPT, *MESH, *DDP, "--dims", "ids"), 2, "--dims ids: expected TENSOR=NAMES"),
    (("verify", "layout.lay", *MESH), 2, "takes this file as --layout layout.lay"),
    (("verify", "gpt.py", *MESH), 2, "names no function"),
    (("verify", GPT, "--mesh", "dp=?"), 2, "every axis needs a number of ranks here"),
    (("verify", GPT, "--mesh", "dp=512"), 2, "dp=512 is 512 processes on this machine, more than 128\nfix: "),
    (("verify", GPT, *MESH, "--layout", "megatrom"), 2, "did you mean 'megatron'?"),
    (("verify", GPT, *MESH, "--layout", "nowhere.lay"), 2, "nowhere.lay cannot be read"),
    (("verify", GPT, *MESH, "--tolerance", "nan"), 2, "--tolerance nan: expected a number from 0 up"),
    (("verify", GPT, *MESH, "--timeout", "0"), 2, "--timeout 0: expected a number of seconds above 0"),
    (("report", "nowhere.lay", "-o", "r.html"), 2, "there is no file nowhere.lay"),
    (("report", "layout.lay", "-o", "r.html"), 2, "is a layout and no plan"),
    (("report", GPT, *MESH, "-o", "no/such/r.html"), 2, "there is no folder"),
    (("report", GPT, *MESH, "--cluster", "h10", "-o", "r.html"), 2, "did you mean 'h100'?"),
    (("report", GPT, *MESH, *DDP, "-o", "/proc/r.html"), 2, "--output /proc/r.html: cannot be written"),
    (("report", "nowhere.py:gpt", *MESH, "-o", "r.html"), 2, "there is no file nowhere.py"),
    (("trace", "gpt.py"), 2, "names no function"),
    (("trace", "nowhere.py:gpt"), 2, "there is no file nowhere.py"),
    (("trace", GPT, "--dims", "=batch"), 2, "--dims =batch: expected TENSOR=NAMES"),
    (("strategies", "megatrn"), 2, "there is no strategy 'megatrn'; did you mean 'megatron'?"),
    (("strategies", "layout.lay"), 2, "there is no strategy 'layout.lay'"),
    (("strategies", "", "--json"), 2, "there is no strategy ''"),
    (("strategies", "ddp", "fsdp"), 2, "unrecognized arguments: fsdp"),
    (("strategies", "--jsn"), 2, "unrecognized arguments: --jsn"),
    (("clusters", "h10"), 2, "did you mean 'h100'?"),
    (("new", "train.txt"), 2, "fix: autopar new train.py"),
    (("new", "train"), 2, "train: a script of Python ends in .py\nfix: autopar new train.py"),
    (("new", ""), 2, "fix: autopar new train.py"),
    (("new", "targets.py"), 2, "targets.py: this file is there already, and nothing was written"),
    (("new", "/proc/new.py"), 2, "/proc/new.py: cannot be written"),
    (("clusters", "nowhere.toml"), 2, "nowhere.toml cannot be read"),
    (("clusters", "mine.toml"), 2, "unknown key 'unites'; did you mean 'units'?"),
    (("clusters", "layout.lay"), 2, "this is not TOML"),
    (("clusters", "--toml"), 2, "--toml prints one cluster\nfix: name it"),
    (("calibrate", "--output", "no/such/mine.toml"), 2, "there is no folder"),
    (("calibrate", "--output", "."), 2, "this is a folder"),
    (("calibrate", "--output", "/proc/new.toml"), 2, "--output /proc/new.toml: cannot be written"),
    (("calibrate", "--output", "new.toml", "--processes", "0"), 2, "--processes 0: expected a whole number from 1 up"),
    (("calibrate", "--output", "new.toml", "--seconds", "nan"), 2, "--seconds nan: expected a number of seconds above"),
    (("calibrate", "--output", "new.toml", "--largest", "many"), 2, "--largest: 'many' is not a size"),
    (("calibrate", "--output", "new.toml", "--like", "h10", "--processes", "1"), 2, "did you mean 'h100'?"),
    (("calibrate", "--output", "new.toml", "--times", "no/such/t.csv"), 2, "--times no/such/t.csv: there is no folder"),
]

# What only the model can tell, or a machine.
LATER: list[Case] = [
    *((("trace", f"targets.py:{name}"), code, says) for name, code, says in (
        ("nothing", 2, "returned NoneType; it should return (model, inputs)"),
        ("only_a_model", 2, "returned Linear; it should return (model, inputs)"),
        ("number", 2, "returned int as the model; it should be an nn.Module"),
        ("listed", 2, "returned a list of 1 as the inputs"),
        ("fails", 2, "the function failed: RuntimeError: no data here"),
        ("leaves", 2, "the function failed: SystemExit: 3"),
        ("too_many", 1, "the inputs do not fit Linear.forward(input): too many positional arguments"),
        ("branch", 1, "Branch cannot be traced: the control flow of the forward depends on the data in a tensor"),
        ("fials", 2, "has no function 'fials'; did you mean 'fails'?"),
    )),
    (("plan", "targets.py:nothing", *MESH), 2, "it should return (model, inputs)"),
    (("plan", "targets.py:branch", *MESH), 1, "cannot be traced"),
    (("plan", GPT, *MESH, "--layout", "bacth -> dp"), 2, "there is no dim 'bacth'; did you mean 'batch'?"),
    (("plan", GPT, *MESH, "--layout", "batch -> dq"), 2, "the names are dp, tp"),
    (("plan", GPT, "--mesh", "?", "--devices", "-4"), 2, "-4 devices: expected a whole number from 1 up"),
    (("plan", GPT, "--mesh", "?"), 2, "has open sizes and needs a number of devices"),
    (("explain", "targets.py:nothing", "x", *MESH), 2, "it should return (model, inputs)"),
    (("explain", GPT, "blocks.0.upp.weight", *MESH, *DDP), 2, "did you mean 'blocks.0.up.weight'?"),
    (("explain", "broken.lay", "x"), 2, "unknown key 'clutser' in the head of a plan; did you mean 'cluster'?"),
    (("explain", GPT, "ids", *MESH, *DDP, "--why-not", "bacth -> tp"), 2, "there is no dim 'bacth'"),
    (("compare", "ddp", "--target", "targets.py:fails", *MESH), 2, "the function failed"),
    (("compare", "broken.lay"), 2, "broken.lay:3 |"),
    (("compare", "bacth -> dp", "--target", GPT, *MESH), 2, "did you mean 'batch'?"),
    (("check", "targets.py:only_a_model", *MESH, *DDP), 2, "it should return (model, inputs)"),
    (("check", GPT, *MESH, *DDP, "--memory", "10kB"), 1, "no: a device holds "),
    (("check", GPT, *MESH, "--layout", "bacth -> dp"), 2, "did you mean 'batch'?"),
    (("report", "targets.py:nothing", *MESH, "-o", "r.html"), 2, "it should return (model, inputs)"),
    (("report", GPT, "-o", "r.html"), 2, "no mesh for"),
    (("report", "broken.lay", "-o", "r.html"), 2, "unknown key 'clutser' in the head of a plan"),
    (("report", GPT, *MESH, "--layout", "batch -> dq", "-o", "r.html"), 2, "the names are dp, tp"),
    (("calibrate", "--output", "new.toml", "--processes", "1"), 2, "1 process has no links to measure\nfix: "),
]  # fmt: skip
