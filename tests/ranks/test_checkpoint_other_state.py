"""What optimizers keep beside one tensor per parameter: saved, loaded on other ranks, and gone on with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ranks
import reference
from engines import build, my_rank
from painting import WIDTH, Optimizer, Plain, load, shard, whole_state

Make = Callable[[list[nn.Parameter]], Optimizer]


def train(model: nn.Module, optimizer: Optimizer, steps: Iterable[int]) -> None:
    """All ranks get the same batch, so that the mean over any number of them is the same gradient."""
    for step in steps:
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1000 * step))
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()


# --- optimizers ----------------------------------------------------------------------------------------


class Descent(torch.optim.Optimizer):
    """Element-wise; subclasses keep what they like, and say how far to go."""

    def __init__(self, parameters: Any, lr: float = 0.05) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.begin()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * self.direction(p, p.grad))

    def begin(self) -> None:
        pass

    def direction(self, p: Tensor, gradient: Tensor) -> Tensor:
        return gradient


class Counting(Descent):
    """State under keys that are no parameters: numbers in a dict, and a tensor."""

    def begin(self) -> None:
        count = self.state["all"]
        count["n"] = count.get("n", 0) + 1
        self.state.setdefault(("a", 1), torch.ones(2, 3)).mul_(0.9)

    def direction(self, p: Tensor, gradient: Tensor) -> Tensor:
        return gradient * self.state[("a", 1)][1, 2].item() / self.state["all"]["n"]


class Adding(Descent):
    """Numbers of its own, which it adds to its state dict; loading needs the state, too."""

    def __init__(self, parameters: Any, lr: float = 0.05) -> None:
        super().__init__(parameters, lr)
        self.count, self.scale = 0, torch.ones(3)

    def begin(self) -> None:
        self.count += 1
        self.scale *= 0.9

    def direction(self, p: Tensor, gradient: Tensor) -> Tensor:
        momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
        return momentum.mul_(0.5).add_(gradient) * self.scale[1].item() / self.count

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"own": {"count": self.count, "scale": self.scale}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        assert all("momentum" in state for state in self.state.values())
        self.count, self.scale = state_dict["own"]["count"], state_dict["own"]["scale"].clone()


class Nesting(Descent):
    """Tensors of the parameter's shape, and single elements, in lists, dicts and tuples."""

    def direction(self, p: Tensor, gradient: Tensor) -> Tensor:
        state = self.state[p]
        if not state:
            momenta = {0.5: torch.zeros_like(p), 0.9: torch.zeros_like(p)}
            state["kept"] = [momenta, ("name", torch.zeros_like(p), 7), torch.ones(1)]
            state["weight"] = torch.ones(1)
        momenta, (_, largest, seven), weight = state["kept"]
        weight.mul_(0.5).add_(1)
        state["weight"].mul_(0.9)
        for beta, momentum in momenta.items():
            momentum.mul_(beta).add_(gradient)
        largest.copy_(torch.maximum(largest, gradient.abs()))
        return (momenta[0.5] + momenta[0.9]) * state["weight"] / ((largest + seven) * weight)


def _package(name: str) -> Make:
    def make(parameters: list[nn.Parameter]) -> Optimizer:
        import pytorch_optimizer

        made: Optimizer = getattr(pytorch_optimizer, name)(parameters, lr=0.01)
        return made

    return make


OWN: dict[str, Make] = {"Counting": Counting, "Adding": Adding, "Nesting": Nesting}
PACKAGES: dict[str, Make] = {name: _package(name) for name in ("MADGRAD", "StableSPAM", "AggMo", "QHAdam")}
# The first step of SOAP rounds its way to other eigenvectors on three ranks, loaded or not.
ENTIRE: dict[str, Make] = {"SOAP": _package("SOAP")}
ALL = OWN | PACKAGES | ENTIRE


def _keep(names: list[str], root: Path) -> None:
    import fullshard as fs

    for name in names:
        model = shard(Plain)
        optimizer = ALL[name](list(model.parameters()))
        train(model, optimizer, range(3))
        fs.save(root / name, model, optimizer)
        ranks.end_groups_of_models()


def _go_on(names: list[str], root: Path) -> dict[str, dict[str, Tensor]]:
    found = {}
    for name in names:
        model = shard(Plain)
        optimizer = ALL[name](list(model.parameters()))
        load(root / name, model, optimizer)
        train(model, optimizer, range(3, 6))
        found[name] = whole_state(model)
        ranks.end_groups_of_models()
    return found


def _check(root: Path, names_by_count: dict[int, list[str]]) -> None:
    """Three steps on two ranks, three more on others, against six in one process, unsharded."""
    names = list(dict.fromkeys(name for of_count in names_by_count.values() for name in of_count))
    ranks.run(_keep, 2, names, root, timeout_s=120)
    expected = {}
    for name in names:
        model = build(Plain)
        train(model, ALL[name](list(model.parameters())), range(6))
        expected[name] = {n: p.detach() for n, p in model.named_parameters()}
    for count, here in names_by_count.items():
        for rank, found in enumerate(ranks.run(_go_on, count, here, root, timeout_s=120)):
            for name in here:
                for key, value in expected[name].items():
                    where = f"{name} on {count} ranks, rank {rank}: {key}"
                    if count == 3:
                        reference.assert_close(found[name][key], value, where, 2e-5, 2e-6)
                    else:
                        assert torch.equal(found[name][key], value), where


def test_state_that_belongs_to_no_parameter_or_is_nested_goes_on_elsewhere(tmp_path: Path) -> None:
    _check(tmp_path, {3: list(OWN), 1: list(OWN)})


@pytest.mark.long
def test_optimizers_of_a_package_go_on_elsewhere_as_in_one_process(tmp_path: Path) -> None:
    pytest.importorskip("pytorch_optimizer")
    _check(tmp_path, {3: list(PACKAGES), 1: [*ENTIRE, "MADGRAD"]})


# --- in memory as it was -------------------------------------------------------------------------------

SIDE = 80  # a matrix of so many rows is too large for the manifest


class Factors(Descent):
    """Keeps what LAPACK returns, by columns, and a state of the parameter's shape, by columns as well."""

    fullshard_step = "owned"

    def direction(self, p: Tensor, gradient: Tensor) -> Tensor:
        state = self.state[p]
        state["Q"] = [torch.linalg.qr(torch.eye(SIDE) + gradient @ gradient.T)[0]]
        state["turned"] = torch.empty_like(p.T, memory_format=torch.contiguous_format).T.copy_(gradient)
        return state["Q"][0] @ state["turned"]


def _strides(root: Path, strategy: str, saves: bool) -> list[tuple[tuple[int, ...], Tensor]]:
    import fullshard as fs

    torch.manual_seed(0)
    model = fs.shard(nn.Linear(SIDE, SIDE, bias=False), strategy=strategy)
    optimizer = Factors(model.parameters())
    model(torch.randn(3, SIDE)).square().mean().backward()
    optimizer.step()
    if saves:
        fs.save(root / strategy, model, optimizer)
    else:
        load(root / strategy, model, optimizer)
    state = next(iter(optimizer.state.values()), {})
    return [
        (v.stride(), v.contiguous()) for v in (*state.get("Q", ()), *[state.get("turned")]) if v is not None
    ]


def test_matrices_by_columns_are_loaded_by_columns(tmp_path: Path) -> None:
    from fullshard.checkpoint.tools.verifying import verify

    for strategy in ("zero3", "replicate"):
        saved = next(s for s in ranks.run(_strides, 2, tmp_path, strategy, True, timeout_s=60) if s)
        assert [stride for stride, _ in saved] == [(1, SIDE)] * 2
        holders = [s for s in ranks.run(_strides, 3, tmp_path, strategy, False, timeout_s=60) if s]
        assert len(holders) == (1 if strategy == "zero3" else 3)
        for loaded in holders:
            for (stride, value), (old_stride, old) in zip(loaded, saved, strict=True):
                assert stride == old_stride
                assert torch.equal(value, old)
        assert not verify(tmp_path / strategy).damaged


# --- what differs between ranks ------------------------------------------------------------------------


def _refusals(root: Path) -> dict[str, str]:
    import fullshard as fs

    def unlike(optimizer: Optimizer, model: nn.Module) -> None:
        optimizer.state["mine"] = my_rank()

    def unlike_option(optimizer: Optimizer, model: nn.Module) -> None:
        optimizer.param_groups[0]["tag"] = f"rank {my_rank()}"

    def unlike_in_list(optimizer: Optimizer, model: nn.Module) -> None:
        for p in model.parameters():
            optimizer.state[p]["kept"] = [torch.zeros_like(p), my_rank()]

    def by_parameter(optimizer: Optimizer, model: nn.Module) -> None:
        optimizer.state["by"] = dict.fromkeys(model.parameters(), 1)

    def in_an_object(optimizer: Optimizer, model: nn.Module) -> None:
        for p in model.parameters():
            optimizer.state[p]["thing"] = [torch.zeros_like(p), nn.Identity()]

    found = {}
    for change in (unlike, unlike_option, unlike_in_list, by_parameter, in_an_object):
        model = shard(Plain)
        optimizer = Descent(model.parameters())
        train(model, optimizer, range(1))
        change(optimizer, model)
        try:
            fs.save(root / change.__name__, model, optimizer)
        except fs.FullshardError as error:
            found[change.__name__] = f"{type(error).__name__}: {error}"
        ranks.end_groups_of_models()
    return found


def test_save_names_what_differs_between_ranks_and_what_cannot_be_found_again(tmp_path: Path) -> None:
    for found in ranks.run(_refusals, 2, tmp_path, timeout_s=60):
        assert "the state of Descent under 'mine': not the same on rank 1" in found["unlike"]
        assert "option 'tag' in group 0 of Descent: not the same" in found["unlike_option"]
        assert ".kept' of Descent: not the same on rank 1" in found["unlike_in_list"]
        assert "a key of the state of Descent under 'by' (a Parameter) cannot" in found["by_parameter"]
        assert "the state of Descent cannot be saved: optimizer state '" in found["in_an_object"]
        assert "(a Identity) cannot be written as plain data" in found["in_an_object"]


class Own(Descent):
    """Numbers of its elements alone."""

    fullshard_step = "element-wise"  # not quite

    def direction(self, p: Tensor, gradient: Tensor) -> Tensor:
        self.state[p]["sum"] = float(p.sum())
        self.state[p]["one"] = p.sum().reshape(1)
        return gradient


def _own_numbers(path: Path, saves: bool) -> tuple[str, bool]:
    import fullshard as fs

    model = shard(Plain)
    optimizer = Own(model.parameters())
    train(model, optimizer, range(1))
    if saves:
        fs.save(path, model, optimizer)
    again = Own(model.parameters())
    try:
        load(path, model, again)
    except RuntimeError as error:
        return str(error), False
    pairs = zip(optimizer.state.values(), again.state.values(), strict=True)
    return "", all(a["sum"] == b["sum"] and torch.equal(a["one"], b["one"]) for a, b in pairs)


def test_numbers_that_differ_between_ranks_load_on_as_many_and_are_refused_on_others(tmp_path: Path) -> None:
    assert ranks.run(_own_numbers, 2, tmp_path / "saved", True, timeout_s=60) == [("", True)] * 2
    for message, _ in ranks.run(_own_numbers, 3, tmp_path / "saved", False, timeout_s=60):
        assert "can be loaded only on the number of ranks" in message


# --- other formats -------------------------------------------------------------------------------------


def _as_dcp(root: Path) -> dict[str, list[str]]:
    """What dcp.save, and an export of what fs.save wrote, raise."""
    import fullshard as fs
    from fullshard.checkpoint import dcp
    from fullshard.checkpoint.loading.opening import open_checkpoint

    def saved() -> None:
        dcp.save(root / f"{name}-dcp", model, optimizer)

    def exported() -> None:
        if my_rank() == 0:
            dcp.write_folder(open_checkpoint(root / name, True), root / f"{name}-exported")

    raised: dict[str, list[str]] = {}
    for name, make in (OWN | {"Descent": Descent}).items():
        model = shard(Plain)
        optimizer = make(list(model.parameters()))
        train(model, optimizer, range(2))
        fs.save(root / name, model, optimizer)
        raised[name] = []
        for write in (saved, exported):
            try:
                write()
            except fs.FullshardError as error:
                raised[name].append(f"{type(error).__name__}: {error}")
        ranks.end_groups_of_models()
    return raised


def test_a_dcp_folder_refuses_by_name_what_it_would_lose(tmp_path: Path) -> None:
    first, second = ranks.run(_as_dcp, 2, tmp_path, timeout_s=60)
    for found in (*first["Counting"], *second["Counting"]):
        assert "Counting keeps 'all', ('a', 1) beside the state of its parameters" in found
    for found in (*first["Adding"], *second["Adding"]):
        assert "Adding keeps 'own' beside the state of its parameters" in found
    for found in (*first["Nesting"], *second["Nesting"]):
        assert ".kept' is" in found
    assert [len(first[name]) for name in first] == [2, 2, 2, 0]
    assert [len(second[name]) for name in second] == [1, 1, 1, 0]
    left = sorted(path.name for path in tmp_path.iterdir() if "-" in path.name)
    assert left == ["Descent-dcp", "Descent-exported"]


# --- earlier checkpoints -------------------------------------------------------------------------------


def _load_earlier(path: Path) -> list[str]:
    """One of a version that did not save other state: what is there stays, and is named."""
    import fullshard as fs
    from fullshard.checkpoint.format import manifest

    notes = []
    for make in (Counting, Adding):
        model = shard(Plain)
        optimizer = make(model.parameters())
        train(model, optimizer, range(2))
        fs.save(path / make.__name__, model, optimizer)
        file = path / make.__name__ / manifest.NAME
        saved = manifest.from_bytes(file.read_bytes())
        state = {k: v for k, v in saved.optimizer_state.items() if k in ("class", "groups", "state")}
        file.write_bytes(manifest.to_bytes(replace(saved, optimizer_state=state)))
        notes += load(path / make.__name__, model, optimizer).notes
        assert optimizer.state["all"]["n"] == 2 if make is Counting else optimizer.count == 2
        ranks.end_groups_of_models()
    return notes


def test_load_of_an_earlier_checkpoint_names_what_it_lacks(tmp_path: Path) -> None:
    (notes,) = ranks.run(_load_earlier, 1, tmp_path, timeout_s=60)
    assert "state 'all', \"('a', 1)\" of Counting are not in the checkpoint" in notes[0]
    assert "entries of the state dict 'own' of Adding are not in the checkpoint" in notes[1]
