"""What an integration hands in with a model: how each unit is treated, beyond the options of the run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fullshard.precision import Precision

Initializer = Callable[[], Any]
Casts = tuple[torch.dtype | None, torch.dtype | None]  # of floating point inputs and outputs; None: no cast


@dataclass(frozen=True)
class UnitPolicy:
    """How one unit is treated. None stands for the options of the run."""

    precision: Precision | None = None
    stays_full: bool | None = None  # from forward to backward; None: the schedule decides
    casts: Casts | None = None
    divisor: float | None = None  # of gradient sums; None: the number of ranks that took part
    zero_unused: bool = False  # parameters that no rank used get zeros, where others of their lane were used
    offload: bool = True  # False: its values rest on the compute device, whatever the option `offload` is
    direct_bytes: int | None = None  # weight gradients from this size on are written where they are sent from


class ValueSource:
    """Where the tensors of a meta-device model get their values; see `state.value_sources`."""

    reaches_inside = False  # its initializers may change the modules inside the one that they are for
    leaves_blank = False  # it sets nothing: values follow later, and none is missing now

    def prepare(self) -> None:
        """Before the model is looked at."""

    def restore(self) -> None:
        """Undo `prepare`: the model could not be sharded."""

    def order(self, model: nn.Module) -> Iterable[nn.Module]:
        """All modules, in the order in which those of one unit are initialised."""
        return model.modules()

    def initializers(self, module: nn.Module) -> Sequence[Initializer]:
        """They set the module's own tensors. Each is called only if the ones before it left some unset."""
        raise NotImplementedError

    def containers(self, fresh: Collection[nn.Module]) -> list[nn.Module]:
        """Modules without parameters that are initialised together with the modules inside, all `fresh`."""
        return []

    def of_container(self, module: nn.Module) -> Initializer | None:
        """Called when all modules inside have values."""
        return None


@dataclass(frozen=True)
class Integration:
    """What torch's signatures, Hugging Face or Lightning need beyond the options of `fs.shard`."""

    values: ValueSource | None = None  # None: the option `materialize`, or the modules' own initializers
    policy_of: Callable[[nn.Module], UnitPolicy] | None = None  # called with the first module of each unit
    # An optimizer that holds parameters of the model must hold no others: they would train on one rank alone.
    exclusive_optimizers: bool = True
    # Called with each sharded parameter, gradient and state dict value, its lane, and its index there.
    present: Callable[[torch.Tensor, Any, int], None] | None = None


DEFAULT_POLICY = UnitPolicy()
NO_INTEGRATION = Integration()
