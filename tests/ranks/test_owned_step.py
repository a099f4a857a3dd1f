"""Optimizers that look at entire tensors: each tensor steps on its owner, with the bits of one process."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import optimizer_kinds as kinds
import owned_cases
import ranks
import tables
from owned_cases import Make, Pair


def _muon(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Muon(parameters, lr=0.02, weight_decay=0.1)


def _is_matrix(parameter: nn.Parameter) -> bool:
    return parameter.dim() == 2


OPTIMIZERS: dict[str, tuple[Make, Any]] = {
    "Muon": (_muon, _is_matrix),
    "Adafactor": (lambda ps: torch.optim.Adafactor(ps, lr=0.05), owned_cases.everything),
    "Adafactor foreach": (
        lambda ps: torch.optim.Adafactor(ps, lr=0.05, foreach=True),
        owned_cases.everything,
    ),
    "LAMB": (kinds.Lamb, owned_cases.everything),
    "Shampoo": (lambda ps: kinds.Shampoo(ps, lr=0.01), owned_cases.everything),
    "Muon and Adam in one class": (kinds.MixedMuon, owned_cases.everything),
    "AdamW": (lambda ps: torch.optim.AdamW(ps, lr=0.01), owned_cases.everything),
}


def _train_and_resume(folder: str, strategy: str, names: list[str]) -> dict[str, list[str]]:
    """Three steps, a checkpoint into a new model and optimizer, two more steps."""
    import fullshard as fs

    found = {}
    options: dict[str, Any] = {}
    if strategy in ("nodes", "hybrid"):
        axes = ("node" if strategy == "nodes" else "replicate", "shard")
        options["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=axes)
        strategy = "zero3" if strategy == "nodes" else strategy
    for name in names:
        make, only = OPTIMIZERS[name]
        request = {"strategy": strategy, "optimizer_step": "owned"} | options
        pair = Pair(make, only, **request)
        for step in range(3):
            pair.step(step)
        target = Path(folder) / name
        fs.save(target, pair.model, pair.optimizers[1]).wait()
        fresh = Pair(make, only, **request)
        fs.load(target, fresh.model, fresh.optimizers[1])
        pair.model, pair.optimizers[1] = fresh.model, fresh.optimizers[1]
        for step in range(3, 5):
            pair.step(step)
        found[name] = pair.differing()
        ranks.end_groups_of_models()
    return found


RUNS = [(1, "zero3"), (3, "zero1"), (4, "nodes"), (4, "hybrid"), (2, "zero2"), (4, "zero3"), (2, "replicate")]
SOME = {
    (3, "zero1"): ["Adafactor", "Muon and Adam in one class"],
    (4, "nodes"): ["Shampoo"],
    (4, "hybrid"): ["Muon and Adam in one class"],
}


@tables.some("run", RUNS, *SOME)
def test_whole_tensors_step_with_the_bits_of_one_process_and_resume(
    run: tuple[int, str], tmp_path: Path
) -> None:
    num_ranks, strategy = run
    names = SOME.get(run, list(OPTIMIZERS))  # all of them in long runs
    for found in ranks.run(_train_and_resume, num_ranks, str(tmp_path), strategy, names, init=True):
        assert found == {name: [] for name in names}


# --- how an optimizer is used -----------------------------------------------------------------------------


OWNED = {"optimizer_step": "owned"}


def _by_norm(parameters: Any) -> torch.optim.Optimizer:
    return kinds.ByParameterNorm(parameters, lr=0.01)


def _closure(model: nn.Module, step: int) -> torch.Tensor:
    model.zero_grad()
    loss = owned_cases.loss_of(model, step)
    loss.backward()
    return loss


def _with_closure() -> list[str]:
    pair = Pair(_by_norm)
    for step in range(3):
        for model, optimizer in ((pair.model, pair.optimizers[1]), (pair.reference, pair.optimizers[0])):
            optimizer.step(partial(_closure, model, step))
    return pair.differing()


def _with_lbfgs() -> list[str]:
    """It flattens what it has by views, which do not exist of channels-last gradients."""

    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(parameters, lr=0.3, max_iter=3)

    pair = Pair(make, lambda p: p.dim() != 4, optimizer_step="gathered")
    for step in range(2):
        losses = []
        for model, optimizer in ((pair.model, pair.optimizers[1]), (pair.reference, pair.optimizers[0])):
            losses.append(float(optimizer.step(partial(_closure, model, step))))
        assert losses[0] == losses[1]
    return pair.differing()


def _with_clipping_and_schedule() -> list[str]:
    """Clipped by a power of two, so that no norm is rounded differently."""
    pair = Pair(kinds.Lamb, **OWNED)
    schedules = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in pair.optimizers]
    for step in range(3):
        for model, optimizer in zip((pair.reference, pair.model), pair.optimizers, strict=True):
            owned_cases.loss_of(model, step).backward()
            with torch.no_grad():
                for p in model.parameters():
                    if p.grad is not None:
                        p.grad.mul_(0.25)
            optimizer.step()
            optimizer.zero_grad(set_to_none=step == 1)
        for schedule in schedules:
            schedule.step()
    return pair.differing()


def _with_accumulation() -> list[str]:
    import fullshard as fs

    pair = Pair(_by_norm, **OWNED)
    for step in range(2):
        with fs.accumulate(pair.model):
            owned_cases.loss_of(pair.model, step).backward()
        owned_cases.loss_of(pair.model, step + 5).backward()
        for number in (step, step + 5):
            owned_cases.loss_of(pair.reference, number).backward()
        owned_cases.copy_gradients(pair)
        for optimizer in pair.optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return pair.differing()


def _with_scaler() -> list[str]:
    """An infinite gradient on one rank skips the step on all."""
    pair = Pair(_by_norm, **OWNED)
    scalers = [torch.amp.GradScaler("cpu", init_scale=4.0) for _ in range(2)]
    for step in range(3):
        for model, scaler in zip((pair.reference, pair.model), scalers, strict=True):
            scaler.scale(owned_cases.loss_of(model, step)).backward()
        if step == 1:
            for model in (pair.reference, pair.model):
                model.experts.grad.fill_(float("inf"))
        owned_cases.copy_gradients(pair)
        for optimizer, scaler in zip(pair.optimizers, scalers, strict=True):
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert scalers[0].get_scale() == scalers[1].get_scale()
    return pair.differing()


def _with_groups_that_come_and_go() -> list[str]:
    """A group is added, parameters are frozen and unfrozen, and some have no gradient."""
    pair = Pair(_by_norm, lambda p: p.dim() == 2, **OWNED)
    for step in range(4):
        if step == 1:
            for model, optimizer in zip((pair.reference, pair.model), pair.optimizers, strict=True):
                rest = owned_cases.trainable(model, lambda p: p.dim() != 2)
                optimizer.add_param_group({"params": rest, "lr": 0.02})
        for model in (pair.reference, pair.model):
            model.experts.requires_grad_(step != 2)
            model.scale.requires_grad_(step < 3)
        pair.step(step)
    return pair.differing()


def _with_assigned_values() -> list[str]:
    import fullshard as fs

    pair = Pair(_by_norm, **OWNED)
    pair.step(0)
    with torch.no_grad(), fs.full(pair.model):
        for model in (pair.reference, pair.model):
            model.experts.mul_(0.5)
    for p in pair.model.parameters():
        p.data = p.data.clone()
    pair.step(1)
    return pair.differing()


def _after_a_step_that_raised() -> list[str]:
    import fullshard as fs

    pair = Pair(_by_norm, **OWNED)
    pair.step(0)
    optimizer = pair.optimizers[1]
    update, optimizer.update = optimizer.update, None  # type: ignore[attr-defined]
    owned_cases.loss_of(pair.model, 1).backward()
    counted = optimizer.state
    kept = {p: dict(s) for p, s in counted.items()}
    values = {p: {k: v.clone() for k, v in s.items() if isinstance(v, torch.Tensor)} for p, s in kept.items()}
    try:
        optimizer.step()
    except fs.FullshardError:
        pass
    else:
        raise AssertionError("it did not raise")
    for p, state in kept.items():  # as in one process, a step that raised has changed some of its state
        counted[p].update(state)
        for key, value in values[p].items():
            counted[p][key].copy_(value)
    optimizer.update = update  # type: ignore[attr-defined]
    pair.model.zero_grad()
    pair.step(1)
    return pair.differing()


def _with_state_from_the_constructor() -> list[str]:
    class Made(kinds.StateInConstructor):
        fullshard_step = "owned"

        def update(self, p: torch.Tensor, kept: torch.Tensor, group: Any, state: Any) -> torch.Tensor:
            return super().update(p, kept, group, state) * p.norm()

    pair = Pair(Made)
    for step in range(3):
        pair.step(step)
    return pair.differing()


def _in_bf16() -> bool:
    """Masters are fp32: the step is that of fp32."""
    pair = Pair(_muon, _is_matrix, precision="bf16")
    for step in range(3):
        pair.step(step)
    return pair.differing()  # type: ignore[return-value]


def _inside_another() -> list[str]:
    """An optimizer that calls another one's step on the same parameters."""

    class Outer(kinds.Plain):
        fullshard_step = "owned"

        def __init__(self, params: Any) -> None:
            params = list(params)
            super().__init__(params)
            self.inner = torch.optim.SGD(params, lr=0.1, momentum=0.9)

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for p in self.param_groups[0]["params"]:
                if p.grad is not None:
                    p.grad.mul_(p.norm() / (1 + p.grad.norm()))
            self.inner.step()

    pair = Pair(Outer)
    for step in range(3):
        pair.step(step)
    return pair.differing()


def _found_out() -> list[str]:
    pair = Pair(kinds.Lamb)
    for step in range(2):
        pair.step(step)
    state = pair.optimizers[1].state
    assert all(s["exp_avg"].shape == s["exp_avg_sq"].shape for s in state.values())
    held = sum(s["exp_avg"].numel() for s in state.values())
    assert 0 < held < sum(p.numel() for p in pair.reference.parameters())
    return pair.differing()


USES = [
    _with_closure, _with_lbfgs, _with_clipping_and_schedule, _with_accumulation, _with_scaler,
    _with_groups_that_come_and_go, _with_assigned_values, _after_a_step_that_raised,
    _with_state_from_the_constructor, _in_bf16, _inside_another, _found_out,
]  # fmt: skip


def _all_uses() -> dict[str, Any]:
    found = {}
    for use in USES:
        found[use.__name__] = use()
        ranks.end_groups_of_models()
    return found


def test_closures_groups_scalers_and_the_like_work_as_in_one_process() -> None:
    for found in ranks.run(_all_uses, 2):
        assert found == {use.__name__: [] for use in USES}


# --- checkpoints ------------------------------------------------------------------------------------------

KEPT = ["Adafactor", "Shampoo", "Muon and Adam in one class"]


def _save(folder: str, names: list[str], with_dcp: bool, options: dict[str, Any]) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    import fullshard as fs

    for name in names:
        make, only = OPTIMIZERS[name]
        pair = Pair(make, only, **options)
        for step in range(3):
            pair.step(step)
        target = Path(folder) / name
        if with_dcp:
            model, optimizer = get_state_dict(pair.model, pair.optimizers[1])
            dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=target)
        else:
            fs.save(target, pair.model, pair.optimizers[1])


def _resume(folder: str, names: list[str], with_dcp: bool, options: dict[str, Any]) -> dict[str, list[str]]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    import fullshard as fs

    found = {}
    for name in names:
        make, only = OPTIMIZERS[name]
        pair = Pair(make, only, **options)
        for step in range(3):
            pair.step(step)
        fresh = Pair(make, only, **options)
        if with_dcp:
            fresh.step(7)  # state is loaded in place
            model, optimizer = get_state_dict(fresh.model, fresh.optimizers[1])
            values = {"model": model, "optimizer": optimizer}
            dcp.load(values, checkpoint_id=Path(folder) / name)
            set_state_dict(
                fresh.model, fresh.optimizers[1], model_state_dict=model, optim_state_dict=optimizer
            )
        else:
            fs.load(Path(folder) / name, fresh.model, fresh.optimizers[1])
        pair.model, pair.optimizers[1] = fresh.model, fresh.optimizers[1]
        for step in range(3, 5):
            pair.step(step)
        found[name] = pair.differing()
        ranks.end_groups_of_models()
    return found


OTHERS = [
    ("from four ranks to one", False, (4, OWNED), (1, OWNED)),
    ("from one rank to three", False, (1, OWNED), (3, OWNED)),
    ("from replicas to owners", False, (2, {"strategy": "replicate"}), (3, OWNED)),
    ("from owners to replicas", False, (3, OWNED), (2, {"strategy": "replicate"})),
    ("from owners to all", False, (2, OWNED), (2, {"optimizer_step": "gathered"})),
    ("from all to owners", False, (3, {"optimizer_step": "gathered"}), (2, OWNED)),
    ("by torch.distributed.checkpoint", True, (3, OWNED), (2, OWNED)),
]


PAIRS = [(case, name) for case in OTHERS for name in KEPT]


@tables.some("pair", PAIRS, PAIRS[0], PAIRS[7], PAIRS[12], PAIRS[20])  # every kind of change, and optimizer
def test_state_of_owners_loads_on_any_number_of_ranks(pair: Any, tmp_path: Path) -> None:
    (_, with_dcp, (before, saving), (after, loading)), name = pair
    ranks.run(_save, before, str(tmp_path), [name], with_dcp, saving, init=True)
    for found in ranks.run(_resume, after, str(tmp_path), [name], with_dcp, loading, init=True):
        assert found == {name: []}


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def _switch(folder: str) -> list[str]:
    import fullshard as fs

    refused = []
    for number, (saving, loading) in enumerate([("owned", "auto"), ("auto", "owned")]):
        pair = Pair(_adamw, optimizer_step=saving)
        pair.step(0)
        fs.save(Path(folder) / str(number), pair.model, pair.optimizers[1])
        other = Pair(_adamw, optimizer_step=loading)
        for load in (
            lambda o=other, n=number: fs.load(Path(folder) / str(n), o.model, o.optimizers[1]),
            lambda o=other, p=pair: o.optimizers[1].load_state_dict(p.optimizers[1].state_dict()),
        ):
            try:
                other.step(0)
                load()
            except fs.FullshardError as error:
                refused.append(str(error))
            else:
                refused.append("nothing was refused")
    return refused


def test_state_of_owners_is_not_that_of_shards(tmp_path: Path) -> None:
    for found in ranks.run(_switch, 2, str(tmp_path)):
        for message in found:
            assert "optimizer_step=" in message, message


def _state_dict() -> list[Any]:
    """Every rank lists all state; a value's elements are on its owner."""
    pair = Pair(kinds.Shampoo, **OWNED)
    pair.step(0)
    shown = pair.optimizers[1].state_dict()["state"]
    expected = pair.optimizers[0].state_dict()["state"]
    assert shown.keys() == expected.keys()
    for index, state in expected.items():
        ours = shown[index]
        assert ours.keys() == state.keys()
        assert ours["step"] == state["step"]
        sides = zip(ours.get("sides", []), state.get("sides", []), strict=True)
        for value, entire in [(ours["kept"], state["kept"]), *sides]:
            assert value.shape == entire.shape
            if value.numel() > 1:
                value = value.full_tensor()
            assert torch.equal(value, entire)
    twin = Pair(kinds.Shampoo, **OWNED)
    twin.step(0)
    twin.optimizers[1].load_state_dict(pair.optimizers[1].state_dict())
    pair.optimizers[1] = twin.optimizers[1]
    pair.model = twin.model
    pair.step(1)
    return pair.differing()


def test_state_dict_of_owners_has_all_state_on_every_rank() -> None:
    assert ranks.run(_state_dict, 3) == [[]] * 3


# --- Muon's own step --------------------------------------------------------------------------------------

MUONS: dict[str, Make] = {
    "Muon": _muon,
    "without nesterov": lambda ps: torch.optim.Muon(
        ps, lr=0.02, nesterov=False, adjust_lr_fn="match_rms_adamw"
    ),
    "rate in a tensor, groups": lambda ps: torch.optim.Muon(
        [{"params": ps[::2], "momentum": 0.5}, {"params": ps[1::2], "weight_decay": 0.0}],
        lr=torch.tensor(0.01),
    ),
}


def _muons(folder: str) -> dict[str, list[str]]:
    import fullshard as fs
    from fullshard.engine.step.optimizers import owned_step

    found = {}
    for name, make in MUONS.items():
        pair = Pair(make, _is_matrix)
        schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.7) for o in pair.optimizers]
        for step in range(5):
            if step == 2:
                fs.save(Path(folder) / name, pair.model, pair.optimizers[1])
                fresh = Pair(make, _is_matrix)
                fs.load(Path(folder) / name, fresh.model, fresh.optimizers[1])
                pair.model, pair.optimizers[1] = fresh.model, fresh.optimizers[1]
                schedules[1] = torch.optim.lr_scheduler.ExponentialLR(pair.optimizers[1], 0.7, last_epoch=2)
            pair.reference.blocks[0].requires_grad_(step != 3)  # type: ignore[index, union-attr]
            pair.model.blocks[0].requires_grad_(step != 3)  # type: ignore[index, union-attr]
            pair.step(step)
            for schedule in schedules:
                schedule.step()
        assert owned_step(pair.optimizers[1]) is None, "its momentum is on shards"
        found[name] = pair.differing()
        ranks.end_groups_of_models()
    return found


@tables.some("num_ranks", (1, 2, 3, 4), 3)
def test_muon_keeps_its_momentum_on_shards_and_has_the_bits_of_one_process(
    num_ranks: int, tmp_path: Path
) -> None:
    for found in ranks.run(_muons, num_ranks, str(tmp_path)):
        assert found == {name: [] for name in MUONS}


# --- what is refused --------------------------------------------------------------------------------------


class _SharingItsWork(kinds.ByParameterNorm):
    """Every rank updates some parameters and sends them to the others."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                torch.distributed.broadcast(p, 0)
        return loss


def _refusals() -> list[str]:
    import fullshard as fs

    found = []
    for make, only, options in [
        (_SharingItsWork, owned_cases.everything, {}),
        (kinds.Noisy, owned_cases.everything, {}),
        (_by_norm, owned_cases.everything, {"offload": "host"}),
        (_muon, _is_matrix, {"offload": "host"}),
        (torch.optim.LBFGS, owned_cases.everything, OWNED),
        (kinds.BySumOverAll, owned_cases.everything, OWNED),
        (kinds.Noisy, owned_cases.everything, {"optimizer_step": "gathered"}),
        (_muon, _is_matrix, {"optimizer_step": "element-wise"}),
    ]:
        pair = Pair(make, only, **options)
        owned_cases.loss_of(pair.model, 0).backward()
        try:
            pair.optimizers[1].step(*([lambda: None] if make is torch.optim.LBFGS else []))
            found.append("it was not refused")
        except fs.FullshardError as error:
            found.append(str(error))
        ranks.end_groups_of_models()
    return found


def test_what_owners_cannot_do_is_refused_with_the_reason() -> None:
    for sharing, random, offloaded, muon, *requested in ranks.run(_refusals, 2, init=True):
        assert "calls broadcast of torch.distributed" in sharing, sharing
        assert "draws random numbers" in random
        assert "gathered" not in random
        assert "norm of a parameter" in offloaded
        assert "gathered" not in offloaded
        assert "offload" in muon
        names = ("LBFGS", "BySumOverAll", "Noisy", "Muon")
        steps = ("owned", "owned", "gathered", "element-wise")
        reasons = ("one direction", "when others have no gradient", "draws random numbers", "entire tensors")
        remedies = ("'gathered'", "'gathered'", "'replicate'", "'owned'")
        for name, step, reason, remedy, text in zip(names, steps, reasons, remedies, requested, strict=True):
            assert f"{name} with optimizer_step={step!r} would compute something else" in text, text
            assert reason in text
            assert remedy in text
            assert f"set {name}.fullshard_step = {step!r}" in text
