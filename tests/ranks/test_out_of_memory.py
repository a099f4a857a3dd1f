"""A device that runs out of memory: what was held, against the plan, and the cheapest change that fits."""

from __future__ import annotations

import contextlib
import io
import sys
from typing import Any

import torch
from torch import nn

import fullshard as fs
import ranks
from fullshard.planning.shortage import requested_bytes

MESSAGE = "CUDA out of memory. Tried to allocate {} KiB. GPU 0 has a total capacity of 1.00 GiB"


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, where: str, kib: int) -> torch.Tensor:
        ctx.where, ctx.kib = where, kib
        recomputes = torch._C._current_graph_task_id() != -1
        if where == ("recomputation" if recomputes else "forward"):
            raise torch.OutOfMemoryError(MESSAGE.format(kib))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if ctx.where == "backward":
            raise torch.OutOfMemoryError(MESSAGE.format(ctx.kib))
        return gradient, None, None


class Block(nn.Module):
    where, kib = "", 1

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.inner = inner or nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(Fails.apply(self.inner(x), self.where, self.kib))
        return out


def _block(nested: bool) -> Block:
    return Block(Block()) if nested else Block()


def _reported(where: str, kib: int = 1, nested: bool = False, **options: Any) -> str:
    model, other = (nn.Sequential(*[_block(nested) for _ in range(blocks)]) for blocks in (6, 2))
    for one in (other, model):
        fs.shard(one, units=Block, **options)
        one(torch.ones(2, 64)).sum().backward()
    failing = model[2].inner if nested else model[2]
    failing.where, failing.kib = where, kib
    err = io.StringIO()
    try:
        model(torch.ones(2, 64)).sum().backward()
    except torch.OutOfMemoryError as error:
        with contextlib.redirect_stderr(err):
            sys.excepthook(type(error), error, error.__traceback__)
    return err.getvalue()


def _reports() -> dict[str, str]:
    fs.shard(Block())
    before = sys.excepthook
    try:
        return _reports_through_wrapped_hooks()
    finally:
        sys.excepthook = before


def _reports_through_wrapped_hooks() -> dict[str, str]:
    for _ in range(2):  # as init_process_group does, each time
        hook = sys.excepthook
        sys.excepthook = lambda *error, hook=hook: hook(*error)
        fs.shard(Block())
    found = {
        where: _reported(where, strategy="zero2", checkpoint_activations=False)
        for where in ("forward", "backward")
    }
    found["zero3"] = _reported("backward", strategy="zero3", keep_full=0)
    found["recomputed"] = _reported("recomputation", strategy="zero3", checkpoint_activations=True)
    found["nested"] = _reported("backward", strategy="zero3", nested=True)
    found["offload"] = _reported("forward", strategy="hybrid", checkpoint_activations=True, keep_full=0)
    budget = fs.Offload(device="64KiB")
    found["budget"] = _reported(
        "backward", strategy="zero3", keep_full=0, offload=budget, checkpoint_activations=True
    )
    found["too much"] = _reported("forward", 10**6, strategy="zero1")
    return found


def test_what_was_held_and_the_cheapest_change_are_named() -> None:
    for found in ranks.run(_reports, 2):
        for where in ("forward", "backward"):
            text = found[where]
            assert text.count("ran out of memory on cpu") == 1  # of two models, and those of other tests
            assert "planned 97.5 KiB" in text
            assert "parameters at rest: 48.8 KiB, planned 48.8 KiB" in text
            assert "The cheapest change that would fit: " in text
            assert "for the 1.0 KiB that were requested" in text
        assert "in forward of unit '2'" in found["forward"]
        assert "in backward of unit '2'" in found["backward"]
        assert "in backward of unit '2'" in found["zero3"]
        assert "in backward of unit '2.inner'" in found["nested"]
        assert "in backward of unit '2'" in found["recomputed"]
        assert "full values: 65.0 KiB, planned 97.5 KiB" in found["forward"]  # three blocks, and one ahead
        assert "strategy='zero3', which frees" in found["forward"]
        assert "strategy='zero3'" not in found["zero3"]
        assert "offload='optimizer'" in found["zero3"]
        assert "offload='optimizer'" in found["offload"]
        assert "fs.Offload(device='0'), which frees about 64.0 KiB" in found["budget"]
        assert "gradients: 48.8 KiB, planned 48.8 KiB" in found["forward"]
        assert "No single change frees enough" in found["too much"]


def test_the_bytes_of_a_message_are_read() -> None:
    assert requested_bytes("Tried to allocate 2.00 GiB. GPU 0") == 2 * 2**30
    assert requested_bytes("something else") == 0
