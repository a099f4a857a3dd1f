"""Sharding beside torch's tensor parallelism, on 2 x 2 ranks, against one process on the same batches."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

import ranks
import reference
import tables
import tensor_parallel_models as models
from engines import shard_blocks
from reference import Trace, adamw

STEPS = 2


@dataclass(frozen=True)
class Case:
    """How the model is cut, how it is sharded, and how it is trained."""

    cut: str = "columns and rows"
    shard: dict[str, Any] = field(default_factory=dict)
    sizes: tuple[int, int] = (models.HIDDEN, models.VOCABULARY)
    accumulate: int = 1
    tied: bool = False
    frozen: tuple[str, ...] = ()
    both_axes: bool = False  # the whole mesh is given, its names say which axis is ours


FROZEN = ("embed.weight", "blocks.0.mlp.up.weight", "blocks.1.norm1.bias")
CASES = {
    "zero3": Case(),
    "zero2": Case(shard={"strategy": "zero2"}),
    "zero1, tied": Case(shard={"strategy": "zero1"}, accumulate=2, tied=True),
    "replicate, frozen": Case(shard={"strategy": "replicate"}, both_axes=True, frozen=FROZEN),
    "uneven": Case("columns and rows", sizes=(7, 11)),
    "uneven, replicate": Case("columns and rows", {"strategy": "replicate"}, sizes=(7, 11)),
    "mlps alone, one unit": Case("mlps alone", {"units": lambda _: False}, both_axes=True),
    "by sequence": Case("by sequence"),
    "by sequence, recomputed": Case("by sequence", {"checkpoint_activations": True}, accumulate=2),
    "recomputed, all options": Case(
        shard={"checkpoint_activations": True, "check_gradients": True, "prefetch": False, "keep_full": 0}
    ),
    "tied": Case(tied=True),
    "frozen": Case(frozen=FROZEN),
}


def _model(case: Case) -> models.Gpt:
    return models.build(*case.sizes, scaled=case.cut != "by sequence")


def _freeze(model: nn.Module, case: Case) -> None:
    for name in case.frozen:
        model.get_parameter(name).requires_grad_(False)


def _sharded(case: Case, mesh: DeviceMesh) -> models.Gpt:

    model = _model(case)
    if mesh.get_rank():
        for parameter in model.parameters():
            parameter.data.add_(0.5)  # the first rank's values win, of what is cut and of what is not
        model.calls.add_(1.0)
    models.CUTS[case.cut](model, mesh["tp"])
    if case.tied:
        model.head.weight = model.embed.weight  # parallelize_module has parted them
    _freeze(model, case)
    return shard_blocks(model, mesh=mesh if case.both_axes else mesh["dp"], **case.shard)


def _train(case: Case, mesh: DeviceMesh) -> Trace:
    import fullshard as fs

    model = _sharded(case, mesh)
    mine = [b[mesh["dp"].get_local_rank()] for b in _batches(case)]
    by_vocabulary = case.cut == "by sequence"
    loss_fn = models.parallel_loss_of if by_vocabulary else models.loss_of
    optimizer, losses, norms = adamw(model.parameters()), [], []
    for step in range(STEPS):
        total = 0.0
        for index in range(case.accumulate):
            last = index == case.accumulate - 1
            with (
                contextlib.nullcontext() if last else fs.accumulate(model),
                loss_parallel() if by_vocabulary else contextlib.nullcontext(),
            ):
                loss = loss_fn(model, mine[step * case.accumulate + index]) / case.accumulate
                loss.backward()
            total += float(loss.full_tensor() if isinstance(loss, DTensor) else loss)
        losses.append(total)
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    assert not model.calls.any()
    with fs.full(model, writeback=False):
        return Trace(losses, norms, models.whole(model))


def _batches(case: Case) -> list[list[models.Batch]]:
    return models.batches(STEPS * case.accumulate, vocabulary=case.sizes[1])


def _traces(names: list[str]) -> dict[str, Trace]:
    mesh = models.new_mesh(2, 2)
    return {name: _train(CASES[name], mesh) for name in names}


def _reference(case: Case) -> Trace:
    model = _model(case)
    if case.tied:
        model.head.weight = model.embed.weight
    _freeze(model, case)
    return reference.train(
        model, _batches(case), models.loss_of, adamw, STEPS, clip=0.5, accumulate=case.accumulate
    )


# Each has its strategy, its sizes, its way of cutting, and what is tied or frozen in another case as well.
LONG = ("zero3", "zero2", "uneven, replicate", "by sequence", "tied", "frozen")


@tables.some("is_long", [False, True], False)
def test_tensor_parallel_model_sharded_over_the_other_axis_trains_as_in_one_process(is_long: bool) -> None:
    names = [name for name in CASES if (name in LONG) == is_long]
    found = ranks.run(_traces, 4, names, init=True, timeout_s=240)
    for name in names:
        joined = reference.combine([traces[name] for traces in found])
        expected = _reference(CASES[name])
        try:
            reference.assert_close_trace(joined, expected, rtol=2e-5, atol=2e-6)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None
