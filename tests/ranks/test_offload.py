"""Offloaded values train with the bits of a run that keeps everything on the compute device."""

from __future__ import annotations

import copy
import dataclasses
import gc
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import engines
import fullshard as fs
import ranks
from engines import my_rank
from fullshard.engine.graph_tasks import NO_TASK, current_task
from fullshard.engine.homes.home import HostHome
from fullshard.engine.runtime import runtime_of

STEPS = 3
HOMES: dict[str, Any] = {
    "host": "host",
    "optimizer": "optimizer",
    "small chunks": fs.Offload(chunk=7),
    "state alone": fs.Offload(kinds=("state",), chunk=600),
    "step on the host": fs.Offload(kinds=("master", "state"), chunk=600, step="host"),
    "compute alone": fs.Offload(kinds=("compute",)),
    "overlap": fs.Offload(overlap=True, chunk=600),
    "overlap, slabs": fs.Offload(kinds=("master", "state"), overlap=True, chunk=600, slabs="100kB"),
    "split masters": fs.Offload(split_masters=True, chunk=600),
    "split masters, overlap": fs.Offload(kinds=("master", "state"), split_masters=True, overlap=True),
}


def offloads(folder: Path, copies: int) -> dict[str, Any]:
    disk = fs.Offload(chunk=600, host=24_000 * copies, disk=folder)
    return {**HOMES, "disk": disk, "all three": dataclasses.replace(disk, device=6_000)}


ALL = [
    (strategy, precision)
    for strategy in ("zero3", "zero2", "zero1", "replicate")
    for precision in ("fp32", "bf16", "8-bit")
]
FEW = [("zero3", "fp32"), ("zero3", "8-bit"), ("zero1", "bf16"), ("replicate", "bf16")]
OptimizerFn = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, OptimizerFn] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, initial_accumulator_value=0.1),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.05, t0=2),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=1e-2),
    "foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True, amsgrad=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
}


class Net(engines.Net):
    """Parameters that are cut by chunks of the smallest size, and one without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = nn.Sequential(
            nn.Linear(engines.WIDTH, 150), nn.Tanh(), nn.Linear(150, engines.WIDTH)
        )
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * super().forward(x)


def precision_of(name: str) -> Any:
    if name != "8-bit":
        return name
    return fs.Precision(compute=torch.bfloat16, gather=torch.int8, wire=torch.int8)


def trained(
    optimizer_fn: OptimizerFn = OPTIMIZERS["AdamW"], *, accumulate: int = 1, **options: Any
) -> tuple[list[float], list[Tensor], dict[str, Any]]:
    """Losses, norms, and afterwards every value of the model and of the optimizer, unsharded."""
    model = engines.shard_blocks(engines.build(Net), **options)
    optimizer = optimizer_fn(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    losses, norms = [], []
    for step in range(STEPS):
        for part in range(accumulate):
            loss = engines.loss_of(model, engines.batch(step * accumulate + part, my_rank()))
            if part + 1 < accumulate:
                with fs.accumulate(model):
                    loss.backward()
            else:
                loss.backward()
            losses.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).clone())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    states = optimizer.state_dict()["state"].items()
    values: dict[str, Any] = {f"{i}.{key}": v for i, state in states for key, v in state.items()}
    values = {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in values.items()}
    with fs.full(model):
        values |= {name: p.detach().clone() for name, p in model.named_parameters()}
    return losses, norms, values


def same(one: Any, other: Any) -> None:
    assert one[0] == other[0]
    assert all(map(torch.equal, one[1], other[1]))
    assert one[2].keys() == other[2].keys()
    for name, value in one[2].items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(other[2][name])), name


def _strategies(cases: list[tuple[str, str]], every_home: bool, folder: Path) -> None:
    """Each case in every home, or in every other one in turn."""
    for turn, (strategy, precision) in enumerate(cases):
        options: dict[str, Any] = {"strategy": strategy, "precision": precision_of(precision)}
        expected = trained(**options)
        copies = torch.distributed.get_world_size() if strategy == "replicate" else 1
        copies *= 2 if precision == "8-bit" else 1  # it pads to blocks
        for number, (name, offload) in enumerate(offloads(folder, copies).items()):
            if not every_home and (number + turn) % 2:
                continue
            try:
                same(trained(offload=offload, **options), expected)
            except Exception as error:
                raise AssertionError(f"{strategy}, {precision}, {name}: {error!r}") from error
        ranks.end_groups_of_models()
    gc.collect()


def _compare(num_ranks: int, cases: list[tuple[str, str]], folder: Path, every_home: bool = True) -> None:
    ranks.run(_strategies, num_ranks, cases, every_home, folder)
    gone_by = time.monotonic() + 60
    while list(folder.iterdir()) and time.monotonic() < gone_by:
        time.sleep(0.05)  # a thread that has just written may hold the last reference
    assert not list(folder.iterdir())  # folders go with the models


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_offloaded_training_has_the_bits_of_training_without(num_ranks: int, tmp_path: Path) -> None:
    _compare(num_ranks, FEW, tmp_path, every_home=num_ranks == 1)


@pytest.mark.long
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("case", ALL, ids="-".join)
def test_every_strategy_trains_with_the_same_bits(
    num_ranks: int, case: tuple[str, str], tmp_path: Path
) -> None:
    _compare(num_ranks, [case], tmp_path)


def _optimizers(folder: Path) -> None:
    for number, (name, optimizer_fn) in enumerate(OPTIMIZERS.items()):
        expected = trained(optimizer_fn, accumulate=2)
        for offload in ("host", (fs.Offload(chunk=11), fs.Offload(host=24_000, disk=folder))[number % 2]):
            try:
                same(trained(optimizer_fn, accumulate=2, offload=offload), expected)
            except Exception as error:
                raise AssertionError(f"{name}, {offload}: {error!r}") from error
        ranks.end_groups_of_models()


def test_every_element_wise_optimizer_of_torch_steps_in_chunks_with_the_same_bits(tmp_path: Path) -> None:
    ranks.run(_optimizers, 2, tmp_path)


def _in_many_chunks(folder: Path) -> None:
    expected = trained(precision="bf16")
    offload = fs.Offload(chunk=7, host=24_000, disk=folder)
    same(trained(precision="bf16", offload=offload), expected)


def test_a_step_reads_ahead_no_further_than_it_has_buffers(tmp_path: Path) -> None:
    ranks.run(_in_many_chunks, 1, tmp_path)


class Turned(Net):
    """With fewer complex elements than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.tensor([1.0 + 0.5j]))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.turn.abs()


def _complex_norms() -> list[list[float]]:
    found = []
    for strategy in ("zero3", "replicate"):
        for offload in (None, "host"):
            model = engines.shard_blocks(engines.build(Turned), strategy=strategy, offload=offload)
            engines.loss_of(model, engines.batch(0, my_rank())).backward()
            found.append([float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)) for _ in range(2)])
            ranks.end_groups_of_models()
    return found


def test_norms_of_complex_gradients_are_known_before_they_leave_for_the_host() -> None:
    for zero3, zero3_away, replicate, replicate_away in ranks.run(_complex_norms, 2):
        assert zero3 == zero3_away
        assert replicate == replicate_away


def _carried_from() -> list[str]:
    model = engines.shard_blocks(engines.build(), offload="host")
    comm = runtime_of(model).comm
    engines.loss_of(model, engines.batch(0, my_rank())).backward()
    with (
        mock.patch.object(comm, "device", torch.device("meta")),
        mock.patch.object(torch.distributed, "all_reduce") as all_reduce,
    ):
        comm.start_max(torch.ones(()))
        together = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return [str(all_reduce.call_args.args[0].device), str(together.device)]


def test_what_is_computed_of_gradients_on_the_host_is_summed_over_ranks_on_their_device() -> None:
    """NCCL carries nothing from the host: `p.grad.isfinite().all()` would be an error. And some of what is
    concatenated may rest on the device."""
    assert ranks.run(_carried_from, 2) == [["meta", "meta"]] * 2


def _kept_factors() -> list[bool]:
    """Whether clipping leaves its factor to the step, behind each way to read or write gradients."""
    model = engines.shard_blocks(engines.build(), offload="host")
    engines.loss_of(model, engines.batch(0, 0)).backward()
    gradients = runtime_of(model).lanes[0].gradients
    assert gradients is not None
    reads: list[Callable[[Tensor], Any]] = [
        lambda g: g.data.norm(),
        lambda g: g.detach().abs().max(),
        lambda g: g.add_(0.1),
        lambda g: g.data,
    ]
    found = []
    for read in reads:
        values = [read(p.grad) for p in model.parameters() if p.grad is not None]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        found.append(bool(gradients.factors(0)))
        gradients.settle()
    del values
    return found


def test_a_gradient_that_was_read_is_scaled_where_it_steps_unless_code_may_still_write_it() -> None:
    assert ranks.run(_kept_factors, 1) == [[True, True, True, False]]


def _read_behind_a_step() -> None:
    model = engines.shard_blocks(engines.build(Net), offload=fs.Offload(overlap=True))
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    transfers = runtime_of(model).lanes[0].homes.transfers
    reads: dict[str, Callable[[], Any]] = {
        "state dict": model.state_dict,
        "parameters": lambda: list(model.parameters()),
        "attribute": lambda: model.scale,
        "optimizer": optimizer.state_dict,
        "copy": lambda: copy.deepcopy(model),
        "full": lambda: fs.full(model).__enter__(),
    }
    for name, read in reads.items():
        for part in range(2):
            with fs.accumulate(model) if part == 0 else nullcontext():
                engines.loss_of(model, engines.batch(part, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        engines.loss_of(model, engines.batch(0, 0))
        assert transfers.pending is not None, "nothing has read values at rest"
        read()
        assert transfers.pending is None, name


def test_a_step_that_goes_on_is_waited_for_by_readers_and_not_by_a_forward() -> None:
    ranks.run(_read_behind_a_step, 1)


def _fetched_in_backward(num_optimizers: int) -> list[list[int]]:
    """Elements of masters and states that are fetched in backward, and in the step, per step."""
    found = []
    fetch = HostHome.fetch
    for slabs in (None, "1kB", "1MB"):
        offload = fs.Offload(kinds=("master", "state"), chunk=300, overlap=True, slabs=slabs)
        model = engines.build(lambda: engines.Net(12))
        model = engines.shard_blocks(model, precision="bf16", offload=offload)
        held = list(model.parameters())
        optimizers = [torch.optim.AdamW(held[i::num_optimizers]) for i in range(num_optimizers)]
        counts = [0, 0]

        def counted(
            home: HostHome, values: Tensor, start: int, staged: Tensor, counts: list[int] = counts
        ) -> None:
            counts[0 if current_task() != NO_TASK else 1] += len(staged)
            fetch(home, values, start, staged)

        with mock.patch.object(HostHome, "fetch", counted):
            for step in range(3):
                counts[:] = 0, 0
                engines.loss_of(model, engines.batch(step, 0)).backward()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
        found.append(counts)
    return found


@pytest.mark.parametrize("num_optimizers", [1, 2])
def test_slabs_are_filled_while_backward_computes(num_optimizers: int) -> None:
    """A step on some parameters leaves what came ahead for others, in the same lanes too."""
    none, some, all_of_it = ranks.run(_fetched_in_backward, 1, num_optimizers)[0]
    assert none[0] == 0
    assert some[0] > 0 < some[1]
    assert all_of_it[1] == 0
    assert none[1] == sum(some) == all_of_it[0]


def _skipping_a_batch(fails: bool) -> list[Tensor]:
    """The third of some batches runs out of memory as its backward begins, or is left out."""
    offload = fs.Offload(chunk=300, overlap=True, slabs="200kB")
    model = engines.shard_blocks(engines.build(), precision="bf16", offload=offload)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    fetch = HostHome.fetch

    def fails_once(*args: Any) -> None:
        if len(fetched) == 2:
            raise torch.OutOfMemoryError("out of memory")
        fetched.append(args)
        fetch(*args)

    for step in range(5):
        fetched: list[Any] = []
        if step == 2 and fails:
            with (
                mock.patch.object(HostHome, "fetch", fails_once),
                pytest.raises(torch.OutOfMemoryError),
            ):
                engines.loss_of(model, engines.batch(step, 0)).backward()
            optimizer.zero_grad()
        elif step != 2:
            engines.loss_of(model, engines.batch(step, 0)).backward()
            optimizer.step()
            optimizer.zero_grad()
    with fs.full(model):
        return [parameter.detach().clone() for parameter in model.parameters()]


def test_a_chunk_that_did_not_come_ahead_of_a_step_is_fetched_by_the_next_one() -> None:
    failed, left_out = (ranks.run(_skipping_a_batch, 1, fails)[0] for fails in (True, False))
    assert all(map(torch.equal, failed, left_out))


def _frozen_at_first(offload: fs.Offload | None) -> list[Tensor]:
    """Parameters that step first have no states yet when slabs are filled with what others have."""
    model = engines.shard_blocks(engines.build(lambda: engines.Net(12)), precision="bf16", offload=offload)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    late = parameters[: len(parameters) // 2]
    for step in range(4):
        for parameter in late:
            parameter.requires_grad_(step >= 2)
        engines.loss_of(model, engines.batch(step, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    with fs.full(model):
        return [parameter.detach().clone() for parameter in parameters]


def test_slabs_that_hold_later_chunks_are_given_to_those_whose_turn_it_is() -> None:
    few = fs.Offload(chunk=64, overlap=True, slabs="1kB")
    assert all(map(torch.equal, *(ranks.run(_frozen_at_first, 1, offload)[0] for offload in (None, few))))


def _exchanged(offload: Any) -> list[Tensor]:
    """Those of a parameter, and those of two parameters, of which one may have no gradient then."""
    model = engines.shard_blocks(engines.build(), precision="bf16", offload=offload)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(7):
        engines.loss_of(model, engines.batch(step, 0)).backward()
        if step == 2:
            for state in optimizer.state.values():
                state["exp_avg"], state["exp_avg_sq"] = state["exp_avg_sq"], state["exp_avg"].abs_()
        if step in (3, 5):
            first, second = (model.get_parameter(f"blocks.{index}.0.weight") for index in range(2))
            optimizer.state[first], optimizer.state[second] = optimizer.state[second], optimizer.state[first]
            if step == 5:
                second.grad = None
        optimizer.step()
        optimizer.zero_grad()
    with fs.full(model):
        return [parameter.detach().clone() for parameter in model.parameters()]


def test_states_that_are_exchanged_keep_their_values() -> None:
    assert all(map(torch.equal, *(ranks.run(_exchanged, 1, offload)[0] for offload in (None, "host"))))
