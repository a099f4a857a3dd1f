"""The random number generators of this process, as a plain value."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def capture(device: torch.device) -> dict[str, Any]:
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def check(state: dict[str, Any], device: torch.device) -> None:
    """Raise the errors that `restore` would, without changing a generator that is in use."""
    torch.Generator().set_state(state["torch"])
    random.Random().setstate(state["python"])
    np.random.RandomState().set_state(state["numpy"])
    if device.type == "cuda" and "cuda" in state:
        torch.Generator(device).set_state(state["cuda"])


def restore(state: dict[str, Any], device: torch.device) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
