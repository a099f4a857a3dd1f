"""The random number generators of this process, as a plain value."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def capture(device: torch.device) -> dict[str, Any]:
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": (version, np.array(words, dtype=np.uint32), gauss),
        "numpy": np.random.get_state(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def check(state: dict[str, Any], device: torch.device) -> None:
    """Raise the errors that `restore` would, without changing a generator that is in use."""
    torch.Generator().set_state(state["torch"])
    random.Random().setstate(_of_python(state))
    np.random.RandomState().set_state(state["numpy"])
    if device.type == "cuda" and "cuda" in state:
        torch.Generator(device).set_state(state["cuda"])


def restore(state: dict[str, Any], device: torch.device) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(_of_python(state))
    np.random.set_state(state["numpy"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def _of_python(state: dict[str, Any]) -> tuple[Any, ...]:
    """As Python takes it. Words are an array; earlier checkpoints have a tuple."""
    version, words, gauss = state["python"]
    return version, tuple(map(int, words)), gauss
