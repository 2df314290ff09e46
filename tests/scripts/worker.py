"""Run a training script as it is, and write the loss of each backward.

    python worker.py LOSSES STEPS DTYPE SCRIPT [ARGUMENT ...]

Random numbers begin at one seed. Dropout drops nothing, as it drops other numbers on one process than on many.
The script ends after STEPS backwards.
"""

from __future__ import annotations

import json
import os
import random
import runpy
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

STAND_INS = Path(__file__).parent / "stand_ins"
# Pictures and curves are not drawn.
DRAWING = (
    "matplotlib",
    "matplotlib.pyplot",
    "matplotlib.cm",
    "mpl_toolkits",
    "mpl_toolkits.mplot3d",
    "torch.utils.tensorboard",
)


class _Ended(BaseException):
    """Raised in the script after the last step that counts."""


def main() -> None:
    out, steps, dtype, script, *arguments = sys.argv[1:]
    losses: list[float] = []
    backward = Tensor.backward

    def recorded(loss: Tensor, *args: Any, **options: Any) -> None:
        Tensor.backward = backward  # type: ignore[method-assign]  # a loss that is late calls it again
        if len(losses) == int(steps):
            raise _Ended
        backward(loss, *args, **options)
        losses.append(float(loss.detach().sum()))
        Tensor.backward = recorded  # type: ignore[method-assign, assignment]

    def kept(x: Tensor, *_: Any, **__: Any) -> Tensor:
        return x

    Tensor.backward = recorded  # type: ignore[method-assign, assignment]
    for name in ("dropout", "dropout1d", "dropout2d", "alpha_dropout"):
        setattr(functional, name, kept)
    attention = functional.scaled_dot_product_attention

    def kept_scores(*args: Any, dropout_p: float = 0.0, **options: Any) -> Tensor:
        return attention(*args[:4], *([0.0] if len(args) > 4 else []), *args[5:], **options)

    functional.scaled_dot_product_attention = kept_scores
    rnn = nn.RNNBase.__init__

    def without_dropout(self: nn.RNNBase, *args: Any, **options: Any) -> None:
        rnn(self, *args, **{**options, "dropout": 0.0})

    nn.RNNBase.__init__ = without_dropout  # type: ignore[method-assign]
    torch.set_default_dtype(getattr(torch, dtype))
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    drawing = MagicMock()
    drawing.subplots.return_value = MagicMock(), MagicMock()
    drawing.pyplot = drawing
    sys.modules.update(dict.fromkeys(DRAWING, drawing))
    sys.path[:0] = [str(Path(script).parent.resolve()), str(STAND_INS)]
    sys.argv = [script, *arguments]
    try:
        runpy.run_path(script, run_name="__main__")
    except _Ended:
        pass
    except SystemExit as error:
        if error.code:
            raise
    if os.environ.get("RANK", "0") == "0":
        Path(out).write_text(json.dumps(losses))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
