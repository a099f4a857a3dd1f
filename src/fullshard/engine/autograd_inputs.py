"""`torch.autograd.grad(loss, model.parameters())` and `loss.backward(inputs=...)`.

A graph holds the compute parameters, never the user's own: torch would take these for unused, and with
`allow_unused` return nothing. So the one function through which both calls go is wrapped. Where an input is a
sharded parameter, its compute parameter is differentiated, the engine reduces, and what it would assign to
`p.grad` is the result. Calls without such inputs pass.

A graph that holds the user's own all the same was built at rest, or inside fs.full. Guards on parameters
raise where a gradient comes to them; where torch fails before that, on values that are not those of the graph
any more, its leaves show why.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from fullshard.engine.homes.split_masters import shown_before
from fullshard.engine.lane import Lane
from fullshard.engine.runtime import Runtime
from fullshard.engine.step.optimizers import every_owner, owner
from fullshard.errors import AtRestError, NotSupported, StateError, unit_label

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
        return _run(t_outputs, *args, **kwargs)
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
    """What of these parameters is in graphs: compute parameters, and penalties on them. What is in a graph
    that was built inside fs.full is among them, to be refused.
    """
    given = set(map(id, inputs))
    computed = [lane.compute_parameters[i] for p, lane, i in runtime.places() if id(p) in given]
    shown = [each for p in inputs if (each := shown_before(p)) is not None and each.requires_grad]
    return [*computed, *shown, runtime.anchor]


def _is_batched(gradient: Any) -> bool:
    check = getattr(torch._C._functorch, "is_legacy_batchedtensor", None)
    return check is not None and isinstance(gradient, torch.Tensor) and bool(check(gradient))


def _accumulate(outputs: Any, before: tuple[Any, ...], inputs: Sequence[Any]) -> Any:
    """A backward that reaches these inputs alone."""
    return _run(outputs, *before, tuple(inputs), allow_unreachable=True, accumulate_grad=True)


def _run(outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return _original(outputs, *args, **kwargs)
    except RuntimeError as error:
        if type(error) is not RuntimeError:  # missing memory, a lost rank, an error of ours or of user code
            raise
        known = _contents()
        for leaf in _leaves_of(outputs):
            if id(leaf) in known:
                lane, index = known[id(leaf)]
                raise used_at_rest(lane.unit, lane.layout.pieces[index].name) from error
        raise


def _contents() -> dict[int, tuple[Lane, int]]:
    """Whatever of sharded parameters graphs may hold: those of the user, and what they have shown before."""
    lanes = (lane for runtime in every_owner() for lane in runtime.lanes)
    places = [(p, (lane, index)) for lane in lanes for index, p in enumerate(lane.parameters)]
    shown = [(each, place) for p, place in places if (each := shown_before(p)) is not None]
    return {id(tensor): place for tensor, place in [*places, *shown]}


def _leaves_of(outputs: Sequence[Any]) -> Iterator[torch.Tensor]:
    left = [node for output in outputs if (node := getattr(output, "grad_fn", None)) is not None]
    seen = set(left)
    while left:
        node = left.pop()
        if (leaf := getattr(node, "variable", None)) is not None:
            yield leaf
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                left.append(following)


def used_at_rest(unit: str, name: str) -> AtRestError:
    return AtRestError(
        f"parameter {name!r} of {unit_label(unit)} was used in the loss outside of the model's forward: at "
        "rest, where it holds only this rank's elements, or inside fs.full, which takes its values back",
        "Compute with parameters inside the model's forward; for a penalty on weights use "
        "fs.penalty(model, lambda name, p: p.abs()), or the optimizer's weight_decay.",
    )


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
