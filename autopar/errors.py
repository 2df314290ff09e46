"""Every mistake a user can make raises a subclass of `AutoparError` that shows the place and the fix."""

from __future__ import annotations

__all__ = ["AutoparError", "AutoparWarning", "DimsError", "RuleError", "TargetError", "TraceError"]


class AutoparError(Exception):
    """Base of all errors that autopar raises about what it was given."""


class TraceError(AutoparError):
    """The model cannot be traced; names the line of the user's model and what to do."""


class RuleError(AutoparError):
    """A rule does not parse, or does not fit the op it is bound to; shows the rule and the operands."""


class DimsError(AutoparError):
    """Names given to dims (`dims=`, `autopar.named`, annotations) do not fit the tensors they are given for."""


class TargetError(AutoparError):
    """A TARGET of the command line (`file.py:function`) cannot be loaded or does not return `(model, inputs)`."""


class AutoparWarning(UserWarning):
    """Something works, but not as well as it could: an op without a rule, for instance."""
