"""Import the modules of the ranks in the server process that `tests/runtime/launcher.py` forks the ranks from.

A rank that is forked has these modules at once; to import them takes each rank a second and more. Nothing here may run
an op: the server must have no threads and no state that a test could see.
"""

from __future__ import annotations

import gc
import importlib
import pkgutil

import ortools.sat.python.cp_model  # noqa: F401
import torch._dynamo
import torch._functorch.aot_autograd
import torch._inductor.compile_fx
import torch.distributed.tensor  # noqa: F401

import autopar

for module in pkgutil.walk_packages(autopar.__path__, "autopar."):
    if module.name != "autopar.__main__":
        importlib.import_module(module.name)

# A collection writes into each object, and the kernel copies a page that is written for each rank.
gc.collect()
gc.freeze()
