"""What an optimizer does wrong on one owner is an error on all ranks, which then go on together."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import optimizer_kinds as kinds
import owned_cases
import ranks
from owned_cases import Pair

AT = 2  # the number of the tensor, among those that are trained


class Faulty(kinds.ByParameterNorm):
    """Does something wrong at one tensor."""

    fullshard_step = "owned"

    def __init__(self, params: Any, fault: str = "", only_rank: int | None = None) -> None:
        params = list(params)
        super().__init__(params, lr=0.01)
        self.fault, self.only_rank, self.at = fault, only_rank, params[AT]

    def update(self, p: torch.Tensor, kept: torch.Tensor, group: Any, state: Any) -> torch.Tensor:
        if p is self.at and self.fault and self.only_rank in (None, torch.distributed.get_rank()):
            if self.fault == "raises":
                raise ValueError("a gradient is not finite")
            if self.fault == "shape":
                p.data = torch.zeros(3, 5)
                return torch.zeros(())
            if self.fault == "dtype":
                p.data = p.data.double()
        return super().update(p, kept, group, state)


def _pair(fault: str, only_rank: int | None = None, **options: Any) -> Pair:
    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        made.append(Faulty(parameters, fault if made else "", only_rank))  # the reference is the first
        return made[-1]

    made: list[torch.optim.Optimizer] = []
    return Pair(make, **options)


def _error_of(act: Any) -> str:
    import fullshard as fs

    try:
        act()
    except fs.FullshardError as error:
        return str(error)
    return "nothing was raised"


def _failing(options: dict[str, Any], only_rank: int | None, faults: tuple[str, ...]) -> list[Any]:
    import fullshard as fs
    from fullshard.engine.gradients import Step

    found = []
    if options.get("strategy") == "hybrid":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        options = options | {"mesh": mesh}
    for fault in faults:
        pair = _pair(fault, only_rank, **options)
        with fs.full(pair.model):
            before = [p.detach().clone() for p in pair.model.parameters()]
        message = _error_of(lambda pair=pair: pair.step(0))
        assert Step.running == 0
        pair.optimizers[0].step()  # the error came before
        with fs.full(pair.model):
            values = [p.detach().clone() for p in pair.model.parameters()]
        new = [p.detach().clone() for p in pair.reference.parameters()]
        stepped = [
            "new" if torch.equal(v, n) else "old" if torch.equal(v, b) else "other"
            for v, n, b in zip(values, new, before, strict=True)
        ]
        pair.optimizers[1].fault = ""  # type: ignore[attr-defined]
        for model in (pair.reference, pair.model):
            model.zero_grad()
        owned_cases.loss_of(pair.model, 1).backward()
        pair.optimizers[1].step()  # all ranks are in the same place
        names = [name for name, _ in pair.reference.named_parameters()]
        at = [p is pair.optimizers[0].at for p in pair.reference.parameters()].index(True)  # type: ignore[attr-defined]
        found.append((message, names[at], stepped[at], sorted(set(stepped) - {"old"})))
        ranks.end_groups_of_models()
    return found


def _check(found: list[list[Any]], expected: list[str]) -> None:
    for of_rank in found:
        for (message, name, at, others), text in zip(of_rank, expected, strict=True):
            assert text in message, message
            assert f"'{name}'" in message
            assert "rank " in message.split("Faulty")[1]
            assert (at, others) == ("old", ["new"]), message
    reports = {tuple(message.split("Faulty")[1] for message, *_ in of_rank) for of_rank in found}
    assert len(reports) == 1, "all ranks name the same rank, tensor and reason"


FAULTS = {
    "raises": "ValueError: a gradient is not finite",
    "shape": "torch.Size([3, 5]) for torch.Size(",
    "dtype": "torch.float64 for torch.float32",
}


def test_what_one_owner_raises_is_raised_on_all_ranks_by_name() -> None:
    for options in ({}, {"merge_units": 0}):
        _check(ranks.run(_failing, 3, options, None, tuple(FAULTS)), list(FAULTS.values()))


def test_groups_of_replicas_fail_together() -> None:
    for only_rank in (None, 0):
        found = ranks.run(_failing, 4, {"strategy": "hybrid"}, only_rank, ("raises",), init=True)
        named = [message for of_rank in found for message, *_ in of_rank if "ValueError" in message]
        assert len(named) in (0, 4)  # of two ranks with shards of it, one is its owner
        if only_rank is None:
            assert len(named) == 4


def _muon_failing() -> list[str]:
    """Newton-Schulz refuses more than 99 steps, where it runs: on the owner of that group's only matrix."""
    found = []
    for options in ({}, {"merge_units": 0}):
        pair = Pair(lambda ps: torch.optim.Muon(ps, lr=0.02), lambda p: p.dim() == 2, **options)
        optimizer = pair.optimizers[1]
        parameters = optimizer.param_groups[0]["params"]
        optimizer.add_param_group({"params": [parameters.pop()]})
        pair.step(0)
        optimizer.param_groups[1]["ns_steps"] = 100
        owned_cases.loss_of(pair.model, 1).backward()
        found.append(_error_of(optimizer.step))
        optimizer.param_groups[1]["ns_steps"] = 5
        optimizer.step()
        ranks.end_groups_of_models()
    return found


def test_a_failing_product_of_muon_is_raised_on_all_ranks() -> None:
    found = ranks.run(_muon_failing, 3)
    for of_rank in found:
        for message in of_rank:
            assert "in its step on 'blocks.1." in message, message
    assert len({tuple(m.partition("Muon")[2] for m in of_rank) for of_rank in found}) == 1


class Around(torch.optim.Adafactor):
    """A step around that of its base class, whose own hooks run, too."""

    fullshard_step = "owned"

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.mul_(1 - 0.01 * p.norm())
        loss = super().step(closure)  # type: ignore[no-untyped-call]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.div_(1 + p.norm())
        return loss


class Skipping(kinds.ByParameterNorm):
    """Leaves every second tensor as it is."""

    fullshard_step = "owned"

    def update(self, p: torch.Tensor, kept: torch.Tensor, group: Any, state: Any) -> torch.Tensor:
        return torch.zeros_like(p) if p.numel() % 3 else super().update(p, kept, group, state)


def _unusual() -> list[Any]:
    torch.optim.Adafactor([nn.Parameter(torch.zeros(2, 2))])  # from now on its class has hooks
    found = []
    for make in (Around, Skipping):
        pair = Pair(make)
        for step in range(3):
            pair.step(step)
        found.append(pair.differing())
        ranks.end_groups_of_models()
    return found


def test_steps_around_others_and_steps_that_leave_tensors_have_the_bits_of_one_process() -> None:
    assert ranks.run(_unusual, 3) == [[[], []]] * 3
