"""`torch.autograd.grad(loss, model.parameters())` and `loss.backward(inputs=...)`.

A graph holds the compute parameters, never the user's own: torch would take these for unused, and with
`allow_unused` return nothing. So the one function through which both calls go is wrapped. Where an input is a
sharded parameter, its compute parameter is differentiated, the engine reduces, and what it would assign to
`p.grad` is the result. Calls without such inputs pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fullshard.engine.optimizers import owner
from fullshard.engine.runtime import Runtime
from fullshard.errors import NotSupported, StateError

_INPUTS = 3  # position of `inputs` behind the outputs: gradients, retain_graph, create_graph, inputs
_FUNCTION = "_engine_run_backward"
_original: Any = getattr(torch.autograd, _FUNCTION, None)


def watch_inputs() -> None:
    """From now on inputs that are sharded parameters are seen; other calls pass."""
    if _original is not None:
        setattr(torch.autograd, _FUNCTION, _run_backward)


def _run_backward(t_outputs: Any, *args: Any, **kwargs: Any) -> Any:
    inputs = args[_INPUTS] if len(args) > _INPUTS else ()
    runtimes = _runtimes(inputs) if inputs else {}
    if not runtimes:
        return _original(t_outputs, *args, **kwargs)
    if args[_INPUTS - 1]:
        raise NotSupported(
            "create_graph=True with respect to sharded parameters",
            "Run it on a model that is not sharded, or compute higher derivatives with respect to inputs.",
        )
    if any(map(_is_batched, args[0])):
        raise NotSupported(
            "is_grads_batched=True with respect to sharded parameters",
            "Call torch.autograd.grad once per row of grad_outputs, with retain_graph=True.",
        )
    leaves = [leaf for runtime in runtimes.values() for leaf in _leaves(runtime, inputs)]
    before, unused = args[:_INPUTS], args[_INPUTS + 1] if len(args) > _INPUTS + 1 else False
    if kwargs.get("accumulate_grad", False):
        return _accumulate(t_outputs, before, (*inputs, *leaves))
    return _gradients(t_outputs, before, inputs, leaves, unused, runtimes.values())


def _runtimes(inputs: Sequence[Any]) -> dict[int, Runtime]:
    found = {}
    for value in inputs:
        runtime = owner(value) if isinstance(value, nn.Parameter) else None
        if runtime is not None and not any(unit.is_unsharded for unit in runtime.units):
            found[id(runtime)] = runtime
    return found


def _leaves(runtime: Runtime, inputs: Sequence[Any]) -> list[torch.Tensor]:
    """What of these parameters is in graphs: compute parameters, and penalties on them."""
    given = set(map(id, inputs))
    computed = [lane.compute_parameters[i] for p, lane, i in runtime.places() if id(p) in given]
    return [*computed, runtime.anchor]


def _is_batched(gradient: Any) -> bool:
    check = getattr(torch._C._functorch, "is_legacy_batchedtensor", None)
    return check is not None and isinstance(gradient, torch.Tensor) and bool(check(gradient))


def _accumulate(outputs: Any, before: tuple[Any, ...], inputs: Sequence[Any]) -> Any:
    """A backward that reaches these inputs alone."""
    return _original(outputs, *before, tuple(inputs), allow_unreachable=True, accumulate_grad=True)


def _gradients(
    outputs: Any,
    before: tuple[Any, ...],
    inputs: Sequence[Any],
    leaves: Sequence[torch.Tensor],
    allow_unused: bool,
    runtimes: Any,
) -> Any:
    """The same, with what lies on `.grad` put aside meanwhile."""
    if not all(isinstance(i, torch.Tensor) and i.is_leaf for i in inputs):
        raise NotSupported(
            "autograd.grad with respect to sharded parameters and to results of a computation in one call",
            "Call it once for the parameters, with retain_graph=True, and once for the others.",
        )
    for runtime in runtimes:
        _require_no_accumulation(runtime)
    held = {id(t): t for t in (*inputs, *(p for runtime in runtimes for p in runtime.parameters))}
    kept = [(tensor, tensor.grad) for tensor in held.values()]
    for tensor, _ in kept:
        tensor.grad = None
    try:
        _accumulate(outputs, before, (*inputs, *leaves))
        results = tuple(tensor.grad for tensor in inputs)
    finally:
        for tensor, gradient in kept:
            tensor.grad = gradient
    if not allow_unused and any(result is None for result in results):
        raise RuntimeError(
            "One of the differentiated Tensors appears to not have been used in the graph. "
            "Set allow_unused=True if this is the desired behavior."
        )
    return results


def _require_no_accumulation(runtime: Runtime) -> None:
    if runtime.reduction.postponing or runtime.reduction.postponed:
        raise StateError(
            "autograd.grad with respect to sharded parameters while fs.accumulate postpones gradients",
            "Use backward() and p.grad, or call it outside `with fs.accumulate(model):`.",
        )
