"""Everything that works without offload works with it, and leaves the same bits."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import engines
import fullshard as fs
import ranks
from engines import my_rank
from fullshard.engine.homes.home import HostHome
from fullshard.engine.homes.transfers import Transfers
from fullshard.engine.runtime import Runtime

OFFLOADS = (
    "host",
    "optimizer",
    fs.Offload(chunk=300),
    fs.Offload(split_masters=True),
    fs.Offload(chunk=300, overlap=True, slabs="200kB"),
    fs.Offload(kinds=("master", "state"), split_masters=True, overlap=True, slabs="100kB"),
    fs.Offload(kinds=("state",), overlap=True, slabs="100kB"),
)
Run = Callable[[dict[str, Any], Path], Any]
DEVICE = "cpu"  # tests/gpu sets another one


def new(options: dict[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = engines.shard_blocks(engines.build().to(DEVICE), **options)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def backward(model: nn.Module, step: int) -> Tensor:
    loss = engines.loss_of(model, batch(step))
    loss.backward()
    return loss.detach()


def batch(step: int) -> tuple[Tensor, Tensor]:
    x, y = engines.batch(step, my_rank())
    return x.to(DEVICE), y.to(DEVICE)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, *numbers: int) -> None:
    for number in numbers:
        backward(model, number)
        optimizer.step()
        optimizer.zero_grad()


def values(model: nn.Module) -> dict[str, Tensor]:
    with fs.full(model):
        return {name: p.detach().clone() for name, p in model.named_parameters()}


# --- what is done with a model ------------------------------------------------------------------------------


def edited_in_fs_full(options: dict[str, Any], _: Path) -> Any:
    model, optimizer = new(options)
    steps(model, optimizer, 0)
    with fs.full(model), torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    steps(model, optimizer, 1)
    return values(model)


def edited_in_place(options: dict[str, Any], _: Path) -> Any:
    model, optimizer = new(options)
    steps(model, optimizer, 0)
    kept = next(iter(model.parameters())).data
    for number, edit in enumerate((lambda p: p.mul_(0.5), lambda p: p.data.add_(0.1), _assigned)):
        with torch.no_grad():
            for parameter in model.parameters():
                edit(parameter)
        steps(model, optimizer, number + 1)
        if number < 2:
            kept.add_(0.25)
            steps(model, optimizer, number + 5)
    return values(model)


def edited_through_data_that_is_let_go(options: dict[str, Any], _: Path) -> Any:
    """As in a function that takes p.data before a step, and writes it behind."""
    model, optimizer = new(options)
    steps(model, optimizer, 0)
    kept = [p.data for p in model.parameters()]
    steps(model, optimizer, 1)
    for value in kept:
        value.mul_(0.5)
    del kept, value
    steps(model, optimizer, 2)
    return values(model)


def _assigned(parameter: nn.Parameter) -> None:
    parameter.data = parameter.data * 0.75


def stepped_by_hand(options: dict[str, Any], _: Path) -> Any:
    """All parameters in one call, with their gradients: torch counts such writes where it computes."""
    model, _ = new(options)
    for number in range(3):
        backward(model, number)
        parameters = list(model.parameters())
        with torch.no_grad():
            torch._foreach_add_(parameters, [p.grad for p in parameters], alpha=-0.1)
        model.zero_grad()
    return values(model)


def with_gradients_divided_by_numbers(options: dict[str, Any], _: Path) -> Any:
    """And read, and clipped, before the step and behind it."""
    model, optimizer = new(options)
    found = {}
    for number in range(3):
        backward(model, number)
        gradients = [p.grad for p in model.parameters()]
        torch._foreach_div_(gradients, 3)
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= 1.7
            parameter.grad.mul_(0.9).div_(7)
        total = nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
        norms = torch.stack([p.grad.norm() for p in model.parameters()])
        found |= {f"total {number}": total, f"norms {number}": norms}
        optimizer.zero_grad()
    return values(model) | found


def with_gradients_that_parameters_exchange(options: dict[str, Any], _: Path) -> Any:
    """Each is clipped by itself, before that or behind it."""
    model, optimizer = new(options)
    first, second = (model.get_parameter(f"blocks.{index}.0.weight") for index in range(2))
    for number in range(4):
        backward(model, number)
        for turn in range(2):
            if turn == number % 2:
                first.grad, second.grad = second.grad, first.grad
            else:
                for parameter in model.parameters():
                    nn.utils.clip_grad_norm_([parameter], 0.02)
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


def edited_between_backward_and_step(options: dict[str, Any], _: Path) -> Any:
    model, optimizer = new(options)
    for number, edit in enumerate((lambda p: p.mul_(0.5), lambda p: p.data.add_(0.1), _assigned)):
        backward(model, number)
        with torch.no_grad():
            for parameter in model.parameters():
                edit(parameter)
        optimizer.step()
        optimizer.zero_grad()
    steps(model, optimizer, 3)
    return values(model)


def written_between_backward_and_step(options: dict[str, Any], folder: Path) -> Any:
    """Masters and states, by all that may write them."""
    model, optimizer = new(options)
    steps(model, optimizer, 0, 1)
    taken = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    path = folder / "written" / hashlib.sha256(str(options).encode()).hexdigest()
    if not path.exists():
        fs.save(path, model, optimizer)

    def scaled() -> None:
        for state in optimizer.state.values():
            state["exp_avg"].mul_(0.5)

    def replaced() -> None:
        for state in optimizer.state.values():
            state["exp_avg_sq"] = state["exp_avg_sq"] * 4

    def forgotten() -> None:
        optimizer.state.clear()

    def unsharded() -> None:
        with fs.full(model), torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1)

    def unsharded_behind_counters() -> None:
        with fs.full(model):
            for parameter in model.parameters():
                parameter.detach().data.add_(0.1)

    def stepped() -> None:
        torch.optim.SGD(model.parameters(), lr=0.1).step()

    def loaded() -> None:
        fs.load(path, model, optimizer)

    def loaded_state() -> None:
        model.load_state_dict(taken[0])
        optimizer.load_state_dict(taken[1])

    def forward() -> None:
        with torch.no_grad():
            engines.loss_of(model, batch(7))

    def regrouped() -> None:
        optimizer.param_groups[0]["lr"] = 3e-2

    def some_have_none() -> None:
        for parameter in list(model.parameters())[::3]:
            parameter.grad = None

    writes = (
        scaled,
        replaced,
        forgotten,
        unsharded,
        unsharded_behind_counters,
        stepped,
        loaded,
        loaded_state,
        forward,
        regrouped,
        some_have_none,
    )
    for number, write in enumerate(writes):
        backward(model, number)
        write()
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


def with_an_optimizer_that_goes(options: dict[str, Any], _: Path) -> Any:
    model, optimizer = new(options)
    steps(model, optimizer, 0, 1)
    backward(model, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()
    optimizer.zero_grad()
    steps(model, optimizer, 3)
    return values(model)


def copied(options: dict[str, Any], _: Path) -> Any:
    model, optimizer = new(options)
    steps(model, optimizer, 0)
    twin = copy.deepcopy(model)
    steps(twin, torch.optim.AdamW(twin.parameters(), lr=1e-2), 1)
    steps(model, optimizer, 2)
    return values(model) | {f"twin.{name}": value for name, value in values(twin).items()}


def frozen_for_a_while(options: dict[str, Any], _: Path) -> Any:
    model, optimizer = new(options)
    for number in range(4):
        for parameter in model.blocks[0].parameters():  # type: ignore[union-attr,operator]
            parameter.requires_grad_(number % 2 == 0)
        steps(model, optimizer, number)
    return values(model)


def adapter_over_a_frozen_base(options: dict[str, Any], _: Path) -> Any:
    model = engines.build().to(DEVICE)
    for parameter in model.blocks.parameters():  # type: ignore[union-attr]
        parameter.requires_grad_(False)
    model = engines.shard_blocks(model, **options)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    steps(model, optimizer, 0, 1, 2)
    return values(model)


def with_a_closure(options: dict[str, Any], _: Path) -> Any:
    model, optimizer = new(options)
    losses = [optimizer.step(lambda n=n: (optimizer.zero_grad(), backward(model, n))[1]) for n in range(3)]  # type: ignore[misc]
    return values(model) | {str(i): loss for i, loss in enumerate(losses)}


def with_a_scaler(options: dict[str, Any], _: Path) -> Any:
    model, optimizer = new(options)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**10, growth_interval=2)
    for number in range(3):
        loss = engines.loss_of(model, batch(number))
        scaler.scale(loss * (torch.inf if number == 1 and my_rank() == 0 else 1.0)).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return values(model) | {"scale": torch.tensor(scaler.get_scale())}


class Counting(torch.optim.Optimizer):
    """Counts steps in its group and in itself, as many published optimizers do."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1, "k": 0})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls += 1
        for group in self.param_groups:
            group["k"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    rate = group["lr"] / group["k"] / (1 + self.calls)
                    average = self.state[parameter].setdefault("average", torch.zeros_like(parameter))
                    average.mul_(0.9).add_(parameter.grad)
                    parameter.add_(average, alpha=-rate)


def with_an_optimizer_that_counts(options: dict[str, Any], _: Path) -> Any:
    model, _adamw = new(options)
    optimizer = Counting(model.parameters())
    steps(model, optimizer, 0, 1, 2)
    assert (optimizer.calls, optimizer.param_groups[0]["k"]) == (3, 3)
    return values(model)


def with_two_optimizers(options: dict[str, Any], _: Path) -> Any:
    model, _adamw = new(options)
    matrices = [p for name, p in model.named_parameters() if name.endswith("weight")]
    others = [p for name, p in model.named_parameters() if not name.endswith("weight")]
    first, second = torch.optim.AdamW(matrices, lr=1e-2), torch.optim.SGD(others, lr=0.1, momentum=0.5)
    for number in range(3):
        backward(model, number)
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
    return values(model)


def inferred(options: dict[str, Any], _: Path) -> Any:
    model, optimizer = new(options)
    steps(model, optimizer, 0)
    with fs.inference(model), torch.no_grad():
        out = model(engines.batch(0, 0)[0].to(DEVICE))
    steps(model, optimizer, 1)
    return values(model) | {"out": out}


def state_dicts_taken_and_loaded(options: dict[str, Any], _: Path) -> Any:
    model, optimizer = new(options)
    steps(model, optimizer, 0, 1)
    taken = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    steps(model, optimizer, 2)
    model.load_state_dict(taken[0])
    optimizer.load_state_dict(taken[1])
    steps(model, optimizer, 3)
    return values(model)


USES: dict[str, Run] = {
    run.__name__: run
    for run in (
        edited_in_fs_full,
        edited_in_place,
        stepped_by_hand,
        with_gradients_divided_by_numbers,
        edited_through_data_that_is_let_go,
        edited_between_backward_and_step,
        written_between_backward_and_step,
        with_an_optimizer_that_goes,
        copied,
        frozen_for_a_while,
        adapter_over_a_frozen_base,
        with_a_closure,
        with_a_scaler,
        with_an_optimizer_that_counts,
        with_two_optimizers,
        inferred,
        state_dicts_taken_and_loaded,
        with_gradients_that_parameters_exchange,
    )
}


OPTIONS = ({"precision": "bf16"}, {"strategy": "zero2"}, {"strategy": "replicate"})


def _use(num_ranks: int, every_option: bool, every_offload: bool, folder: Path) -> None:
    """Each use under every option and every offload, or under one of them, in turn."""
    for turn, name in enumerate(USES):
        for options in OPTIONS if every_option else OPTIONS[turn % len(OPTIONS) :][:1]:
            chosen = offloads(num_ranks, options, folder)
            chosen = chosen if every_offload else chosen[turn % len(chosen) :][:1]
            compare(name, options, chosen, folder)
            ranks.end_groups_of_models()


def offloads(num_ranks: int, options: dict[str, Any], folder: Path) -> list[Any]:
    copies = num_ranks if options.get("strategy") == "replicate" else 1
    return [*OFFLOADS, fs.Offload(host=6_000 * copies, disk=folder)]


def compare(name: str, options: dict[str, Any], chosen: list[Any], folder: Path) -> None:
    """A use with the chosen offloads, and without."""
    compare_runs(USES[name], name, options, chosen, folder)


def compare_runs(run: Run, name: str, options: dict[str, Any], chosen: list[Any], folder: Path) -> None:
    expected = run(dict(options), folder)
    for offload in chosen:
        try:
            found = run({**options, "offload": offload}, folder)
            assert found.keys() == expected.keys()
            for key, value in expected.items():
                assert torch.equal(found[key], value), key
        except Exception as error:
            raise AssertionError(f"{name}, {options}, {offload}: {error!r}") from error


@pytest.mark.parametrize(
    ("num_ranks", "every_option", "every_offload"),
    [
        (1, False, True),
        (2, False, False),
        pytest.param(1, True, True, marks=pytest.mark.long),
        pytest.param(2, True, True, marks=pytest.mark.long),
    ],
)
def test_every_use_of_a_model_leaves_the_same_bits(
    num_ranks: int, every_option: bool, every_offload: bool, tmp_path: Path
) -> None:
    ranks.run(_use, num_ranks, num_ranks, every_option, every_offload, tmp_path, timeout_s=120)


def _in_blocks(folder: Path) -> None:
    options = {"precision": "bf16", "state": "8bit"}
    slabs = fs.Offload(chunk=300, overlap=True, slabs="200kB")
    compare("written_between_backward_and_step", options, ["host", slabs], folder)


def test_what_is_written_into_8_bit_states_between_backward_and_step_counts(tmp_path: Path) -> None:
    ranks.run(_in_blocks, 1, tmp_path)


def _gradients_written_through_aliases() -> None:
    """Before they are clipped, behind that, and when another micro-batch was added to them."""

    def run(options: dict[str, Any], _: Path) -> Any:
        model, optimizer = new(options)
        found = {}
        for number, name in enumerate(("data", "detach", "view")):
            backward(model, number)
            alias: Callable[[Any], Tensor] = {
                "data": lambda g: g.data,
                "detach": lambda g: g.detach(),
                "view": lambda g: g.view(-1),
            }[name]
            kept = [alias(p.grad) for p in model.parameters()]
            for value in kept:
                value.mul_(0.5)
            found[f"first {number}"] = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            for value in kept:
                value.add_(1e-3)
            backward(model, number + 3)
            for value in kept:
                value.mul_(0.5)
            found[f"second {number}"] = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            del kept, value
            optimizer.step()
            optimizer.zero_grad()
        return values(model) | found

    alone = fs.Offload(kinds=("gradients",), chunk=300)
    for options in OPTIONS:
        compare_runs(run, "aliases", options, ["host", "optimizer", alone], Path())
        ranks.end_groups_of_models()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_is_written_into_gradients_through_data_and_views_counts_in_their_norms(num_ranks: int) -> None:
    ranks.run(_gradients_written_through_aliases, num_ranks)


def _assigned_unnoticed() -> None:
    """By torch's own descriptor, in front of which is one that notes it."""

    def run(options: dict[str, Any], _: Path) -> Any:
        model, optimizer = new(options)
        steps(model, optimizer, 0)
        for parameter in model.parameters():
            torch.Tensor.data.__set__(parameter, parameter.detach() * 0.5)  # type: ignore[attr-defined]
        steps(model, optimizer, 1)
        return values(model)

    compare_runs(run, "assigned unnoticed", {"precision": "bf16"}, ["host", "optimizer"], Path())


def test_values_that_are_assigned_by_other_ways_than_the_attribute_are_seen() -> None:
    ranks.run(_assigned_unnoticed, 2)


# --- steps that raise ---------------------------------------------------------------------------------------


class Interrupted(torch.optim.AdamW):
    fullshard_step = "element-wise"
    calls: list[str] = []  # noqa: RUF012  what an optimizer counts itself is set back for each chunk
    most = 0  # calls before Ctrl-C

    def step(self, closure: Any = None) -> Any:
        self.calls.append("step")
        if self.most and len(self.calls) > self.most:
            raise KeyboardInterrupt
        return super().step(closure)  # type: ignore[no-untyped-call]


@contextmanager
def _between_chunks(most: int) -> Iterator[None]:
    Interrupted.calls.clear()
    Interrupted.most = most
    yield
    Interrupted.most = 0


@contextmanager
def _while_values_go_to_the_host(most: int) -> Iterator[None]:
    store, calls = HostHome.store, []

    def interrupted(*args: Any) -> None:
        calls.append(args)
        if len(calls) == most:
            raise KeyboardInterrupt
        store(*args)

    with mock.patch.object(HostHome, "store", interrupted):
        yield


@contextmanager
def _while_copies_are_waited_for(most: int) -> Iterator[None]:
    drain, calls = Transfers.drain, []

    def interrupted(transfers: Transfers) -> None:
        drain(transfers)
        calls.append(transfers)
        if len(calls) <= most:
            raise KeyboardInterrupt

    with mock.patch.object(Transfers, "drain", interrupted):
        yield


def _interrupted(options: dict[str, Any], most: int, where: Any = _between_chunks) -> list[str]:
    """Ctrl-C behind some chunks of the third step, which is then called again; and the same without chunks:
    a step on those parameters that have stepped, and one on all."""
    found, stepped = [], set[str]()
    for chosen in (options, {**options, "offload": None}):
        model, _ = new(chosen)
        optimizer = Interrupted(model.parameters(), lr=1e-2)
        steps(model, optimizer, 0, 1)
        backward(model, 2)
        named = dict(model.named_parameters())
        if not found:
            with where(most), pytest.raises(KeyboardInterrupt):
                optimizer.step()
            stepped = {name for name, p in named.items() if optimizer.state[p]["step"] == 3}
            assert 0 < len(stepped) < len(named) or where is _while_copies_are_waited_for
            assert all(p.grad is not None for p in named.values())
        else:
            kept = {name: p.grad for name, p in named.items()}
            for name, parameter in named.items():
                parameter.grad = kept[name] if name in stepped else None
            optimizer.step()
            for name, parameter in named.items():
                parameter.grad = kept[name]
        optimizer.step()
        optimizer.zero_grad()
        steps(model, optimizer, 3)
        found.append(values(model))
    return [name for name, value in found[0].items() if not torch.equal(value, found[1][name])]


@pytest.mark.parametrize(
    "options",
    [{"offload": "host", "precision": "bf16"}, {"offload": fs.Offload(chunk=64)}, {"state": "8bit"}],
    ids=["host", "chunks", "8bit"],
)
def test_a_step_that_is_interrupted_between_chunks_keeps_gradients_and_states_and_may_be_called_again(
    options: dict[str, Any],
) -> None:
    assert ranks.run(_interrupted, 2, options, 3) == [[], []]


@pytest.mark.parametrize("most", [2, 4])
def test_a_chunk_of_which_a_part_is_stored_when_a_step_is_interrupted_has_stepped(most: int) -> None:
    for state in ("exact", "8bit"):
        options = {"offload": "host", "precision": "bf16", "state": state}
        assert ranks.run(_interrupted, 1, options, most, _while_values_go_to_the_host) == [[]]


@pytest.mark.parametrize("step", ["device", "host"])
@pytest.mark.parametrize("most", [1, 2])
def test_a_step_that_is_interrupted_while_it_waits_keeps_gradients(step: str, most: int) -> None:
    options = {"offload": fs.Offload(step=step), "precision": "bf16"}
    assert ranks.run(_interrupted, 1, options, most, _while_copies_are_waited_for) == [[]]


def _order_of_states() -> None:
    model, optimizer = new({"offload": "host"})
    parameters = list(model.parameters())
    for forget in (lambda: None, optimizer.state.clear, lambda: optimizer.state.pop(parameters[0])):
        forget()
        steps(model, optimizer, 0)
        assert [id(p) for p in optimizer.state] == [id(p) for p in parameters]


def test_states_that_are_made_again_are_in_the_order_of_parameters_too() -> None:
    ranks.run(_order_of_states, 2)


# --- one optimizer of two models ----------------------------------------------------------------------------


def _two_models(optimizer_class: Any, folder: Path | None) -> list[str]:
    """Names of parameters that differ from those of two models with an optimizer each."""
    numbers: dict[int, int] = {}

    def other_on_every_rank(runtime: Runtime) -> int:
        """The order of a set of runtimes, which are hashed by address, is not the same on all ranks."""
        number = numbers.setdefault(id(runtime), len(numbers) + 1)
        return number if my_rank() else 100 - number

    def models(offload: Any) -> list[nn.Module]:
        return [engines.shard_blocks(engines.build(seed=seed), offload=offload) for seed in (0, 1)]

    with mock.patch.object(Runtime, "__hash__", other_on_every_rank):
        together = models(None if folder is None else fs.Offload(host=6_000, disk=folder, chunk=300))
        shared = optimizer_class([p for model in together for p in model.parameters()], lr=1e-2)
        apart = models(None)
        own = [optimizer_class(model.parameters(), lr=1e-2) for model in apart]
        for step in range(3):
            for model in (*together, *apart):
                engines.loss_of(model, batch(step)).backward()
            for optimizer in (shared, *own):
                optimizer.step()
                optimizer.zero_grad()
        pairs = [(values(one), values(other)) for one, other in zip(together, apart, strict=True)]
    return [name for one, other in pairs for name in one if not torch.equal(one[name], other[name])]


def test_an_optimizer_of_two_models_steps_on_them_in_one_order_on_all_ranks(tmp_path: Path) -> None:
    assert ranks.run(_two_models, 2, torch.optim.AdamW, tmp_path) == [[], []]
    assert ranks.run(_two_models, 2, torch.optim.Adafactor, None) == [[], []]


# --- memory -------------------------------------------------------------------------------------------------


def _unsharded_values_alive() -> list[int]:
    """After fs.shard, of the first model of a process and of the second."""
    found = []
    for offload in ("host", fs.Offload(split_masters=True)):
        for _ in range(2):
            model = engines.build()
            storages = [StorageWeakRef(p.untyped_storage()) for p in model.parameters()]
            engines.shard_blocks(model, precision="bf16", offload=offload)
            found.append(sum(not storage.expired() for storage in storages))
    return found


def test_unsharded_values_are_freed_when_a_model_is_sharded() -> None:
    assert ranks.run(_unsharded_values_alive, 1) == [[0, 0, 0, 0]]


# --- checkpoints --------------------------------------------------------------------------------------------


def _saved(folder: Path) -> list[dict[str, Tensor]]:
    """Each run saves, and goes on from what the other has saved."""
    found = []
    split = fs.Offload(split_masters=True)
    for name, offload in (("plain", None), ("offloaded", "host"), ("split", split)):
        model, optimizer = new({"precision": "bf16", "offload": offload})
        steps(model, optimizer, 0, 1)
        fs.save(folder / name, model, optimizer)
    others = (("plain", split), ("split", None), ("split", "host"), ("offloaded", split))
    for name, offload in (("plain", "host"), ("offloaded", None), ("offloaded", "optimizer"), *others):
        model, optimizer = new({"precision": "bf16", "offload": offload})
        fs.load(folder / name, model, optimizer)
        steps(model, optimizer, 2)
        found.append(values(model))
    return found


def test_checkpoints_are_the_same_bytes_and_load_either_way(tmp_path: Path) -> None:
    for found in ranks.run(_saved, 2, tmp_path):
        for other in found[1:]:
            assert all(torch.equal(found[0][name], other[name]) for name in found[0])
    plain, offloaded = (_digests(tmp_path / name) for name in ("plain", "offloaded"))
    assert plain == offloaded


def _digests(folder: Path) -> dict[str, str]:
    files = [path for path in sorted(folder.rglob("*.safetensors")) if path.is_file()]
    assert files
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}
