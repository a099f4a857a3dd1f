"""From a plain module to an ONNX file that was compared with torch before it got its name.

A graph has one way to compute, so attention and experts of transformers are written out plainly first:
torch's fused kernels for them have no counterpart in ONNX that is right for all shapes.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import secrets
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullshard.checkpoint import files
from fullshard.checkpoint.tools.report import as_bytes_text, printable
from fullshard.engine.tensors import tensors_in
from fullshard.errors import CheckpointError, ModelError, NotSupported, OptionError
from fullshard.extras import need

Axes = Mapping[str, Mapping[int, str]]
SEPARATE_BYTES = 3 * 2**29  # weights beyond this lie beside the file: a protobuf message ends at 2 GiB
TOLERANCE = 1e-4  # of the largest value, in fp32; other orders of summation stay far below it


@dataclass(frozen=True)
class Wanted:
    """A file, an example batch, which of its axes may have any size, and whether to compare."""

    target: Path
    inputs: dict[str, torch.Tensor]
    axes: Axes
    check: bool


def default_axes(inputs: Mapping[str, torch.Tensor]) -> Axes:
    """Batch and sequence. Those of a decoder are as many, but of another length."""
    found: dict[str, dict[int, str]] = {}
    for name, value in inputs.items():
        found[name] = {0: "batch"} if value.ndim else {}
        if value.ndim == 2 and not value.is_floating_point():
            found[name][1] = "decoder_sequence" if name.startswith("decoder_") else "sequence"
    return found


def prepare(wanted: Wanted) -> None:
    """Everything that can be told before anything is computed."""
    for library in ("onnx", "onnxscript", *(("onnxruntime",) if wanted.check else ())):
        need(library, "onnx")
    target = wanted.target
    if not target.parent.is_dir():
        raise CheckpointError(f"there is no folder {str(target.parent)!r}", "Make it, or write elsewhere.")
    for path in (target, target.with_name(target.name + ".data")):
        if os.path.lexists(path):
            raise CheckpointError(f"{str(path)!r} exists; it was left as it is", "Write to another file.")
    for name, axes in wanted.axes.items():
        if name not in wanted.inputs or any(not 0 <= a < wanted.inputs[name].ndim for a in axes):
            raise OptionError(f"axes names {name!r} {dict(axes)}", "Name inputs, and axes that they have.")


def write(model: nn.Module, wanted: Wanted) -> list[str]:
    """To a hidden folder first: a name that is there is a file that is complete. The model is changed."""
    target = wanted.target
    work = target.parent / f".{target.name}.exporting-{secrets.token_hex(8)}"
    try:
        work.mkdir()
    except OSError as error:
        raise files.failed(f"cannot write to {str(target.parent)!r}", error) from error
    try:
        size = sum(p.numel() * p.element_size() for p in (*model.parameters(), *model.buffers()))
        wrapped = Wrapped(_written_out(model.eval()), tuple(wanted.inputs))
        program = _program(wrapped, wanted)
        made = work / target.name
        program.save(str(made), external_data=size > SEPARATE_BYTES)
        lines = _lines(wrapped, program, wanted, sum(part.stat().st_size for part in work.iterdir()))
        if wanted.check:
            lines.append(_compared(wrapped, made, wanted))
        prepare(wanted)  # somebody may have put something there meanwhile
        for part in sorted(work.iterdir(), key=lambda path: path == made):
            part.rename(target.parent / part.name)  # the weights first: the file that needs them comes last
    except OSError as error:
        raise files.failed(f"cannot write {str(target)!r}", error) from error
    finally:
        for part in work.iterdir():
            part.unlink()
        work.rmdir()
    return lines


def _written_out(model: Any) -> Any:
    """transformers has these in several ways; in other models there is nothing to choose."""
    for choose, plain in (("set_attn_implementation", "eager"), ("set_experts_implementation", "batched_mm")):
        with contextlib.suppress(AttributeError, ValueError, NotImplementedError):
            getattr(model, choose)(plain)
    return model


# ---- the graph


class Wrapped(nn.Module):
    """Named inputs in, tensors out; of a Hugging Face model what it predicts, and no caches."""

    def __init__(self, model: Any, names: Sequence[str]) -> None:
        super().__init__()
        self.model, self.names = model, tuple(names)
        forward = inspect.signature(model.forward).parameters
        missing = [name for name in names if name not in forward] if "kwargs" not in forward else []
        if missing:
            raise OptionError(f"forward takes no {missing[0]!r}", f"It takes {', '.join(forward)}.")
        self.extra = {"use_cache": False} if "use_cache" in forward else {}
        self.result: str | None = None

    def forward(self, *values: torch.Tensor) -> Any:
        output = self._output(values)
        found = tuple(tensors_in(output if self.result is None else getattr(output, self.result)))
        return found[0] if len(found) == 1 else found

    def _output(self, values: Sequence[torch.Tensor]) -> Any:
        return self.model(**dict(zip(self.names, values, strict=True)), **self.extra)

    def output_names(self, values: Sequence[torch.Tensor]) -> list[str]:
        """By one run of the model: which of its results are written."""
        with torch.no_grad():
            output = self._output(values)
        self.result = next((n for n in ("logits", "last_hidden_state") if _has(output, n)), None)
        if self.result is not None:
            return [self.result]
        count = len(list(tensors_in(output)))
        if not count:
            raise NotSupported(
                f"{type(self.model).__name__} returns no tensor", "There is nothing to export."
            )
        return ["output"] if count == 1 else [f"output_{i}" for i in range(count)]


def _has(output: Any, name: str) -> bool:
    return isinstance(getattr(output, name, None), torch.Tensor)


def _program(wrapped: Wrapped, wanted: Wanted) -> Any:
    values = tuple(wanted.inputs.values())
    named = wrapped.output_names(values)
    dims = {n: torch.export.Dim(n) for axes in wanted.axes.values() for n in axes.values()}
    shapes = tuple({a: dims[n] for a, n in wanted.axes.get(name, {}).items()} for name in wanted.inputs)
    try:
        with _quiet(), torch.no_grad():
            return torch.onnx.export(
                wrapped,
                values,
                dynamo=True,
                dynamic_shapes={"values": shapes},
                input_names=list(wanted.inputs),
                output_names=named,
                verbose=False,
            )
    except Exception as error:
        raise NotSupported(
            f"torch's exporter cannot write {type(wrapped.model).__name__} as ONNX: {_reason(str(error))}",
            "Its own error, above, says where. A graph cannot branch on values, nor hold other than tensors.",
        ) from error


def _reason(text: str) -> str:
    """The exporter explains itself at length; what went wrong stands behind its summary."""
    lines = [
        line.strip() for line in text.partition("Exception summary")[2].splitlines() or text.splitlines()
    ]
    return next((line for line in lines if line), "no reason given")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The exporter warns of libraries that are not there and of its own insides."""
    loud = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir", "torch.export")]
    before = [logger.level for logger in loud]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loud:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loud, before, strict=True):
                logger.setLevel(level)


def _lines(wrapped: Wrapped, program: Any, wanted: Wanted, size: int) -> list[str]:
    def shape(name: str, value: torch.Tensor) -> str:
        axes = wanted.axes.get(name, {})
        return f"{name} ({', '.join(axes.get(a, str(n)) for a, n in enumerate(value.shape))})"

    kind, opset = type(wrapped.model).__name__, program.model.opset_imports.get("", "?")
    inputs = ", ".join(shape(name, value) for name, value in wanted.inputs.items())
    outputs = ", ".join(str(value.name) for value in program.model.graph.outputs)
    return [
        f"{printable(str(wanted.target))}: {kind}, {as_bytes_text(size)}, opset {opset}",
        f"  inputs {inputs}; outputs {outputs}",
    ]


# ---- the check


def _compared(wrapped: Wrapped, made: Path, wanted: Wanted) -> str:
    runtime = need("onnxruntime", "onnx")
    try:
        session = runtime.InferenceSession(str(made), providers=["CPUExecutionProvider"])
    except Exception as error:
        raise ModelError(f"onnxruntime does not load what was exported: {error}") from error
    names = [value.name for value in session.get_outputs()]
    worst, batches = 0.0, list(_batches(wanted))
    for inputs in batches:
        with torch.no_grad():
            expected = list(tensors_in(wrapped(*inputs.values())))
        try:
            found = session.run(None, {name: value.numpy() for name, value in inputs.items()})
        except Exception as error:
            raise ModelError(f"onnxruntime does not run what was exported: {error}") from error
        for name, want, got in zip(names, expected, found, strict=True):
            worst = max(worst, _difference(name, want, torch.from_numpy(got), inputs.get("attention_mask")))
    return (
        f"  checked with onnxruntime {runtime.__version__} on {len(batches)} batches: it differs by "
        f"{worst:.1e} of the largest value"
    )


def _batches(wanted: Wanted) -> Iterator[dict[str, torch.Tensor]]:
    """The example; its last row alone; and of every axis that may have any size the second half."""
    yield wanted.inputs
    cuts: list[Callable[[str, int], int]] = [
        lambda name, n: n - 1 if name == "batch" else 0,
        lambda _, n: n // 2,
    ]
    for cut in cuts if any(wanted.axes.values()) else ():
        starts = {
            name: {a: cut(n, wanted.inputs[name].shape[a]) for a, n in axes.items()}
            for name, axes in wanted.axes.items()
        }
        yield {name: _cut(value, starts.get(name, {})) for name, value in wanted.inputs.items()}


def _cut(value: torch.Tensor, starts: dict[int, int]) -> torch.Tensor:
    for axis, start in starts.items():
        value = value.narrow(axis, start, value.shape[axis] - start)
    return value.contiguous()


def _difference(name: str, want: torch.Tensor, got: torch.Tensor, mask: torch.Tensor | None) -> float:
    """Of the largest value. What stands at masked places means nothing, in torch either."""
    if want.shape != got.shape:
        raise ModelError(f"{name} has shape {tuple(got.shape)} in ONNX and {tuple(want.shape)} in torch")
    if mask is not None and want.shape[:2] == mask.shape:
        want, got = want[mask.bool()], got[mask.bool()]
    if not want.numel():
        return 0.0
    want, got = want.double(), got.double()
    apart = float((want - got).abs().max()) / max(1e-3, float(want.abs().max()))
    if not apart <= TOLERANCE:
        raise ModelError(
            f"{name} of the ONNX model differs from torch by {apart:.1e} of its largest value",
            "Nothing was written. Does its forward take one path for all batches, without random numbers?",
        )
    return apart
