"""Every mistake a user can make raises a subclass of `AutoparError` that shows the place and the fix."""

from __future__ import annotations

__all__ = [
    "AutoparError",
    "AutoparWarning",
    "ClusterError",
    "DimsError",
    "LayoutError",
    "MeshError",
    "ModuleAttributeError",
    "RuleError",
    "TargetError",
    "TraceError",
    "VerifyError",
]


class AutoparError(Exception):
    """Base of all errors that autopar raises about what it was given."""


class ModuleAttributeError(AutoparError, AttributeError):
    """A parallel module has not all that the model has; names what it is and where to get it."""


class TraceError(AutoparError):
    """The model cannot be traced; names the line of the user's model, and a fix."""


class RuleError(AutoparError):
    """A rule does not parse, or does not fit the op it is bound to; shows the rule and the operands."""


class DimsError(AutoparError):
    """Names given to dims (`dims=`, `autopar.named`, annotations) do not fit the tensors they are given for."""


class TargetError(AutoparError):
    """A TARGET of the command line (`file.py:function`) cannot be loaded or does not return `(model, inputs)`."""


class MeshError(AutoparError):
    """A device mesh is not written as one, or is asked for an axis or a rank that it lacks."""


class ClusterError(AutoparError):
    """A cluster's file is wrong or a cluster is unknown, or a mesh does not fit on one; shows the line."""


class VerifyError(AutoparError):
    """The processes of `autopar verify` could not be compared: what the first of them said."""


class LayoutError(AutoparError):
    """A layout is not in the layout language or does not fit the model; `code`: E0 to E7, of docs/language.md."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(code, text)
        self.code = code

    def __str__(self) -> str:
        text: str = self.args[1]
        return text


class AutoparWarning(UserWarning):
    """Something works, but not as well as it could: an op without a rule, for instance."""
