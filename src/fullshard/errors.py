"""Every exception the package raises, each with its remedy.

A message names the rank that raised it, what is wrong, where, and what to do about it.
"""

from __future__ import annotations

_own_rank = 0


def report_errors_as(rank: int) -> None:
    """Messages raised from now on begin with this rank."""
    global _own_rank
    _own_rank = rank


def unit_label(name: str) -> str:
    return f"unit {name!r}" if name else "the root unit"


class FullshardError(RuntimeError):
    """Base class of everything that fullshard raises on purpose."""

    def __init__(self, what: str, remedy: str = "") -> None:
        self.what = what
        self.remedy = remedy
        self.rank = _own_rank
        text = what.rstrip(".")
        super().__init__(f"rank {self.rank}: {text}. {remedy}".rstrip())

    def __reduce__(self) -> tuple[type[FullshardError], tuple[str, str]]:
        return type(self), (self.what, self.remedy)


class OptionError(FullshardError, ValueError):
    """An option that does not exist, or does not fit the others."""


class ModelError(FullshardError):
    """The model cannot be sharded as it is."""


class Uninitialised(ModelError):
    """Tensors of a meta-device model that nothing initialises."""


class RankMismatch(FullshardError):
    """Ranks disagree: about the model, its values, the options, or where they are."""


class Stalled(FullshardError):
    """An operation that the other ranks will never take part in."""


class StateError(FullshardError):
    """A call at a moment when it has no meaning."""


class AtRestError(FullshardError):
    """A parameter was computed with while it held only this rank's elements."""


class GradientError(FullshardError):
    """A gradient that is not finite, or a reduction of gradients that cannot be made global."""


class RolledBack(GradientError):
    """A step was rejected: started again, the run goes on from a checkpoint, without its batch."""


class OptimizerError(FullshardError):
    """An optimizer that cannot work on shards, or holds tensors that the model does not own."""


class CheckpointError(FullshardError):
    """A checkpoint that cannot be written, is damaged, or belongs to another model."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint that is incomplete, or whose bytes are not those that were written."""


class OffloadError(FullshardError):
    """Values that rest away from the compute device cannot be read or written, or do not fit."""


class NotSupported(FullshardError):
    """A torch feature that does not work on a sharded module."""


class MissingExtra(FullshardError, ImportError):
    """An optional library is missing, or is of a version that is not tested."""
