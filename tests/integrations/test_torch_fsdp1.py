"""torch's FSDP1 signature on our engine, beside the real one: on the same ranks, on the same batches."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import ranks
import reference
from engines import batch, build, loss_of, my_rank

STEPS = 3
Doors = tuple[Any, Any]  # (package, its wrap module)


def ours() -> Doors:
    import fullshard.torch_fsdp
    import fullshard.torch_fsdp.wrap

    return fullshard.torch_fsdp, fullshard.torch_fsdp.wrap


def real() -> Doors:
    import torch.distributed.fsdp
    import torch.distributed.fsdp.wrap

    return torch.distributed.fsdp, torch.distributed.fsdp.wrap


def by_policy(doors: Doors, model: Any, **options: Any) -> Any:
    policy = functools.partial(doors[1].transformer_auto_wrap_policy, transformer_layer_cls={nn.Sequential})
    return doors[0].FullyShardedDataParallel(
        model, auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=True, **options
    )


def by_hand(doors: Doors, model: Any, **options: Any) -> Any:
    wrapper = functools.partial(
        doors[0].FullyShardedDataParallel, device_id=torch.device("cpu"), use_orig_params=True, **options
    )
    with doors[1].enable_wrap(wrapper_cls=wrapper):
        for index, block in enumerate(model.blocks):
            model.blocks[index] = doors[1].wrap(block)
        model.head = wrapper(model.head)
        return doors[1].wrap(model)


def plainly(doors: Doors, model: Any, **options: Any) -> Any:
    return doors[0].FullyShardedDataParallel(
        model, device_id=torch.device("cpu"), use_orig_params=True, **options
    )


WAYS: dict[str, Callable[..., Any]] = {"policy": by_policy, "hand": by_hand, "one": plainly}


def train(doors: Doors, model: Any, accumulate: int = 1) -> dict[str, Any]:
    """A training loop as FSDP1's users write it; losses, norms, whole values and whole optimizer state."""
    fsdp = doors[0]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    losses, norms = [], []
    for step in range(STEPS):
        for micro in range(accumulate - 1):
            with model.no_sync():
                (loss_of(model, batch(100 + step * accumulate + micro, my_rank())) / accumulate).backward()
        loss = loss_of(model, batch(step, my_rank())) / accumulate
        loss.backward()
        losses.append(loss.item())
        norms.append(float(model.clip_grad_norm_(0.5)))
        optimizer.step()
        optimizer.zero_grad()
    full = fsdp.FullStateDictConfig(), fsdp.FullOptimStateDictConfig()
    with fsdp.FullyShardedDataParallel.state_dict_type(model, fsdp.StateDictType.FULL_STATE_DICT, *full):
        state = {k: v.clone() for k, v in model.state_dict().items()}
        return {
            "losses": losses,
            "norms": norms,
            "model": state,
            "optimizer": fsdp.FullyShardedDataParallel.optim_state_dict(model, optimizer),
        }


def in_one_process(accumulate: int = 1, num_ranks: int = 2) -> dict[str, Any]:
    """The same, unsharded, on the global batch."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    norms = []
    for step in range(STEPS):
        micros = [100 + step * accumulate + micro for micro in range(accumulate - 1)]
        for index in (*micros, step):
            for rank in range(num_ranks):
                (loss_of(model, batch(index, rank)) / (accumulate * num_ranks)).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    names = dict(model.named_parameters())
    return {
        "norms": norms,
        "model": {k: v.clone() for k, v in model.state_dict().items()},
        "optimizer": {name: optimizer.state[p] for name, p in names.items()},
    }


def assert_values(found: dict[str, Tensor], expected: dict[str, Tensor], what: str) -> None:
    assert list(found) == list(expected), what
    for name, value in expected.items():
        reference.assert_close(found[name], value, f"{what}: {name}")


def assert_state(found: dict[str, Any], expected: dict[str, Any], what: str) -> None:
    """Of an optimizer. Not beside the real one's: on CPU its exp_avg is overwritten by exp_avg_sq."""
    assert sorted(found["state"]) == sorted(expected), what
    assert sorted(n for group in found["param_groups"] for n in group["params"]) == sorted(expected), what
    for name, held in expected.items():
        assert held.keys() == found["state"][name].keys(), f"{what}: {name}"
        for key, value in held.items():
            reference.assert_close(found["state"][name][key], value, f"{what}: {key} of {name}")


def _beside_the_real_one() -> None:
    warnings.simplefilter("ignore")
    for name, way in WAYS.items():
        for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
            for accumulate in (1, 3) if name == "policy" else (1,):
                what = f"{name}, {strategy}, {accumulate} micro-batches"
                mine, theirs = (
                    train(d, way(d, build(), sharding_strategy=d[0].ShardingStrategy[strategy]), accumulate)
                    for d in (ours(), real())
                )
                expected = in_one_process(accumulate)
                assert_values(mine["model"], theirs["model"], what)
                assert_values(mine["model"], expected["model"], what)
                assert_state(mine["optimizer"], expected["optimizer"], what)
                for found, wanted in ((mine["losses"], theirs["losses"]), (mine["norms"], expected["norms"])):
                    torch.testing.assert_close(
                        torch.tensor(found), torch.tensor(wanted), rtol=1e-5, atol=1e-6
                    )


def test_losses_norms_values_and_optimizer_state_are_those_of_the_real_one_and_of_one_process() -> None:
    ranks.run(_beside_the_real_one, 2, init=True, timeout_s=120)


# --- which modules become units ---------------------------------------------------------------------------


class Tree(nn.Module):
    """Lists, a shared module, an attention that policies leave whole, and a wide leaf."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(3))
        self.attention = nn.MultiheadAttention(8, 2)
        self.shared = self.blocks[0][0]
        self.wide = nn.Linear(8, 64)


def _policies(doors: Doors) -> dict[str, Any]:
    wrap = doors[1]
    part = functools.partial
    return {
        "transformer": part(wrap.transformer_auto_wrap_policy, transformer_layer_cls={nn.Sequential}),
        "size": part(wrap.size_based_auto_wrap_policy, min_num_params=80),
        "size, no Linear": part(
            wrap.size_based_auto_wrap_policy, min_num_params=60, exclude_wrap_modules={nn.Linear}
        ),
        "lambda": part(wrap.lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, nn.LayerNorm)),
        "classes": wrap.ModuleWrapPolicy({nn.Sequential, nn.LayerNorm}),
        "custom": wrap.CustomPolicy(lambda m: isinstance(m, nn.Linear) and m.out_features == 64),
        "either": part(
            wrap._or_policy,
            policies=[
                part(wrap.lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, nn.LayerNorm)),
                part(wrap.transformer_auto_wrap_policy, transformer_layer_cls={nn.MultiheadAttention}),
            ],
        ),
        "none": part(wrap.size_based_auto_wrap_policy, min_num_params=10**6),
    }


def _wrapped_names(doors: Doors, policy: Any) -> list[str]:
    kind = doors[0].FullyShardedDataParallel
    model = kind(
        build(Tree), auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu"),
        ignored_modules=[],
    )  # fmt: skip
    names = [name for name, module in model.named_modules() if isinstance(module, kind)]
    return [name.replace("_fsdp_wrapped_module.", "").replace("_fsdp_wrapped_module", "") for name in names]


def _picked() -> None:
    warnings.simplefilter("ignore")
    theirs = _policies(real())
    for name, policy in _policies(ours()).items():
        mine = _wrapped_names(ours(), policy)
        assert mine == _wrapped_names(real(), theirs[name]), name
        assert mine == _wrapped_names(ours(), theirs[name]), f"torch's own {name}"
        assert (len(mine) > 1) == (name != "none"), name


def test_policies_wrap_what_the_real_ones_wrap_and_policies_of_torch_are_taken() -> None:
    ranks.run(_picked, 2, init=True, timeout_s=120)


# --- wrapping by hand -------------------------------------------------------------------------------------


def _nested() -> None:
    from cases import refusal
    from fullshard.torch_fsdp import FullyShardedDataParallel as FSDP
    from fullshard.torch_fsdp.wrap import wrap

    model = build()
    assert wrap(model.head) is model.head, "outside of enable_wrap nothing is wrapped"
    model.blocks[1] = FSDP(model.blocks[1])
    model.blocks[1].requires_grad_(False)  # does not begin to shard
    outer = FSDP(model)
    inner = model.blocks[1]
    inner.requires_grad_(True)
    assert all(p.dim() == 2 for n, p in nn.Module.named_parameters(outer) if "weight" in n)
    assert len(list(inner.parameters())) == 4
    assert outer.check_is_root(), "the outermost wrapper is the root, whoever was asked first"
    assert not inner.check_is_root()
    assert [m is outer for m in FSDP.fsdp_modules(outer)] == [True, False]
    assert FSDP.fsdp_modules(outer, root_only=True) == [outer]
    units = outer.__dict__["_fullshard"].units
    assert [unit.modules[0] for unit in units] == [model, inner.module]
    for method in ("clip_grad_norm_", "no_sync"):
        kind, message, _ = refusal(
            lambda m=method: inner.clip_grad_norm_(1.0) if m[0] == "c" else inner.no_sync().__enter__()
        )
        assert (kind, method in message) == ("StateError", True)

    double = FSDP(FSDP(nn.Sequential(FSDP(nn.Linear(8, 5)))))
    assert double(batch(0, 0)[0]).shape == (6, 5)
    assert list(double.state_dict()) == ["0.weight", "0.bias"]
    double.load_state_dict(double.state_dict())

    own = torch.distributed.new_group([my_rank()], use_local_synchronization=True)
    expert = build()
    expert.head = FSDP(expert.head, process_group=own)  # lives on this rank alone
    shared = FSDP(expert)
    loss_of(shared, batch(0, my_rank())).backward()
    alone = build()
    loss_of(alone, batch(0, my_rank())).backward()
    assert torch.allclose(expert.head.weight.grad, alone.head.weight.grad, rtol=1e-5)
    assert expert.head.weight.shape == alone.head.weight.shape
    rest = [sum(p.numel() for p in m.blocks.parameters()) for m in (shared, alone)]
    assert rest[0] < rest[1], "the others are sharded"

    early = build()
    early.blocks[0] = FSDP(early.blocks[0])
    list(early.blocks[0].parameters())
    kind, message, remedy = refusal(lambda: FSDP(early))
    assert (kind, "sharded on its own" in message, "Wrap the outer" in remedy) == ("StateError", True, True)

    past = FSDP(build())
    assert refusal(lambda: past.module(batch(0, 0)[0]))[0] == "StateError"
    with torch.no_grad():
        past.module(batch(0, 0)[0])  # whole values: nothing to go wrong
    past(batch(0, 0)[0]).sum().backward()
    past.module(batch(0, 0)[0]).sum().backward()  # the engine is on the module itself


def test_outermost_wrapper_shards_when_the_first_of_them_is_used() -> None:
    ranks.run(_nested, 2, timeout_s=120)


def _first_used_in_inference() -> None:
    from fullshard.torch_fsdp import FullyShardedDataParallel as FSDP

    model = FSDP(build())
    with torch.inference_mode():
        model(batch(0, 0)[0])
    loss_of(model, batch(0, my_rank())).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def test_a_wrapper_that_is_first_used_in_inference_mode_trains_afterwards() -> None:
    ranks.run(_first_used_in_inference, 1, timeout_s=120)


def _both_signatures() -> None:
    from cases import refusal
    from fullshard.torch_fsdp import FullyShardedDataParallel as FSDP
    from fullshard.torch_fsdp import fully_shard

    inner_wrapped, outer_wrapped = build(), build()
    inner_wrapped.head = FSDP(inner_wrapped.head)
    fully_shard(inner_wrapped)
    fully_shard(outer_wrapped.head)
    wrapper = FSDP(outer_wrapped)
    for model in (inner_wrapped, inner_wrapped.head, wrapper, outer_wrapped.head):
        kind, message, _ = refusal(lambda model=model: list(model.parameters()))
        assert (kind, "fully_shard and FullyShardedDataParallel" in message) == ("NotSupported", True)


def test_fully_shard_and_a_wrapper_in_one_model_are_refused() -> None:
    ranks.run(_both_signatures, 1, timeout_s=120)


def _as_a_module() -> None:
    import copy

    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        apply_activation_checkpointing,
        checkpoint_wrapper,
    )

    from fullshard.torch_fsdp import FullyShardedDataParallel as FSDP

    plain = build()
    model = by_policy(ours(), build(), sync_module_states=True)
    assert model.module.head is model.head, "attributes of the module inside"
    assert model.blocks[0][0].weight is model.get_parameter("blocks.0.0.weight")
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert FSDP(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))[1].__class__ is nn.ReLU

    late = FSDP(build())
    late.double()  # nothing is sharded yet
    assert next(late.parameters()).dtype == torch.float64
    assert late(batch(0, 0)[0].double()).dtype == torch.float64

    expected = in_one_process()
    for order in ("before", "after", "deepcopy"):
        inside = build()
        if order == "before":
            for index, block in enumerate(inside.blocks):
                inside.blocks[index] = checkpoint_wrapper(block)
        model = by_hand(ours(), inside)
        if order == "after":
            apply_activation_checkpointing(
                model,
                checkpoint_wrapper_fn=checkpoint_wrapper,
                check_fn=lambda m: isinstance(m, nn.Sequential),
            )
            assert type(model.blocks[0]._fsdp_wrapped_module).__name__ == "CheckpointWrapper"
            assert type(model.blocks[0].module) is nn.Sequential
        if order == "deepcopy":
            list(model.parameters())
            model = copy.deepcopy(model)
        found = train(ours(), model)
        assert_values(found["model"], expected["model"], order)
        assert_state(found["optimizer"], expected["optimizer"], order)
        model.load_state_dict(found["model"])

    model.apply(lambda m: nn.init.ones_(m.weight) if isinstance(m, nn.Linear) else None)
    assert model.state_dict()["head.weight"].eq(1).all(), "apply sees whole values, and its edits count"


def test_wrapper_behaves_like_the_module_inside() -> None:
    ranks.run(_as_a_module, 2, init=True, timeout_s=120)


class Varied(nn.Module):
    """Tied weights, a frozen part, a buffer, an ignored adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.frozen = nn.Linear(8, 8)
        self.adapter = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 8))
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.adapter(self.frozen(self.embedding(x).mean(1)))) * self.scale)
        return out


def _tokens(step: int, rank: int) -> Tensor:
    return torch.randint(0, 11, (6, 3), generator=torch.Generator().manual_seed(7 + 10 * step + rank))


def _varied_step(model: Any, pieces: list[int]) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(2):
        for rank in pieces:
            (model(_tokens(step, rank)).logsumexp(1).mean() / len(pieces)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def _parts() -> dict[str, Any]:
    from fullshard.torch_fsdp import FullyShardedDataParallel as FSDP

    found: dict[str, Any] = {}
    for option in ("ignored_modules", "ignored_states"):
        inside = build(Varied)
        given = [inside.adapter] if option == "ignored_modules" else list(inside.adapter.parameters())
        before = inside.adapter.weight
        model = FSDP(inside, **{option: given})
        model.adapter.requires_grad_(False)
        optimizer = _varied_step(model, [my_rank()])
        assert inside.adapter.weight is before
        assert before.shape == (8, 8)
        state = model.state_dict()
        assert state["head.weight"] is state["embedding.weight"], "tied values are one"
        found[option] = state, FSDP.optim_state_dict(model, optimizer)
        model.load_state_dict(state)
    return found


def test_tied_frozen_and_ignored_parameters_are_as_in_one_process() -> None:
    plain = build(Varied)
    plain.adapter.requires_grad_(False)
    optimizer = _varied_step(plain, [0, 1])
    results = ranks.run(_parts, 2, timeout_s=120)
    for found in results:
        for option, (state, optimizer_state) in found.items():
            assert list(state) == list(plain.state_dict()), option
            for name, value in plain.state_dict().items():
                if not name.startswith("norm."):  # each rank's own statistics
                    reference.assert_close(state[name], value, f"{option}: {name}", rtol=1e-4)
            expected = {n: optimizer.state[p] for n, p in plain.named_parameters() if p in optimizer.state}
            assert sorted(optimizer_state["state"]) == sorted(expected)
            momentum = optimizer_state["state"]["embedding.weight"]["momentum_buffer"]
            reference.assert_close(
                momentum, expected["embedding.weight"]["momentum_buffer"], option, rtol=1e-4
            )
