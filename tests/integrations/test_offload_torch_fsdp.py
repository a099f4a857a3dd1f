"""torch's offload options: values rest in host memory, and the numbers are those of one process."""

from __future__ import annotations

import copy
from typing import Any

import torch
from test_torch_fsdp1 import WAYS as FSDP1_WAYS
from test_torch_fsdp1 import assert_state, assert_values, in_one_process, ours, real
from test_torch_fsdp1 import train as train_fsdp1
from test_torch_fsdp2 import STEPS, WAYS, _alone, batches, build, loss_of
from torch import nn

import engines
import ranks
import reference
from fullshard.engine.runtime import runtime_of


def homes_of(model: nn.Module) -> dict[str, set[str]]:
    """By unit, where its values rest."""
    return {
        unit.name: {
            getattr(lane.homes, value).kind
            for lane in unit.lanes
            for value in ("master", "compute", "gradients", "state")
        }
        for unit in runtime_of(model).units
    }


def _train(model: nn.Module) -> reference.Trace:
    mine = [batch[torch.distributed.get_rank()] for batch in batches(2, STEPS)]
    return reference.train_rank(model, mine, loss_of, reference.adamw, STEPS, clip=0.5)


def _same(one: reference.Trace, other: reference.Trace, what: str) -> None:
    assert one.losses == other.losses, what
    assert one.grad_norms == other.grad_norms, what
    for name, value in one.parameters.items():
        assert reference.bitwise(value, other.parameters[name]), f"{what}: {name}"


def _policies() -> dict[str, reference.Trace]:
    from torch.distributed.fsdp import CPUOffloadPolicy as TorchsPolicy

    from fullshard.torch_fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    cases: dict[str, tuple[str, dict[str, Any], Any]] = {
        "torch's policy": ("block by block", {}, TorchsPolicy()),
        "without page-locked memory": ("outer first", {}, TorchsPolicy(pin_memory=False)),
        "ours": ("groups and nested", {"reshard_after_forward": False}, CPUOffloadPolicy()),
        "the root alone": ("the root alone", {}, CPUOffloadPolicy(pin_memory=False)),
        "bf16": ("block by block", {"mp_policy": mixed}, CPUOffloadPolicy()),
    }
    traces = {}
    for name, (way, options, policy) in cases.items():
        model = WAYS[way](build(), offload_policy=policy, **options)
        traces[name] = _train(model)
        assert set.union(*homes_of(model).values()) == {"host"}, name
        _same(traces[name], _train(WAYS[way](build(), **options)), name)
    traces.pop("bf16")
    return traces


def test_cpu_offload_policy_has_the_bits_of_a_model_without_and_the_numbers_of_one_process() -> None:
    by_rank = ranks.run(_policies, 2, init=True, timeout_s=120)
    for case in by_rank[0]:
        trace = reference.combine([found[case] for found in by_rank])
        reference.assert_close_trace(trace, _alone(2), rtol=1e-4, atol=1e-5)


def _mixed_policies() -> None:
    from fullshard.torch_fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    expected = _train(WAYS["block by block"](build()))
    for offloaded in (("blocks.0", "blocks.2"), ("",), ("", "blocks.1")):
        model = build()
        for name in ("blocks.0", "blocks.1", "blocks.2", ""):
            policy = CPUOffloadPolicy() if name in offloaded else OffloadPolicy()
            fully_shard(model.get_submodule(name), offload_policy=policy)
        _same(_train(model), expected, str(offloaded))
        for name, homes in homes_of(model).items():
            assert homes == {"host" if name in offloaded else "device"}, (offloaded, name, homes)


def _from_meta() -> None:
    """`to_empty(device="cpu")`, as torch requires with this policy; then a state dict, or initializers."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    from fullshard.torch_fsdp import CPUOffloadPolicy

    expected = _train(WAYS["block by block"](build()))
    for way in ("loaded", "assigned", "filled in"):
        with torch.device("meta"):
            model = build()
        WAYS["block by block"](model, offload_policy=CPUOffloadPolicy())
        values = build().state_dict()
        if way != "assigned":
            model.to_empty(device="cpu")
        if way == "filled in":
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.copy_(values[name])
        else:
            model.load_state_dict(values, assign=way == "assigned")
        _same(_train(model), expected, way)
        assert set.union(*homes_of(model).values()) == {"host"}
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(model, options=options)
        for name, value in expected.parameters.items():
            if name in state:
                assert reference.bitwise(state[name], value), name


def _state_dicts() -> None:
    """A run that is offloaded continues one that is not, and the other way round."""
    from torch.distributed.checkpoint import state_dict as stock

    from fullshard.torch_fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    mine = [batch[torch.distributed.get_rank()] for batch in batches(2, STEPS)]

    def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> float:
        loss = loss_of(model, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    kinds = (OffloadPolicy, CPUOffloadPolicy)
    for before, after, more in ((*kinds, {}), (*kinds[::-1], {"mp_policy": mixed})):
        model = WAYS["block by block"](build(), offload_policy=before(), **more)
        optimizer = reference.adamw(model.parameters())
        stepped(model, optimizer, mine[0])
        for full in (True, False):
            options = stock.StateDictOptions(full_state_dict=full)
            state = copy.deepcopy(stock.get_state_dict(model, optimizer, options=options))
            second = WAYS["block by block"](build(1), offload_policy=after(), **more)
            its_own = reference.adamw(second.parameters())
            stock.set_state_dict(
                second, its_own, model_state_dict=state[0], optim_state_dict=state[1], options=options
            )
            twin = copy.deepcopy(model)
            twins = reference.adamw(twin.parameters())
            twins.load_state_dict(optimizer.state_dict())
            for tokens in mine[1:]:
                found, expected = stepped(second, its_own, tokens), stepped(twin, twins, tokens)
                assert found == expected, (before, full)


def _answers() -> None:
    """What scripts ask DTensors, of parameters, gradients, norms and optimizer state."""
    from torch.distributed.tensor import DTensor

    from fullshard.torch_fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

    answers = []
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for policy in (OffloadPolicy(), CPUOffloadPolicy()):
        model = WAYS["block by block"](build(), offload_policy=policy, mp_policy=mixed)
        optimizer = reference.adamw(model.parameters())
        loss_of(model, batches(2, 1)[0][torch.distributed.get_rank()]).backward()
        values = [p.grad for p in model.parameters()]
        assert all(isinstance(value, DTensor) for value in (*model.parameters(), *values))
        found = [value.full_tensor() for value in values]
        found += [value.to_local().reshape(-1) for value in values]
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        found += [norm.full_tensor(), *(p.grad.full_tensor() for p in model.parameters())]
        optimizer.step()
        states = [value for state in optimizer.state_dict()["state"].values() for value in state.values()]
        found += [value.full_tensor() for value in states if hasattr(value, "full_tensor")]
        assert all(isinstance(p, DTensor) and isinstance(p, nn.Parameter) for p in model.parameters())
        found += [p.to_local().reshape(-1).clone() for p in model.parameters()]
        answers.append([*found, *(p.full_tensor() for p in model.parameters())])
    for plain, offloaded in zip(*answers, strict=True):
        assert reference.bitwise(plain, offloaded)


def _fully_shard() -> None:
    _answers()
    _mixed_policies()
    _from_meta()
    _state_dicts()


def test_policies_of_single_modules_meta_models_and_state_dicts_keep_the_bits() -> None:
    ranks.run(_fully_shard, 2, init=True, timeout_s=120)


# --- FullyShardedDataParallel ---------------------------------------------------------------------------


def _wrappers() -> None:
    from cases import refusal

    FSDP, strategies = ours()[0].FullyShardedDataParallel, ours()[0].ShardingStrategy
    given = (real()[0].CPUOffload(offload_params=True), ours()[0].CPUOffload(True), True)
    expected = in_one_process(accumulate=2)
    for (name, way), offload in zip(FSDP1_WAYS.items(), given, strict=True):
        for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
            what, options = f"{name}, {strategy}", {"sharding_strategy": strategies[strategy]}
            model = way(ours(), engines.build(), cpu_offload=offload, **options)
            assert model.cpu_offload.offload_params
            found = train_fsdp1(ours(), model, accumulate=2)
            assert set.union(*homes_of(model.module).values()) == {"host"}, what
            assert_values(found["model"], expected["model"], what)
            assert_state(found["optimizer"], expected["optimizer"], what)
            without = train_fsdp1(ours(), way(ours(), engines.build(), **options), accumulate=2)
            assert found["norms"] == without["norms"], what
            assert all(map(torch.equal, found["model"].values(), without["model"].values())), what
    for nothing in (None, False, ours()[0].CPUOffload(), real()[0].CPUOffload(offload_params=False)):
        model = FSDP(engines.build(), cpu_offload=nothing, device_id=torch.device("cpu"))
        list(model.parameters())
        assert set.union(*homes_of(model.module).values()) == {"device"}, nothing
    kind, message, _ = refusal(lambda: FSDP(engines.build(), cpu_offload="cpu"))
    assert (kind, "cpu_offload" in message) == ("OptionError", True)


def _wrapped_one_by_one() -> None:
    """Each wrapper has its own `cpu_offload`."""
    from fullshard.torch_fsdp import CPUOffload
    from fullshard.torch_fsdp import FullyShardedDataParallel as FSDP

    host = torch.device("cpu")
    model = engines.build()
    model.blocks[1] = FSDP(model.blocks[1], cpu_offload=CPUOffload(offload_params=True), device_id=host)
    model.head = FSDP(model.head, device_id=host)
    model = FSDP(model, device_id=host)
    found = train_fsdp1(ours(), model)
    homes = homes_of(model.module)
    assert [name for name, kinds in homes.items() if kinds == {"host"}] == [
        name for name in homes if "blocks.1" in name
    ]
    assert_values(found["model"], in_one_process()["model"], "one by one")


def _fsdp1() -> None:
    _wrappers()
    _wrapped_one_by_one()


def test_cpu_offload_of_wrappers_has_the_bits_of_a_model_without_and_the_numbers_of_one_process() -> None:
    ranks.run(_fsdp1, 2, init=True, timeout_s=120)
