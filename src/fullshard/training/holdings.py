"""What a rank holds: bytes of tensors between steps, and the memory of its process or GPU."""

from __future__ import annotations

import resource
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from fullshard.plan.plan import Plan


@dataclass(frozen=True)
class Holdings:
    """Bytes held between steps."""

    parameters: int
    gradients: int
    optimizer_state: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer_state

    def as_dict(self) -> dict[str, int]:
        return asdict(self) | {"total": self.total}


def at_rest(model: nn.Module, optimizer: torch.optim.Optimizer) -> Holdings:
    """What this rank holds, counted tensor by tensor."""
    states = [value for state in optimizer.state.values() for value in state.values()]
    return Holdings(
        parameters=sum(_bytes(p) for p in model.parameters()),
        gradients=sum(_bytes(p.grad) for p in model.parameters() if p.grad is not None),
        optimizer_state=sum(_bytes(value) for value in states if isinstance(value, Tensor)),
    )


def of_one_process(plan: Plan, num_tensors: int) -> Holdings:
    """What one unsharded process would hold: all values and gradients, Adam's moments and step counts."""
    lanes = [lane for unit in plan.units for lane in unit.lanes]
    size = sum(lane.layout.num_elements * lane.dtypes.rest.itemsize for lane in lanes)
    trained = sum(lane.layout.num_elements * lane.dtypes.rest.itemsize for lane in lanes if lane.trainable)
    return Holdings(size, trained, 2 * trained + 4 * num_tensors)


def _bytes(tensor: Tensor) -> int:
    return tensor.nbytes  # of state in 8-bit blocks, these


def memory_now(device: torch.device) -> int:
    """Bytes in use now: allocated on this rank's GPU, or resident in its process."""
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:  # not Linux
        return memory_peak(device)


def memory_peak(device: torch.device) -> int:
    """The peak of the same so far."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
