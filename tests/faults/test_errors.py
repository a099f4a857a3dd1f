"""What goes wrong goes wrong by name, on every rank, in seconds; a failed `fs.shard` changes no model."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cases
import engines
import ranks
import reference
from cases import refusal
from engines import WIDTH, Net, batch, build, loss_of, my_rank

Refusal = tuple[str, str, str]


# --- the model is as it was ----------------------------------------------------------------------------


def _photograph(model: nn.Module) -> list[Any]:
    """Everything that sharding could leave behind: values, shapes, objects, hooks, attributes."""
    taken: list[Any] = []
    for name, p in model.named_parameters():
        hooks = getattr(p, "_post_accumulate_grad_hooks", None) or {}
        value = None if p.is_meta else p.detach().clone()
        facts = (name, id(p), type(p), tuple(p.shape), p.stride(), p.device.type, p.requires_grad, len(hooks))
        taken.append((facts, value))
    for name, b in model.named_buffers():
        taken.append(((name, id(b), tuple(b.shape), b.device.type), None if b.is_meta else b.clone()))
    for name, module in model.named_modules():
        attributes = {
            key: len(value) if isinstance(value, dict) else id(value) for key, value in vars(module).items()
        }
        taken.append(((name, attributes), None))
    return taken


def _unchanged(before: list[Any], model: nn.Module) -> bool:
    after = _photograph(model)
    if [facts for facts, _ in before] != [facts for facts, _ in after]:
        return False
    values = zip((v for _, v in before), (v for _, v in after), strict=True)
    return all((a is None and b is None) or reference.bitwise(a, b) for a, b in values)


def _try(model: nn.Module, **options: Any) -> tuple[Refusal, bool]:
    import fullshard as fs

    before = _photograph(model)
    refused = refusal(lambda: fs.shard(model, **options))
    return refused, _unchanged(before, model)


# --- options and models that no rank can have ----------------------------------------------------------


def _mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def _mesh_of(grid: list[int]) -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    # Its own groups would already fail: only the numbers matter here.
    return DeviceMesh("cpu", grid, mesh_dim_names=("shard",), _init_backend=False)


def _raises(_: nn.Module) -> bool:
    raise ZeroDivisionError("on purpose")


OPTIONS: dict[str, tuple[Callable[[], dict[str, Any]], str, str]] = {
    # options, error, part of its message
    "strategy": (lambda: {"strategy": "zero4"}, "OptionError", "'zero4'"),
    "strategy None": (lambda: {"strategy": None}, "OptionError", "None"),
    "precision": (lambda: {"precision": "fp8"}, "OptionError", "'fp8'"),
    "precision dtype": (lambda: {"precision": torch.bfloat16}, "OptionError", "torch.bfloat16"),
    "initial": (lambda: {"initial": "zeros"}, "OptionError", "'zeros'"),
    "units by name": (lambda: {"units": "blocks"}, "OptionError", "'blocks'"),
    "units class": (lambda: {"units": nn.Conv2d}, "OptionError", "Conv2d"),
    "units without forward": (lambda: {"units": nn.ModuleList}, "OptionError", "ModuleList"),
    "units raises": (lambda: {"units": _raises}, "ModelError", "ZeroDivisionError"),
    "ignore name": (lambda: {"ignore": "nope"}, "OptionError", "'nope'"),
    "ignore entry": (lambda: {"ignore": [3]}, "OptionError", "3"),
    "ignore number": (lambda: {"ignore": 3}, "OptionError", "3"),
    "prefetch": (lambda: {"prefetch": 1}, "OptionError", "prefetch"),
    "checkpoint_activations": (lambda: {"checkpoint_activations": "yes"}, "OptionError", "'yes'"),
    "materialize": (lambda: {"materialize": 3}, "OptionError", "materialize"),
    "device": (lambda: {"device": "gpu"}, "OptionError", "'gpu'"),
    "device that nothing computes on": (lambda: {"device": "meta"}, "OptionError", "'meta'"),
    "device that is not there": (lambda: {"device": "cuda:9"}, "OptionError", "'cuda:9'"),
    "mesh type": (lambda: {"mesh": "all"}, "OptionError", "'all'"),
    "mesh of two axes": (lambda: {"mesh": _mesh((1, 2), ("a", "b"))}, "OptionError", "2 axes"),
    "hybrid on other axes": (
        lambda: {"strategy": "hybrid", "mesh": _mesh((1, 2), ("a", "b"))}, "OptionError", "('a', 'b')",
    ),
    "hybrid on one axis": (
        lambda: {"strategy": "hybrid", "mesh": _mesh((2,), ("shard",))}, "OptionError", "shard",
    ),
    "mesh of ranks that are not there": (lambda: {"mesh": _mesh_of([0, 1, 7])}, "OptionError", "rank 7"),
    "mesh without this rank": (lambda: {"mesh": _mesh_of([1 - my_rank()])}, "OptionError", "not contain"),
}  # fmt: skip


def _bad_options() -> dict[str, tuple[Refusal, bool]]:
    found = {name: _try(build(), **options()) for name, (options, _, _) in OPTIONS.items()}
    found["and afterwards"] = (("", "", ""), _trains(build()))
    return found


def _trains(model: nn.Module) -> bool:
    import fullshard as fs

    fs.shard(model)
    loss = loss_of(model, batch(0, my_rank()))
    loss.backward()
    expected = loss_of(build(), batch(0, my_rank())).item()
    return abs(loss.item() - expected) < 1e-5 and all(p.grad is not None for p in model.parameters())


def test_unknown_option_is_refused_with_its_name_and_the_model_is_as_it_was() -> None:
    for rank, found in enumerate(ranks.run(_bad_options, 2)):
        assert found.pop("and afterwards")[1], "a good fs.shard after the failed ones does not train"
        for name, ((kind, message, remedy), unchanged) in found.items():
            _, expected_kind, part = OPTIONS[name]
            assert kind == expected_kind, f"{name}: {message}"
            assert part in message, name
            assert message.startswith(f"rank {rank}: "), f"{name}: {message}"
            assert remedy, f"{name} has no remedy: {message}"
            assert unchanged, f"{name} left the model changed"


def _with_gradient() -> nn.Module:
    model = build()
    loss_of(model, batch(0, 0)).backward()
    return model


def _with_tuple() -> nn.Module:
    model = build()
    model.kept = (model.head.weight,)
    return model


class Bare(Net):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("table", torch.ones(WIDTH), persistent=False)


def _on_meta() -> nn.Module:
    with torch.device("meta"):
        return Bare()


class FailingLinear(nn.Linear):
    def reset_parameters(self) -> None:
        if self.weight.is_meta or my_rank() == 0:
            return super().reset_parameters()
        raise ValueError("on purpose")


def _failing_initialiser() -> nn.Module:
    """Rank 1 alone fails, in the last unit to be filled, after the others have got memory."""
    with torch.device("meta"):
        model = Net()
        model.blocks[2][2] = FailingLinear(13, WIDTH)
    return model


UNFIT: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "gradient": (_with_gradient, "ModelError", "blocks.0.0.weight"),
    "kept in a tuple": (_with_tuple, "ModelError", "head.weight"),
    "no parameters": (lambda: nn.Sequential(nn.ReLU()), "ModelError", "no parameters"),
    "nothing initialises it": (_on_meta, "Uninitialised", "scale"),
    "initialiser raises": (_failing_initialiser, "ModelError", "on purpose"),
    "sparse": (
        lambda: nn.ParameterList([nn.Parameter(torch.ones(3).to_sparse())]), "ModelError", "sparse",
    ),
}  # fmt: skip


def _unfit() -> dict[str, tuple[Refusal, bool]]:
    found = {name: _try(make()) for name, (make, _, _) in UNFIT.items()}
    repaired = _with_tuple()
    _try(repaired)
    del repaired.kept
    found["and afterwards"] = (("", "", ""), _trains(repaired))
    return found


def test_unfit_model_is_refused_and_stays_as_it_was_on_meta_too() -> None:
    for rank, found in enumerate(ranks.run(_unfit, 2)):
        assert found.pop("and afterwards")[1], "a repaired model does not train"
        for name, ((kind, message, remedy), unchanged) in found.items():
            assert kind == UNFIT[name][1], f"{name}: {message}"
            assert UNFIT[name][2] in message, f"{name}: {message}"
            assert message.startswith(f"rank {rank}: "), f"{name}: {message}"
            assert remedy, f"{name} has no remedy: {message}"
            assert unchanged, f"{name} left the model changed"


def _twice() -> dict[str, Any]:
    import fullshard as fs

    model = fs.shard(build())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = {
        "model": refusal(lambda: fs.shard(model)),
        "block": refusal(lambda: fs.shard(model.blocks[1])),
        "not a module": refusal(lambda: fs.shard([1, 2])),  # type: ignore[type-var]
        "full": refusal(lambda: fs.full(build()).__enter__()),
        "accumulate": refusal(lambda: fs.accumulate(build()).__enter__()),
    }
    loss_of(model, batch(0, my_rank())).backward()
    optimizer.step()
    return found | {"trained": engines.whole("fullshard", model)}


def test_sharding_twice_is_refused_and_the_model_trains_on() -> None:
    plain = build()
    for rank in range(2):
        (loss_of(plain, batch(0, rank)) / 2).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    for found in ranks.run(_twice, 2):
        for name, value in reference.whole_parameters(plain).items():
            reference.assert_close(found["trained"][name], value, name)
        assert found["not a module"][0] == "ModelError"
        for what in ("model", "block", "full", "accumulate"):
            assert found[what][0] == "StateError", what
            assert "fs.shard" in found[what][2], what


# --- one rank is at fault: all raise -------------------------------------------------------------------


def _different(kind: str) -> nn.Module:
    model = build()
    if my_rank() == 0:
        return model
    if kind == "shape":
        model.head = nn.Linear(WIDTH, 6)
    elif kind == "name":
        model.tail = model.head
        del model.head
    elif kind == "frozen":
        model.blocks[1][0].weight.requires_grad_(False)
    elif kind == "dtype":
        model.head.double()
    elif kind == "one block less":
        del model.blocks[2]
    elif kind == "one block more":
        model.blocks.append(engines.block())
    elif kind == "buffer":
        model.register_buffer("extra", torch.ones(3))
    return model


DIFFERENT = {
    "shape": "head.weight",
    "name": "tail.weight",
    "frozen": "blocks.1.0.weight",
    "dtype": "head.weight",
    "one block less": "blocks.2.0.weight",
    "one block more": "blocks.3.0.weight",
    "buffer": "extra",
}
OTHER_OPTIONS: dict[str, dict[str, Any]] = {
    "strategy": {"strategy": "zero1"},
    "precision": {"precision": "bf16"},
    "checkpoint_activations": {"checkpoint_activations": True},
    "prefetch": {"prefetch": False},
    "check_gradients": {"check_gradients": True},
    "initial": {"initial": "verify"},
    "unit": {"units": nn.Linear},
    "parameter": {"ignore": "head"},
}


def _mismatches() -> dict[str, tuple[Refusal, bool]]:
    found = {kind: _try(_different(kind)) for kind in DIFFERENT}
    for name, options in OTHER_OPTIONS.items():
        found[f"options: {name}"] = _try(build(), **(options if my_rank() == 1 else {}))
    found["and afterwards"] = (("", "", ""), _trains(build()))
    return found


def test_rank_that_built_another_model_is_named_on_every_rank() -> None:
    for found in ranks.run(_mismatches, 2):
        assert found.pop("and afterwards")[1]
        for name, ((kind, message, remedy), unchanged) in found.items():
            assert kind == "RankMismatch", f"{name}: {message}"
            assert "rank 1 has" in message, name
            assert DIFFERENT.get(name, name.removeprefix("options: ")) in message, f"{name}: {message}"
            assert "every rank" in remedy, name
            assert unchanged, f"{name} left the model changed"


class _Nothing:
    """Not a module."""


ONE_RANK: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    # what rank 1 alone does: its model, its options, the error on both ranks
    "kept in a tuple": (_with_tuple, {}, "ModelError"),
    "gradient": (_with_gradient, {}, "ModelError"),
    "unknown strategy": (build, {"strategy": "zero9"}, "OptionError"),
    "units raises": (build, {"units": _raises}, "ModelError"),
    "mesh type": (build, {"mesh": "all"}, "OptionError"),
    "not a module": (_Nothing, {}, "ModelError"),
}


def _one_rank_fails() -> dict[str, tuple[Refusal, bool]]:
    import fullshard as fs

    fs.shard(build())  # the process group exists
    found = {}
    for name, (make, options, _) in ONE_RANK.items():
        model = make() if my_rank() == 1 else build()
        if isinstance(model, nn.Module):
            found[name] = _try(model, **(options if my_rank() == 1 else {}))
        else:
            found[name] = (refusal(lambda model=model: fs.shard(model)), True)
    found["and afterwards"] = (("", "", ""), _trains(build()))
    return found


def test_failure_of_one_rank_in_shard_is_raised_by_all_with_the_rank_at_fault() -> None:
    results = ranks.run(_one_rank_fails, 2, timeout_s=30.0)
    for rank, found in enumerate(results):
        assert found.pop("and afterwards")[1]
        for name, ((kind, message, _), unchanged) in found.items():
            assert kind == ONE_RANK[name][2], f"{name}: {message}"
            assert message.startswith(f"rank {rank}: "), f"{name}: {message}"
            assert "rank 1" in message, f"{name}: {message}"
            assert unchanged, f"{name} left the model of rank {rank} changed"


def _fails_first_thing() -> None:
    import fullshard as fs

    fs.shard(build(), strategy="zero9" if my_rank() == 1 else "zero3")


def test_unknown_option_on_one_rank_ends_all_in_seconds_before_there_is_a_process_group() -> None:
    result = ranks.outcome(_fails_first_thing, 2)
    assert not result.hung, result.errors
    assert {error.type_name for error in result.errors.values()} == {"OptionError"}
    assert len(result.errors) == 2
    assert "zero9" in result.errors[0].message
    assert result.errors[1].message.startswith("rank 1: ")


# --- in training ---------------------------------------------------------------------------------------


def _wrong_device() -> dict[str, Any]:
    import fullshard as fs

    model = fs.shard(build())
    elsewhere = torch.ones(2, WIDTH, device="meta")
    found = {
        "argument": refusal(lambda: model(elsewhere)),
        "keyword": refusal(lambda: model(x=elsewhere)),
    }
    return found | {"trains": _loss_and_gradients(model)}


def _loss_and_gradients(model: nn.Module) -> bool:
    loss_of(model, batch(0, my_rank())).backward()
    return all(p.grad is not None for p in model.parameters())


def test_forward_on_another_device_is_refused_with_both_devices() -> None:
    for found in ranks.run(_wrong_device, 2):
        assert found.pop("trains")
        for kind, message, remedy in found.values():
            assert kind == "StateError"
            assert "meta" in message
            assert "cpu" in message
            assert remedy


class Poisoned(Net):
    """Multiplies the gradient of one block's weight by `factor`, on rank 1."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.blocks):
            y = layer(x)
            if index == 1 and my_rank() == 1 and self.factor != 1.0:
                y.register_hook(lambda g: g * self.factor)
            x = x + y
        return self.head(x)


def _poison(strategy: str) -> dict[str, Any]:

    model = engines.shard_blocks(build(Poisoned), strategy=strategy, check_gradients=True)
    found: dict[str, Any] = {}
    for name, factor in (("nan", math.nan), ("inf", math.inf)):
        model.factor = factor
        found[name] = refusal(lambda: loss_of(model, batch(0, my_rank())).backward())
        assert all(p.grad is None for p in model.parameters()), "a gradient was handed out"
    model.factor = 1.0
    loss_of(model, batch(0, my_rank())).backward()
    found["norm"] = nn.utils.clip_grad_norm_(model.parameters(), math.inf).item()
    return found


@pytest.mark.parametrize("strategy", cases.ALL)
def test_gradient_that_is_not_finite_is_raised_on_all_ranks_naming_rank_unit_and_parameter(
    strategy: str,
) -> None:
    plain = build()
    for rank in range(2):
        (loss_of(plain, batch(0, rank)) / 2).backward()
    norm = nn.utils.get_total_norm([p.grad for p in plain.parameters()]).item()
    for found in ranks.run(_poison, 2, strategy):
        assert found.pop("norm") == pytest.approx(norm, rel=1e-5)
        for kind, message, remedy in found.values():
            assert kind == "GradientError"
            said = message.partition(":")[2]
            assert "rank 1" in said, f"the rank at fault is not named: {message}"
            assert "rank 0" not in said, f"a rank that is not at fault is named: {message}"
            assert "'blocks.1'" in message
            assert "'blocks.1." in message
            assert remedy


def _unchecked() -> float:
    import fullshard as fs

    model = fs.shard(build(Poisoned))
    model.factor = math.nan
    loss_of(model, batch(0, my_rank())).backward()
    return nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()


def test_gradients_are_checked_on_request_only() -> None:
    assert all(math.isnan(norm) for norm in ranks.run(_unchecked, 2))


# --- the launcher's environment ------------------------------------------------------------------------


def _half_set(missing: list[str], extra: dict[str, str]) -> Refusal:
    import fullshard as fs

    os.environ.update(extra)
    for name in missing:
        del os.environ[name]
    return refusal(lambda: fs.shard(build()))


@pytest.mark.parametrize(
    ("missing", "extra", "part"),
    [
        (["MASTER_PORT"], {"WORLD_SIZE": "2"}, "MASTER_PORT"),
        (["RANK"], {"WORLD_SIZE": "2"}, "RANK"),
        (["WORLD_SIZE"], {"RANK": "1"}, "WORLD_SIZE"),
        ([], {"WORLD_SIZE": "two"}, "'two'"),
        ([], {"RANK": "5", "WORLD_SIZE": "2"}, "5"),
    ],
)
def test_half_set_or_senseless_environment_is_refused_by_name(
    missing: list[str], extra: dict[str, str], part: str
) -> None:
    [(kind, message, remedy)] = ranks.run(_half_set, 1, missing, extra)
    assert kind == "OptionError"
    assert part in message
    assert remedy


def _alone() -> tuple[int, bool]:
    import fullshard as fs

    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    model = fs.shard(build())
    loss_of(model, batch(0, 0)).backward()
    size = sum(p.numel() for p in model.parameters())
    return size, all(p.grad is not None for p in model.parameters())


def test_without_a_launcher_it_is_a_world_of_one() -> None:
    [(size, graded)] = ranks.run(_alone, 1)
    assert size == sum(p.numel() for p in build().parameters())
    assert graded


def _lost_worker(*_: Any) -> None:
    raise RuntimeError("DataLoader worker (pid 7) is killed by signal")


def _loses_a_worker() -> str:
    """As torch's own handler does it for a worker of a DataLoader, while this rank waits for the other."""
    import fullshard as fs

    model = engines.shard_blocks(engines.build())
    if my_rank() == 1:
        time.sleep(6)
        return ""
    signal.signal(signal.SIGALRM, _lost_worker)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        model(torch.ones(1, WIDTH))
    except fs.FullshardError as error:
        return f"taken for a failed collective: {error}"
    except RuntimeError as error:
        return str(error)
    return "nothing"


def test_what_a_signal_handler_raises_is_not_taken_for_a_lost_rank() -> None:
    found = ranks.outcome(_loses_a_worker, 2, fresh=True).values[0]
    assert found.startswith("DataLoader worker")


def _loses_the_store() -> str:
    import fullshard as fs
    from fullshard.comm.host_group import open_recorder
    from fullshard.comm.recorder_files import start_time

    engines.shard_blocks(engines.build())
    processes = [0, 0]
    torch.distributed.all_gather_object(processes, os.getpid())
    if engines.my_rank() == 0:
        os._exit(0)
    while start_time(processes[0]) is not None:
        time.sleep(0.01)
    with pytest.raises(fs.FullshardError) as raised:
        open_recorder([0, 1], "a save")
    return str(raised.value)


def test_a_store_that_is_gone_is_named_with_its_address() -> None:
    text = ranks.outcome(_loses_the_store, 2, init=True, fresh=True).values[1]
    assert "the run's store at 127.0.0.1:" in text
    assert "rank 0 or its launcher, has ended" in text


def _opens_records_in_a_folder_that_is_removed(times: int) -> tuple[int, bool, bool]:
    """How often it was made; whether it holds records; whether it is there after they are closed."""
    from fullshard.comm import host_group, recorder_files

    made: list[str] = []

    def folder_for(parent: str, name: str) -> recorder_files.Folder:
        folder = recorder_files.folder_for(parent, name)
        made.append(folder.path)
        if len(made) <= times:
            recorder_files.remove_if_empty(folder.path)  # as a rank does that opens and closes its records
        return folder

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_group, "folder_for", folder_for)
        recorder = host_group.open_recorder([0], "a save")
    holds = os.listdir(made[-1]) != []
    recorder.close()
    return len(made), holds, os.path.exists(made[-1])


def test_a_folder_of_records_that_a_leaving_rank_removes_is_made_again() -> None:
    found = ranks.outcome(_opens_records_in_a_folder_that_is_removed, 1, 2, init=True).values[0]
    assert found == (3, True, False)
