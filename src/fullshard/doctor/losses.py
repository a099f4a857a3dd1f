"""What a loss is a mean or a sum of, read from its autograd graph.

From the loss down, everything is one number until the first reductions. Each of them is a term: a mean or a
sum over `count` elements. The gradient that backward hands to it is its factor, so 1/factor or count/factor
is what an element of the batch is divided by in the end, whatever the script multiplied and divided.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn

_LIMIT = 200  # nodes between a loss and its reductions
_MOST_NODES = 2000  # between a loss and the outputs of models
_PRODUCTS = ("DotBackward", "VdotBackward", "MmBackward", "BmmBackward")
# Below the root, or the logarithm, of a number a factor depends on that number, and divides no batch.
_CURVED = ("PowBackward", "SqrtBackward", "RsqrtBackward", "LogBackward", "Log1PBackward", "ExpBackward")
_MEAN, _SUM = 1, 2  # as torch numbers reductions


@dataclass
class Term:
    kind: str  # 'mean' or 'sum'
    count: float  # elements
    factor: float | None = None  # of this term in what backward was called on
    inside: bool = False  # a model has made it, and given it out

    def data(self) -> dict[str, Any]:
        return {"kind": self.kind, "count": self.count, "factor": self.factor, "inside": self.inside}


def watch(loss: torch.Tensor, outputs: Set[Any] = frozenset()) -> list[Term]:
    """The terms of a loss. Their factors are known when its backward has run.

    outputs: the autograd nodes that made results of models."""
    found: list[Term] = []
    if loss.numel() != 1 or loss.grad_fn is None:
        return found
    queue: list[tuple[Any, bool]] = [(loss.grad_fn, False)]
    seen: set[Any] = set()
    while queue and len(seen) < _LIMIT:
        node, inside = queue.pop(0)
        if node in seen:
            continue
        seen.add(node)
        term, inside = _term(node), inside or node in outputs
        if term is not None:
            term.inside = inside
            _note_factor(node, term)
            found.append(term)
        elif node.name().startswith(_CURVED):
            continue
        elif _is_number(node) or node.name().startswith(("StackBackward", "CatBackward")):
            queue += [(below, inside) for below, _ in node.next_functions if below is not None]
    return found


def _note_factor(node: Any, term: Term) -> None:
    def note(gradients: Any) -> None:
        if gradients and gradients[0] is not None:
            term.factor = (term.factor or 0.0) + float(gradients[0].detach().float().sum())

    node.register_prehook(note)


def _is_number(node: Any) -> bool:
    """A node that made one number; one whose output is not known is taken for one."""
    about = getattr(node, "_input_metadata", None)
    try:
        return not about or all(prod(one.shape) == 1 for one in about)
    except (AttributeError, RuntimeError):
        return True


def _term(node: Any) -> Term | None:
    if not _is_number(node):
        return None
    name = node.name()
    try:
        if name.startswith(("SumBackward", "MeanBackward")) and _combines_numbers(node):
            return None  # of losses that are numbers already: the terms are below
        if name.startswith(("SumBackward", "MeanBackward")):
            count = prod(int(size) for size in node._saved_self_sym_sizes)
            return Term("mean" if name.startswith("Mean") else "sum", count) if count > 1 else None
        if name.startswith(_PRODUCTS):
            return _product(node)
        if not hasattr(node, "_saved_reduction") or node._saved_reduction not in (_MEAN, _SUM):
            return None
        kind = "mean" if node._saved_reduction == _MEAN else "sum"
        if name.startswith("NllLoss"):
            counted = int((node._saved_target != node._saved_ignore_index).sum())
            weight = float(node._saved_total_weight) if kind == "mean" else counted
            return Term(kind, weight)
        return Term(kind, node._saved_self.numel())
    except (AttributeError, RuntimeError):  # saved tensors that were freed, or moved by hooks
        return None


def _product(node: Any) -> Term | None:
    """A sum of products, such as residual @ residual, or an einsum."""
    sizes = getattr(node, "_saved_self_sym_sizes", None)
    count = prod(map(int, sizes)) if sizes is not None else int(node._saved_self.numel())
    return Term("sum", count) if count > 1 else None


def leaves_beside(loss: torch.Tensor, outputs: set[Any]) -> list[nn.Parameter]:
    """Parameters between a loss and the outputs of models, which are given by their autograd nodes."""
    found: dict[int, nn.Parameter] = {}
    queue: list[Any] = [loss.grad_fn]
    seen: set[Any] = set()
    while queue and len(seen) < _MOST_NODES:
        node = queue.pop(0)
        if node is None or node in seen or node in outputs:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, nn.Parameter):
            found[id(variable)] = variable
        queue += [below for below, _ in node.next_functions]
    return list(found.values())


def _combines_numbers(node: Any) -> bool:
    """Whether its input is a stack of single numbers."""
    below = node.next_functions[0][0] if node.next_functions else None
    if below is None or not below.name().startswith(("StackBackward", "CatBackward")):
        return False
    return all(one is None or _is_number(one) for one, _ in below.next_functions)
