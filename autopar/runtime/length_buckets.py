"""Batches padded to one of a few lengths, with masks and labels that keep the loss and the gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from autopar.errors import AutoparError

__all__ = ["pad_to_lengths"]

# Ids that a model reads; those of a decoder may have another length.
IDS = ("input_ids", "decoder_input_ids")
# Value of the padding by name, as models of transformers read it: a loss ignores targets of -100.
FILLS: Mapping[str, float] = MappingProxyType(
    {
        **dict.fromkeys(IDS, 0),
        "attention_mask": 0,
        "decoder_attention_mask": 0,
        "token_type_ids": 0,
        "position_ids": 0,
        "inputs_embeds": 0,
        "labels": -100,
    }
)


def pad_to_lengths(
    batch: Mapping[str, Any], lengths: Sequence[int], *, fill: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """Pad the sequences of a batch on the right to the next of a few lengths; loss and gradients stay as they are.

    Few lengths are few compiled calls. Padded positions are masked, and their labels are ignored. A batch without an
    `attention_mask` gets one.

    Parameters:
        batch: inputs of a call, by name, as a collator of transformers gives them. Dim 1 is the sequence.
        lengths: the lengths to pad to. The sequences of an encoder and a decoder take one each.
        fill: value of the padding by name, beside or in place of the usual ones: 0 for ids and masks, -100 for labels.

    Returns:
        A dict of the padded tensors. Other entries, and tensors of one dim, are left as they are.

    >>> import autopar, torch
    >>> batch = {"input_ids": torch.ones(2, 5, dtype=torch.long), "labels": torch.ones(2, 5, dtype=torch.long)}
    >>> padded = autopar.pad_to_lengths(batch, [8, 16])
    >>> padded["labels"][0].tolist()
    [1, 1, 1, 1, 1, -100, -100, -100]
    >>> padded["attention_mask"][0].tolist()
    [1, 1, 1, 1, 1, 0, 0, 0]
    """
    fills = {**FILLS, **(fill or {})}
    found = dict(batch)
    ids = found.get("input_ids", found.get("inputs_embeds"))
    if ids is not None and found.get("attention_mask") is None:
        found["attention_mask"] = torch.ones(ids.shape[:2], dtype=torch.long, device=ids.device)
    own = {found[name].shape[1] for name in (*IDS, "inputs_embeds") if found.get(name) is not None}
    return {name: _padded(name, value, lengths, fills, own) for name, value in found.items()}


def _padded(name: str, value: Any, lengths: Sequence[int], fills: Mapping[str, float], own: set[int]) -> Any:
    """Return an entry of a batch, padded if it has a sequence; `own` are the lengths of the ids."""
    if not isinstance(value, Tensor) or value.ndim < 2:
        return value
    # Labels of several classes for each sample are numbers, and have no sequence.
    if name not in fills or (name == "labels" and value.is_floating_point()):
        if value.shape[1] in own and name not in fills:
            raise AutoparError(
                f"{name} may have a sequence of {value.shape[1]}, and its padding has no value\n"
                f"fix: fill={{{name!r}: 0}}, or the value that the model ignores"
            )
        return value
    if name.endswith("mask") and value.ndim > 2:
        raise AutoparError(
            f"wrong mask {name}: expected one number for each position, got the shape {list(value.shape)}\n"
            "fix: give the mask of the positions, from which the model makes that of the attention"
        )
    length = value.shape[1]
    target = min((one for one in lengths if one >= length), default=None)
    if target is None:
        raise AutoparError(
            f"{name} has a sequence of {length}: expected at most {max(lengths, default=0)}, the longest of lengths=\n"
            "fix: add a longer one, or cut the batch"
        )
    # `pad` counts from the last dim.
    return pad(value, (0, 0) * (value.ndim - 2) + (0, target - length), value=fills[name])
