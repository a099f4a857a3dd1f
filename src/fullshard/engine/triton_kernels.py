"""Kernels written for triton, which is imported when the first CUDA tensor comes."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch


def compile_kernels(module: dict[str, Any], *kernels: Callable[..., None]) -> list[Any] | None:
    """Kernels of a module, whose global names these are; None where triton is missing."""
    try:
        triton = importlib.import_module("triton")
    except ImportError:
        return None
    module["tl"] = importlib.import_module("triton.language")  # kernels look it up under this name
    return [triton.jit(kernel) for kernel in kernels]


def launch(kernel: Any, grid: tuple[int, ...], options: dict[str, Any], *arguments: Any) -> None:
    """On the device of the first argument: triton itself takes the current one."""
    device = arguments[0].get_device()
    if device == torch.cuda.current_device():
        kernel[grid](*arguments, **options)
    else:
        with torch.cuda.device(device):
            kernel[grid](*arguments, **options)
