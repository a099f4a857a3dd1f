"""Loads what an optimizer keeps that belongs to no parameter.

State under other keys than parameters, such as MADGRAD's count of steps, and what a class adds to its state
dict, which its own `load_state_dict` takes back.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from fullshard.checkpoint.loading.planning import LoadPlan, listed
from fullshard.checkpoint.loading.reading import DAMAGED
from fullshard.checkpoint.loading.resume import FIRST_FILE, Resume
from fullshard.errors import CheckpointError, DamagedCheckpoint
from fullshard.state.optimizer_state import load_other_entries, other_entries, other_state
from fullshard.state.tensor_subclasses import put_together


class OtherState:
    """Plans, then applies, the values of a saved optimizer that belong to no parameter."""

    def __init__(self, resume: Resume, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
        self._resume, self._optimizer, self._saved = resume, optimizer, saved
        self._state: dict[Any, Any] | None = None
        self._entries: dict[Any, Any] | None = None  # of the state dict

    def plan(self, work: LoadPlan) -> None:
        self._state, self._entries = self._read("other_state"), self._read("state_dict")
        if self._state is None:
            self._note(work, "state", other_state(self._optimizer))
        if self._entries is None:
            self._note(work, "entries of the state dict", other_entries(self._optimizer))

    def apply(self) -> None:
        """After the state of parameters, which `load_state_dict` of the class may look at."""
        state: dict[Any, Any] = self._optimizer.state
        if self._state is not None:
            for key in other_state(self._optimizer):
                del state[key]
            state.update(self._state)
        if not self._entries:
            return
        name, keys = type(self._optimizer).__name__, listed([str(key) for key in self._entries])
        try:
            load_other_entries(self._optimizer, self._entries)
        except Exception as error:  # the optimizer's own code
            raise CheckpointError(
                f"{name}.load_state_dict raised {type(error).__name__} for what its state_dict() held under "
                f"{keys}: {str(error)[:200]}",
                "Build the optimizer as in the run that saved, or load without it.",
            ) from error

    def _note(self, work: LoadPlan, what: str, keys: Iterable[Any]) -> None:
        """For a checkpoint of another library, or of an earlier version, which did not have them."""
        missing = [str(key) for key in keys]
        if missing:
            name = type(self._optimizer).__name__
            work.notes.append(
                f"{what} {listed(missing)} of {name} are not in the checkpoint: left as they were"
            )

    def _read(self, kind: str) -> dict[Any, Any] | None:
        saved = self._saved.get(kind)
        if saved is None:
            return None
        found: dict[Any, Any] = {}
        try:
            for one in saved:
                device = device_of(one, self._resume.runtime.comm.device)
                value = moved(self._resume.decode(one["value"], FIRST_FILE), device, device)
                found[self._resume.decode(one["key"], FIRST_FILE)] = put_together(value)
        except (AttributeError, KeyError, TypeError):
            raise DamagedCheckpoint(f"{kind!r} of the optimizer is malformed", DAMAGED) from None
        return found


def device_of(entry: dict[str, Any], device: torch.device) -> torch.device:
    """Where the tensors of an entry are: on the host, or on this device."""
    return torch.device("cpu") if entry.get("device") == "host" else device


def moved(value: Any, top: torch.device, device: torch.device) -> Any:
    """Tensors of a decoded state on their devices: one that is the value itself, and those inside it."""
    if isinstance(value, torch.Tensor):
        return value.to(top)
    if isinstance(value, list | tuple):
        return type(value)(moved(item, device, device) for item in value)
    if isinstance(value, dict):
        return {key: moved(item, device, device) for key, item in value.items()}
    return value
