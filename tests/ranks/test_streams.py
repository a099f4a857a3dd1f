"""Copies and updates on streams of their own wait for one another, whatever rests where."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from test_offload import Net
from torch.distributed.device_mesh import init_device_mesh

import engines
import fullshard as fs
import ranks
import streams
from engines import my_rank
from fullshard.comm.watchdog import Operation
from fullshard.engine import activations
from fullshard.engine.homes.transfers import Mark, Transfers
from fullshard.engine.lane import Lane
from fullshard.engine.step import slabs as step_slabs


def _train(options: dict[str, Any], use: str = "") -> streams.Watch:
    with streams.watched() as watch:
        model = engines.shard_blocks(engines.build(Net), **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        before: Any = None
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=use == "scaled")
        others = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(4)]
        for step in range(4):
            loss = engines.loss_of(model, engines.batch(step, my_rank()))
            if use == "states written" and step == 2:
                optimizer.state_dict()  # waits for the step
                for state in optimizer.state.values():
                    state["exp_avg"].mul_(0.5)
            scaler.scale(loss).backward()
            if use == "scaled":
                scaler.unscale_(optimizer)
            if use == "edited":
                _edit(model, step)
            if use == "evaluated before the step":
                with torch.no_grad():
                    engines.loss_of(model, engines.batch(step, 5))
            if use == "states replaced" and step == 2:
                optimizer.state_dict()
                for state in optimizer.state.values():
                    state["exp_avg"] = state["exp_avg"] * 0.5
            if use == "clipped":
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            if use == "halved, and never set to zero":
                torch._foreach_mul_([p.grad for p in model.parameters()], 0.5)
            scaler.step(optimizer)
            scaler.update()
            if use != "halved, and never set to zero":
                optimizer.zero_grad()
            if use == "by another optimizer each time":
                optimizer = others.pop()
            if use == "read":
                for parameter in model.parameters():
                    parameter.detach().sum().item()
            if use == "loaded" and step == 1:
                before = copy.deepcopy(optimizer.state_dict())
            if use == "loaded" and step == 2:
                optimizer.load_state_dict(before)
            if use in ("evaluated", "edited"):
                with torch.no_grad():
                    engines.loss_of(model, engines.batch(step, 5))
            if use == "edited":
                _edit(model, step + 1)
    return watch


@torch.no_grad()
def _edit(model: torch.nn.Module, number: int) -> None:
    """As swapping in an average does: the host may be far ahead of what reads the parameters."""
    for parameter in model.parameters():
        if number % 3 == 0:
            parameter.mul_(0.9)
        elif number % 3 == 1:
            parameter.data.add_(0.01)
        else:
            parameter.data = parameter.data * 0.9


def _clean(options: dict[str, Any], uses: tuple[str, ...]) -> None:
    for use in uses:
        watch = _train(options, use)
        assert watch.num_operations > 200
        assert not watch.races, f"{use}, {len(watch.races)} races:\n" + "\n".join(watch.races[:5])


USES = (
    *("clipped", "read", "loaded", "evaluated", "by another optimizer each time"),
    *("scaled", "edited", "states written", "states replaced"),
)
KINDS: dict[str, dict[str, Any]] = {
    "host": {},
    "optimizer": {"kinds": ("master", "state")},
    "state": {"kinds": ("state",)},
    "gradients": {"kinds": ("gradients",), "chunk": 300},
    "some on the device": {"device": 6_000},
    "split masters": {"split_masters": True},
    "split masters, optimizer": {"split_masters": True, "kinds": ("master", "state")},
    "one backward": {"one_backward": True},
    "one backward, state": {"one_backward": True, "kinds": ("state",)},
    "one backward, some on the device": {"one_backward": True, "device": 6_000},
}
STEPS: dict[str, dict[str, Any]] = {
    "complete": {},
    "overlap": {"overlap": True},
    "slabs": {"overlap": True, "slabs": "200kB"},
}


def _options(kinds: str, step: str, **others: Any) -> dict[str, Any]:
    offload = fs.Offload(**{"chunk": 600, **KINDS[kinds], **STEPS[step]})
    return {"precision": "bf16", "offload": offload, **others}


def _in_turn(step: str) -> None:
    for number, kinds in enumerate(KINDS):
        _clean(_options(kinds, step), (USES[number % len(USES)],))
    states = fs.Offload(chunk=300, kinds=("master",), **STEPS[step])  # which are on the device then
    _clean({"precision": "bf16", "offload": states, "state": "8bit"}, USES[-2:])
    _clean({"precision": "bf16", "offload": states}, USES[-1:])
    _clean(_options("some on the device", step), ("scaled",))
    for kinds in ("host", "optimizer"):
        _clean(_options(kinds, step), ("edited",))
        _clean(_options(kinds, step, precision="fp32"), ("edited",))
    _clean(_options("host", step), ("halved, and never set to zero",))


@pytest.mark.parametrize("step", STEPS)
def test_no_copy_races_with_computing(step: str) -> None:
    ranks.run(_in_turn, 1, step)


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["zero3", "zero2", "zero1", "replicate"])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("kinds", KINDS)
def test_no_copy_races_with_computing_whatever_is_done(kinds: str, step: str, strategy: str) -> None:
    ranks.run(_clean, 1, _options(kinds, step, strategy=strategy), USES)


SHARED: tuple[dict[str, Any], ...] = (
    {},
    {"strategy": "zero2"},
    {"strategy": "zero1", "offload": fs.Offload(overlap=True, chunk=600)},
    {"strategy": "replicate", "offload": "optimizer"},
    {"keep_full": 0},
    {"reduce": "scatter", "offload": fs.Offload(overlap=True, chunk=600, split_masters=True, slabs="200kB")},
    {"precision": fs.Precision(compute=torch.bfloat16, gather=torch.int8, wire=torch.int8)},
    {"strategy": "hybrid", "offload": "host"},
    {"strategy": "hybrid"},
)


def _on_several(num_ranks: int) -> None:
    for number, shared in enumerate(SHARED):
        options: dict[str, Any] = {"precision": "bf16", **shared}
        if options.get("strategy") == "hybrid":
            sizes = (2, num_ranks // 2)
            options["mesh"] = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))
        _clean(options, (USES[number % len(USES)],))
        ranks.end_groups_of_models()


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_no_collective_races_with_computing(num_ranks: int) -> None:
    ranks.run(_on_several, num_ranks, num_ranks, timeout_s=120)


def _inputs_of_blocks() -> None:
    with mock.patch.object(activations, "MIN_BYTES", 1):
        _clean({"checkpoint_activations": "offload"}, USES)


def test_no_copy_of_an_activation_races_with_computing() -> None:
    ranks.run(_inputs_of_blocks, 1)


def _take_changes_at_once(lane: Lane) -> None:
    lane.updated = None


def _up_at_once(site: step_slabs.Site, *after: Mark | None) -> Any:
    return site.transfers.up()


def _down_at_once(site: step_slabs.Site, *after: Mark | None) -> Any:
    return site.transfers.down()


def _no_wait(*args: Any) -> None:
    pass


def _only_the_host_waits(operation: Operation) -> None:
    operation._work.wait()


LEFT_OUT: dict[str, tuple[Any, str, Any]] = {
    "a forward waits for the update": (Lane, "_take_changes", _take_changes_at_once),
    "a step waits for what is fetched": (step_slabs.Site, "wait", _no_wait),
    "a fetch waits for its slab and for gradients": (step_slabs.Site, "inbound", _up_at_once),
    "a store waits for the step": (step_slabs.Site, "outbound", _down_at_once),
    "a gather waits for its copy": (Mark, "wait", _no_wait),
    "what is read waits for the update": (Transfers, "settle", _no_wait),
    "computing waits for a gather": (Operation, "wait", _only_the_host_waits),
}


def _left_out(name: str) -> int:
    with mock.patch.object(*LEFT_OUT[name]):
        watch = _train(_options("host", "overlap"), "loaded")
    ranks.end_groups_of_models()
    return len(watch.races)


@pytest.mark.parametrize("name", LEFT_OUT)
def test_a_wait_that_is_left_out_would_be_seen(name: str) -> None:
    num_ranks = 2 if LEFT_OUT[name][0] is Operation else 1
    assert all(ranks.run(_left_out, num_ranks, name))


def _by_optimizers_of_one_model_and_of_two(offload: fs.Offload) -> list[str]:
    """Each model has streams of its own, and an optimizer of two steps by those of its first one."""
    with streams.watched() as watch:
        models = [engines.shard_blocks(engines.build(Net, seed), offload=offload) for seed in (0, 1)]
        first, second = (list(model.parameters()) for model in models)
        both = torch.optim.AdamW([*first, *second[::2]], lr=1e-2)
        one = torch.optim.AdamW(second[1::2], lr=1e-2)
        for step in range(4):
            for model in models:
                engines.loss_of(model, engines.batch(step, my_rank())).backward()
            if step > 1:
                with fs.full(models[1]), torch.no_grad():
                    models[1].scale.add_(0.1)
            for optimizer in (both, one):
                optimizer.step()
                optimizer.zero_grad()
            if step > 0:
                for parameter in models[1].parameters():
                    parameter.detach().sum().item()
    return watch.races


@pytest.mark.parametrize("kinds", [("state",), ("master", "state")], ids="-".join)
def test_steps_on_one_model_by_streams_of_two_wait_for_each_other(kinds: tuple[str, ...]) -> None:
    offload = fs.Offload(kinds=kinds, chunk=600, overlap=True, slabs="200kB")
    assert not ranks.run(_by_optimizers_of_one_model_and_of_two, 1, offload)[0][:5]


class _Raising(torch.optim.AdamW):
    chunks_left = -1

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        _Raising.chunks_left -= 1
        if _Raising.chunks_left == 0:
            raise InterruptedError


def _interrupted(offload: fs.Offload) -> list[str]:
    with streams.watched() as watch:
        model = engines.shard_blocks(engines.build(Net), precision="bf16", offload=offload)
        optimizer = _Raising(model.parameters(), lr=1e-2)
        for step in range(3):
            engines.loss_of(model, engines.batch(step, my_rank())).backward()
            _Raising.chunks_left = step
            with pytest.raises(InterruptedError) if step else nullcontext():
                optimizer.step()
            optimizer.step()
            optimizer.zero_grad()
    return watch.races


@pytest.mark.parametrize("step", STEPS)
def test_a_step_that_is_called_again_waits_for_the_chunk_that_has_raised(step: str) -> None:
    offload = fs.Offload(chunk=600, **STEPS[step])
    assert not ranks.run(_interrupted, 1, offload)[0][:5]


def _on_the_host() -> None:
    for kinds in ("host", "optimizer"):
        for precision in ("fp32", "bf16"):
            offload = fs.Offload(chunk=600, step="host", **KINDS[kinds])
            _clean({"precision": precision, "offload": offload}, ("evaluated before the step",))


def test_a_step_on_the_host_waits_for_forwards_that_read_what_it_writes() -> None:
    ranks.run(_on_the_host, 1)
