"""Why a step of a model cannot be traced on the meta device, and what to do about it."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from fullshard.errors import OptionError

Source = Literal["size", "config", "function", "model"]  # where a model to plan comes from

# What torch says where an operator needs values that a meta tensor does not have.
_READS = (
    "cannot be called on meta tensors",
    "out of meta tensor",
    "on a meta tensor",
    "data-dependent",
    "aten::nonzero",
    "aten::_local_scalar_dense",
    "aten::equal",
    "'Meta' backend",
    "with arguments from the 'Meta'",
    "a correct data-independent implementation does not exist",
    "numpy() on tensor",
    "numpy conversion for",
)
_DEVICES = ("is not on the expected device", "Expected all tensors to be on the same device")
_TOO_MANY = ("Storage size calculation overflowed", "Overflow when unpacking long")
_OWN = Path(__file__).resolve().parent.parent
_SIMULATE = "fullshard simulate FILE.py:FUNCTION"
_WITHOUT_READING: dict[Source, str] = {
    "size": f"Measure a model of your own: {_SIMULATE}.",
    "config": f"Plan FILE.py:FUNCTION with a forward that reads none, or measure it: {_SIMULATE}.",
    "function": f"Write that part without them (torch.where), or measure it: {_SIMULATE}.",
    "model": "Leave out the batch, so that computing is estimated from the parameters, or give the options "
    "themselves.",
}
_RIGHT_BATCH: dict[Source, str] = {
    "size": "Report it with this message.",
    "config": "Plan FILE.py:FUNCTION, a function that returns (model, batch) with a batch that it takes.",
    "function": "Return a batch with which model(batch) runs.",
    "model": "Give fs.Planning(batch=...) what a rank's forward gets: a tensor, a tuple, or a dict of "
    "keyword arguments.",
}
_TO_TRAIN: dict[Source, str] = {
    "size": "Report it with this message.",
    "config": "Give --lora RANK, or FILE.py:FUNCTION with parameters that require gradients.",
    "function": "Return a model with parameters that require gradients.",
    "model": "Plan with the parameters that will train unfrozen, or give the options themselves.",
}


def refuse_frozen(name: str, model: nn.Module, source: Source) -> None:
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise OptionError(
            f"no parameter of {name} requires gradients: there is no step to plan", _TO_TRAIN[source]
        )


def explained(name: str, error: Exception, source: Source) -> OptionError:
    """An error of a forward or backward without values, by its cause."""
    text, where = in_one_line(error).rstrip("."), _place(error)
    at = f"{text} ({where})" if where else text
    if _reads_values(error):
        return OptionError(
            f"the forward of {name} does not run without values, on which its path depends: {at}",
            _WITHOUT_READING[source],
        )
    if any(one in text for one in _DEVICES):
        return OptionError(
            f"the forward of {name} makes tensors on another device than its input's: {at}",
            "Make them with device=input.device, or as buffers of the module.",
        )
    if "does not require grad" in text or "has no tensor to begin a backward from" in text:
        return OptionError(
            f"what {name} returns depends on no parameter that requires gradients: {at}", _TO_TRAIN[source]
        )
    if any(one in text for one in _TOO_MANY):
        return OptionError(
            f"a step of {name} with this batch has more elements than torch can count",
            "Give fewer sequences per rank (--batch), or shorter ones (--sequence).",
        )
    return OptionError(f"the forward of {name} fails with its batch: {at}", _RIGHT_BATCH[source])


def in_one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _reads_values(error: BaseException) -> bool:
    text = in_one_line(error)
    return any(one in text for one in _READS)


def _place(error: BaseException) -> str:
    """The innermost line that is neither torch's nor ours."""
    torchs = Path(torch.__file__).resolve().parent
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        if file.is_file() and not ({torchs, _OWN} & set(file.resolve().parents)):
            return f"{file.name}, line {frame.lineno}"
    return ""
