"""From a plain module to an ONNX file, which is compared with torch before it gets its name.

Attention and experts of transformers are switched to their eager implementations first: torch's fused kernels
have no counterpart in ONNX that is correct for all shapes.
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
SEPARATE_BYTES = 3 * 2**29  # more weights go to a second file: a protobuf message has at most 2 GiB
TOLERANCE = 1e-4  # of the largest value, in fp32; another order of summation stays far below it


@dataclass(frozen=True)
class ExportRequest:
    """A file, an example batch, which of its axes may have any size, and whether to compare."""

    target: Path
    inputs: dict[str, torch.Tensor]
    axes: Axes
    check: bool


def default_axes(inputs: Mapping[str, torch.Tensor]) -> Axes:
    """Batch and sequence; inputs of a decoder have a sequence length of their own."""
    axes: dict[str, dict[int, str]] = {}
    for name, value in inputs.items():
        axes[name] = {0: "batch"} if value.ndim else {}
        if value.ndim == 2 and not value.is_floating_point():
            axes[name][1] = "decoder_sequence" if name.startswith("decoder_") else "sequence"
    return axes


def prepare(request: ExportRequest) -> None:
    """All checks that need no computation."""
    for library in ("onnx", "onnxscript", *(("onnxruntime",) if request.check else ())):
        need(library, "onnx")
    target = request.target
    if not target.parent.is_dir():
        raise CheckpointError(f"there is no folder {str(target.parent)!r}", "Make it, or write elsewhere.")
    for path in (target, target.with_name(target.name + ".data")):
        if os.path.lexists(path):
            raise CheckpointError(f"{str(path)!r} exists; it was left as it is", "Write to another file.")
    for name, axes in request.axes.items():
        if name not in request.inputs or any(not 0 <= a < request.inputs[name].ndim for a in axes):
            raise OptionError(f"axes names {name!r} {dict(axes)}", "Name inputs, and axes that they have.")


def write(model: nn.Module, request: ExportRequest) -> list[str]:
    """Written to a hidden folder first, so that a file under its name is complete. The model is changed."""
    target = request.target
    work = target.parent / f".{target.name}.exporting-{secrets.token_hex(8)}"
    try:
        work.mkdir()
    except OSError as error:
        raise files.failed(f"cannot write to {str(target.parent)!r}", error) from error
    try:
        size = sum(p.numel() * p.element_size() for p in (*model.parameters(), *model.buffers()))
        wrapped = Wrapped(_with_plain_kernels(model.eval()), tuple(request.inputs))
        program = _program(wrapped, request)
        made = work / target.name
        program.save(str(made), external_data=size > SEPARATE_BYTES)
        lines = _lines(wrapped, program, request, sum(part.stat().st_size for part in work.iterdir()))
        if request.check:
            lines.append(_compared(wrapped, made, request))
        prepare(request)  # another process may have written there meanwhile
        for part in sorted(work.iterdir(), key=lambda path: path == made):
            part.rename(target.parent / part.name)  # the weights first, then the file that refers to them
    except OSError as error:
        raise files.failed(f"cannot write {str(target)!r}", error) from error
    finally:
        for part in work.iterdir():
            part.unlink()
        work.rmdir()
    return lines


def _with_plain_kernels(model: Any) -> Any:
    """transformers has several implementations of these; other models have no choice."""
    for choose, plain in (("set_attn_implementation", "eager"), ("set_experts_implementation", "batched_mm")):
        with contextlib.suppress(AttributeError, ValueError, NotImplementedError):
            getattr(model, choose)(plain)
    return model


# ---- the graph


class Wrapped(nn.Module):
    """Named inputs in, tensors out; of a Hugging Face model its predictions, without caches."""

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
        results = tuple(tensors_in(output if self.result is None else getattr(output, self.result)))
        return results[0] if len(results) == 1 else results

    def _output(self, values: Sequence[torch.Tensor]) -> Any:
        return self.model(**dict(zip(self.names, values, strict=True)), **self.extra)

    def output_names(self, values: Sequence[torch.Tensor]) -> list[str]:
        """Names of the results that are written, found by one run of the model."""
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


def _program(wrapped: Wrapped, request: ExportRequest) -> Any:
    values = tuple(request.inputs.values())
    named = wrapped.output_names(values)
    dims = {n: torch.export.Dim(n) for axes in request.axes.values() for n in axes.values()}
    shapes = tuple({a: dims[n] for a, n in request.axes.get(name, {}).items()} for name in request.inputs)
    try:
        with _quiet(), torch.no_grad():
            return torch.onnx.export(
                wrapped,
                values,
                dynamo=True,
                dynamic_shapes={"values": shapes},
                input_names=list(request.inputs),
                output_names=named,
                verbose=False,
            )
    except Exception as error:
        raise NotSupported(
            f"torch's exporter cannot write {type(wrapped.model).__name__} as ONNX: {_reason(str(error))}",
            "Its own error, above, names the place. A graph cannot branch on values, and holds only tensors.",
        ) from error


def _reason(text: str) -> str:
    """The line of the exporter's long message that follows its summary."""
    lines = [
        line.strip() for line in text.partition("Exception summary")[2].splitlines() or text.splitlines()
    ]
    return next((line for line in lines if line), "no reason given")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The exporter warns about missing libraries and about its own internals."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir", "torch.export")]
    before = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, before, strict=True):
                logger.setLevel(level)


def _lines(wrapped: Wrapped, program: Any, request: ExportRequest, size: int) -> list[str]:
    def shape(name: str, value: torch.Tensor) -> str:
        axes = request.axes.get(name, {})
        return f"{name} ({', '.join(axes.get(a, str(n)) for a, n in enumerate(value.shape))})"

    kind, opset = type(wrapped.model).__name__, program.model.opset_imports.get("", "?")
    inputs = ", ".join(shape(name, value) for name, value in request.inputs.items())
    outputs = ", ".join(str(value.name) for value in program.model.graph.outputs)
    return [
        f"{printable(str(request.target))}: {kind}, {as_bytes_text(size)}, opset {opset}",
        f"  inputs {inputs}; outputs {outputs}",
    ]


# ---- the check


def _compared(wrapped: Wrapped, made: Path, request: ExportRequest) -> str:
    runtime = need("onnxruntime", "onnx")
    try:
        session = runtime.InferenceSession(str(made), providers=["CPUExecutionProvider"])
    except Exception as error:
        raise ModelError(f"onnxruntime does not load the exported file: {error}") from error
    names = [value.name for value in session.get_outputs()]
    worst, batches = 0.0, list(_batches(request))
    for inputs in batches:
        with torch.no_grad():
            of_torch = list(tensors_in(wrapped(*inputs.values())))
        try:
            of_onnx = session.run(None, {name: value.numpy() for name, value in inputs.items()})
        except Exception as error:
            raise ModelError(f"onnxruntime does not run the exported file: {error}") from error
        for name, expected, actual in zip(names, of_torch, of_onnx, strict=True):
            worst = max(
                worst, _difference(name, expected, torch.from_numpy(actual), inputs.get("attention_mask"))
            )
    return (
        f"  checked with onnxruntime {runtime.__version__} on {len(batches)} batches: it differs by "
        f"{worst:.1e} of the largest value"
    )


def _batches(request: ExportRequest) -> Iterator[dict[str, torch.Tensor]]:
    """The example; its last row alone; and the second half of every axis of variable size."""
    yield request.inputs
    cuts: list[Callable[[str, int], int]] = [
        lambda name, n: n - 1 if name == "batch" else 0,
        lambda _, n: n // 2,
    ]
    for cut in cuts if any(request.axes.values()) else ():
        starts = {
            name: {a: cut(n, request.inputs[name].shape[a]) for a, n in axes.items()}
            for name, axes in request.axes.items()
        }
        yield {name: _cut(value, starts.get(name, {})) for name, value in request.inputs.items()}


def _cut(value: torch.Tensor, starts: dict[int, int]) -> torch.Tensor:
    for axis, start in starts.items():
        value = value.narrow(axis, start, value.shape[axis] - start)
    return value.contiguous()


def _difference(name: str, expected: torch.Tensor, actual: torch.Tensor, mask: torch.Tensor | None) -> float:
    """Relative to the largest value. Values at masked positions have no meaning, and are left out."""
    if expected.shape != actual.shape:
        raise ModelError(
            f"{name} has shape {tuple(actual.shape)} in ONNX and {tuple(expected.shape)} in torch"
        )
    if mask is not None and expected.shape[:2] == mask.shape:
        expected, actual = expected[mask.bool()], actual[mask.bool()]
    if not expected.numel():
        return 0.0
    expected, actual = expected.double(), actual.double()
    apart = float((expected - actual).abs().max()) / max(1e-3, float(expected.abs().max()))
    if not apart <= TOLERANCE:
        raise ModelError(
            f"{name} of the ONNX model differs from torch by {apart:.1e} of its largest value",
            "Nothing was written. Does its forward take one path for all batches, without random numbers?",
        )
    return apart
