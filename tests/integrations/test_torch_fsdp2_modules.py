"""What `fully_shard` makes of modules: classes, methods, meta-device models, state dicts, refusals."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from test_torch_fsdp2 import WIDTH, WORDS, Net, batches, build, by_blocks, loss_of
from torch import Tensor, nn

import ranks
import reference


def rank() -> int:
    return int(torch.distributed.get_rank())


def refusal(call: Callable[[], Any]) -> str:
    """The name of what it raises."""
    try:
        call()
    except Exception as error:
        return type(error).__name__
    return "nothing"


def whole(model: nn.Module) -> dict[str, Tensor]:
    import fullshard as fs

    with fs.full(model, writeback=False):
        return {name: value.detach().clone() for name, value in model.state_dict().items()}


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    assert list(ours) == list(theirs)
    return all(reference.bitwise(ours[name], theirs[name]) for name in theirs)


# --- classes -------------------------------------------------------------------------------------------


def _classes() -> None:
    from fullshard.errors import NotSupported
    from fullshard.torch_fsdp import FSDPModule, fully_shard

    model = build()
    names = [name for name, _ in model.named_parameters()]
    for used in (False, True):
        if not used:
            assert by_blocks(model) is model
        else:
            loss_of(model, batches(2, 1)[0][rank()]).backward()
        assert isinstance(model, Net)
        assert isinstance(model, FSDPModule)
        assert type(model).__name__ == "FSDPNet"
        assert not isinstance(model.norm, FSDPModule)
        assert [name for name, _ in model.named_parameters()] == names
        assert model._is_fsdp_managed_module
        assert refusal(lambda: pickle.dumps(model)) == NotSupported.__name__
    stack = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    fully_shard(stack)
    assert type(stack[:1]) is nn.Sequential
    assert type(stack[:0]) is nn.Sequential
    again = refusal(lambda: fully_shard(stack))
    inside = refusal(lambda: fully_shard(model.blocks[0].up))
    assert (again, inside) == ("AppliedTwice", "StateError")
    # Between marking and use the module is an ordinary one: cast it, freeze it, edit it.
    stack.double()
    stack.requires_grad_(False)
    assert stack[0].weight.shape == (2, 2)
    assert [(p.dtype, p.requires_grad) for p in stack.parameters()] == [(torch.float64, False)] * 4


def _copies() -> None:
    """A copy of a marked model, and one of a sharded model, train apart from their originals."""
    model = by_blocks(build())
    early = copy.deepcopy(model)
    plain = whole(model)
    late = copy.deepcopy(model)
    for each in (early, late):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.5)
        loss_of(each, batches(2, 1)[0][rank()]).backward()
        optimizer.step()
    assert same(whole(model), plain)
    assert same(whole(early), whole(late))
    assert not same(whole(early), plain)


def _forgotten() -> None:
    """A model with a request that nobody uses is freed, and does not become part of another."""
    from fullshard.torch_fsdp import deferred, fully_shard

    gc.collect()  # what others have left may go at any time
    before = len(deferred._deferred)
    fully_shard(nn.Linear(2, 2))
    gc.collect()
    assert len(deferred._deferred) == before


def _too_late() -> str:
    from fullshard.torch_fsdp import fully_shard

    model = build()
    fully_shard(model.blocks[0])
    model.blocks[0](torch.randn(2, WIDTH))
    fully_shard(model)
    return refusal(lambda: model(torch.zeros(1, 2, dtype=torch.long)))


def _surface() -> str:
    _classes()
    _copies()
    _forgotten()
    return _too_late()


def test_marked_module_keeps_its_class_its_names_and_can_be_copied() -> None:
    assert ranks.run(_surface, 2, init=True, timeout_s=120) == ["StateError"] * 2


# --- methods -------------------------------------------------------------------------------------------


def _unshard_and_reshard() -> None:
    model = build()
    plain = copy.deepcopy(model)
    by_blocks(model)
    block, its_whole = model.blocks[1].up.weight, plain.blocks[1].up.weight
    model.unshard()
    assert torch.equal(model.norm.weight, plain.norm.weight)
    assert torch.equal(model.embed.weight, plain.embed.weight)
    assert block.shape != its_whole.shape  # not of the blocks inside
    model.reshard()
    assert model.embed.weight.shape != plain.embed.weight.shape
    handle = model.blocks[1].unshard(async_op=True)
    handle.wait()
    assert torch.equal(block, its_whole)
    tokens = batches(2, 1)[0]
    loss_of(model, tokens[rank()]).backward()  # a forward ends it, and trains
    assert block.shape != its_whole.shape
    (sum(loss_of(plain, piece) for piece in tokens) / 2).backward()  # type: ignore[union-attr]
    norms = [nn.utils.clip_grad_norm_(m.parameters(), 1e9) for m in (model, plain)]
    torch.testing.assert_close(norms[0], norms[1], rtol=1e-4, atol=1e-6)
    model.blocks[1].unshard()
    assert refusal(lambda: torch.optim.SGD(model.parameters(), lr=0.1).step()) == "StateError"
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()


class Large(nn.Module):
    """Blocks of 20 MiB. All units of a small model stay full, of a large one the last two and 32 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(2304, 2304) for _ in range(3))
        self.head = nn.Linear(2304, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def _full_after_forward(model: nn.Module, passes: int = 1) -> list[bool]:
    """Which units are full between forward and backward, the root first."""
    runtime = model.__dict__["_fullshard"]
    for _ in range(passes):
        loss = model(torch.ones(1, 2304)).sum()
        full = [unit.state.name == "FULL" for unit in runtime.units]
        loss.backward()
    return full


def _reshard_after_forward() -> None:
    model = by_blocks(Large())
    list(model.parameters())
    # The first pass learns the order; the last two come first in backward.
    assert _full_after_forward(model, passes=2) == [True, False, True, True]
    model.set_reshard_after_forward(False)
    assert _full_after_forward(model) == [True] * 4
    model.set_reshard_after_forward(True)
    assert _full_after_forward(model) == [False, False, True, True]
    model.blocks[0].set_reshard_after_forward(False)
    assert _full_after_forward(model)[1]
    mixed = Large()
    from fullshard.torch_fsdp import fully_shard

    fully_shard(mixed.blocks[0], reshard_after_forward=False)
    mixed.blocks[0].set_reshard_after_forward(True)  # before the model around it is marked
    fully_shard(mixed.blocks[1], reshard_after_forward=False)
    fully_shard(mixed.blocks[2])
    fully_shard(mixed, reshard_after_forward=True)
    list(mixed.parameters())
    assert _full_after_forward(mixed, passes=2) == [False, False, True, True]
    loss = mixed(torch.ones(1, 2304)).sum()
    mixed.blocks[1].reshard()
    assert mixed.__dict__["_fullshard"].units[2].state.name == "AT_REST"
    loss.backward()


def _divide() -> None:
    model = build()
    plain = copy.deepcopy(model)
    by_blocks(model)
    model.blocks[0].set_gradient_divide_factor(1.0)  # the sum, not the mean
    model.set_reduce_scatter_divide_factor(4.0)
    tokens = batches(2, 1)[0]
    loss_of(model, tokens[rank()]).backward()
    sum(loss_of(plain, piece) for piece in tokens).backward()  # type: ignore[union-attr]
    for part, factor in ((slice(0, 1), 1.0), (slice(1, 2), 2.0)):
        ours, theirs = model.blocks[part], plain.blocks[part]
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 1e9) for m in (ours, theirs)]
        torch.testing.assert_close(norms[0], norms[1] / factor, rtol=1e-4, atol=1e-6)
    norms = [nn.utils.clip_grad_norm_(m.norm.parameters(), 1e9) for m in (model, plain)]
    torch.testing.assert_close(norms[0], norms[1] / 4, rtol=1e-4, atol=1e-6)


def _recovers() -> None:
    model = by_blocks(build())
    plain = whole(model)
    hook = model.blocks[1].register_forward_pre_hook(lambda *_: 1 / 0)
    assert refusal(lambda: loss_of(model, batches(2, 1)[0][rank()])) == "ZeroDivisionError"
    hook.remove()
    model.reset_iter_state()
    loss_of(model, batches(2, 1)[0][rank()]).backward()
    assert same(whole(model), plain)


def _evaluated_first() -> None:
    """An evaluation may be the first use: the shards that it makes must train."""
    for mode in (torch.inference_mode, torch.no_grad):
        model = build()
        plain = copy.deepcopy(model)
        by_blocks(model)
        tokens = batches(2, 1)[0]
        with mode():
            assert loss_of(model, tokens[rank()]).item() == loss_of(plain, tokens[rank()]).item()
        loss_of(model, tokens[rank()]).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        assert all(p.grad is not None and p.requires_grad for p in model.parameters())


def _methods() -> None:
    _evaluated_first()
    _unshard_and_reshard()
    _reshard_after_forward()
    _divide()
    _recovers()


def test_methods_of_a_marked_module_do_what_torchs_do() -> None:
    ranks.run(_methods, 2, init=True, timeout_s=120)


class Reader(nn.Module):
    """A method other than forward that reads a parameter, and one that only calls modules."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((WIDTH,), 2.0))
        self.inner = nn.Linear(WIDTH, WIDTH)

    def encode(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.scale

    def twice(self, x: Tensor) -> Tensor:
        return self.inner(self.inner(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x)


def _forward_methods() -> None:
    from fullshard.torch_fsdp import fully_shard, register_fsdp_forward_method

    torch.manual_seed(0)
    for outer in (False, True):
        model: Any = nn.Sequential(Reader()) if outer else Reader()
        plain = copy.deepcopy(model)
        reader, theirs = (model[0], plain[0]) if outer else (model, plain)
        fully_shard(reader)
        fully_shard(model) if outer else None
        for name in ("encode", "twice"):
            register_fsdp_forward_method(reader, name)
        x = torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(1))
        for name in ("encode", "twice", "forward"):
            getattr(reader, name)(x[rank()]).square().mean().backward()
            for part in x:
                (getattr(theirs, name)(part).square().mean() / 2).backward()
            norms = [nn.utils.clip_grad_norm_(m.parameters(), 1e9) for m in (model, plain)]
            torch.testing.assert_close(norms[0], norms[1], rtol=1e-4, atol=1e-6)
        twin = copy.deepcopy(reader)
        twin.zero_grad()
        twin.encode(x[rank()]).mean().backward()
        assert twin.scale.grad is not None
    register_fsdp_forward_method(nn.Linear(2, 2), "forward")  # no mark: nothing
    assert refusal(lambda: register_fsdp_forward_method(reader, "absent")) == "OptionError"


def test_registered_method_computes_with_whole_parameters_and_trains() -> None:
    ranks.run(_forward_methods, 2, init=True, timeout_s=120)


# --- meta-device models --------------------------------------------------------------------------------


def _initialise(model: nn.Module) -> None:
    """All the ways in which people do it."""
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert isinstance(model, Net)
    model.apply(lambda m: nn.init.constant_(m.bias, 0.5) if isinstance(m, nn.LayerNorm) else None)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)
        model.blocks[0].up.weight.data.normal_(0.0, 0.02)
        model.blocks[0].up.weight[1].fill_(3.0)
        model.blocks[1].down.bias.copy_(torch.arange(float(WIDTH)))
    nn.init.trunc_normal_(model.head.weight, std=model.head.weight.shape[1] ** -0.5)


def _meta() -> None:
    with torch.device("meta"):
        model = by_blocks(Net())
        waiting = by_blocks(Net())
    assert all(p.is_meta for p in model.parameters())
    assert all(v.is_meta for v in model.state_dict().values())
    assert refusal(lambda: waiting(torch.zeros(1, 2, dtype=torch.long))) == "ModelError"
    assert model.to_empty(device="cpu") is model
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in build().parameters())
    plain = build()
    for each in (model, plain):
        torch.manual_seed(7)
        _initialise(each)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    loss_of(model, batches(2, 1)[0][rank()]).backward()
    assert all(type(p).__name__ == "Parameter" for p in model.parameters())
    assert same(whole(model), plain.state_dict())  # bit for bit those of a model that was never sharded
    optimizer.step()
    assert sum(p.numel() for p in model.parameters()) < sum(p.numel() for p in plain.parameters())


def _meta_with_different_seeds() -> None:
    """The first rank's values count, as everywhere."""
    with torch.device("meta"):
        model = by_blocks(Net())
    model.to_empty(device="cpu")
    plain = build()
    for each, seed in ((model, rank()), (plain, 0)):
        torch.manual_seed(seed)
        for module in each.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
    assert same(whole_of_used(model), plain.state_dict())


def whole_of_used(model: nn.Module) -> dict[str, Tensor]:
    loss_of(model, batches(2, 1)[0][rank()])
    return whole(model)


def _meta_forgotten() -> None:
    with torch.device("meta"):
        model = by_blocks(Net())
    model.to_empty(device="cpu")
    for module in model.modules():
        if hasattr(module, "reset_parameters") and not isinstance(module, nn.LayerNorm):
            module.reset_parameters()
    assert torch.isnan(loss_of(model, batches(2, 1)[0][rank()]))


def _meta_loaded() -> None:
    values = build(5).state_dict()
    for assign in (False, True):
        with torch.device("meta"):
            model = by_blocks(Net())
        model.load_state_dict(values, assign=assign)
        assert same(whole(model), values)
    with torch.device("meta"):  # a parent that is not marked
        holder = nn.Sequential(Net())
    by_blocks(holder[0])
    holder.to_empty(device="cpu")
    holder.load_state_dict({f"0.{name}": value for name, value in values.items()})
    assert same(whole(holder[0]), values)


def _meta_in_pieces() -> None:
    """Adapters get their values by themselves; the rest is loaded value by value."""
    from fullshard.torch_fsdp import fully_shard

    torch.manual_seed(0)
    values = {"0.weight": torch.randn(3, 4), "0.bias": torch.randn(3), "1.weight": torch.randn(2, 3)}
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2, bias=False), nn.Linear(2, 2))
        model[0].register_buffer("shift", torch.ones(3))
    fully_shard([model[0], model[1]])
    fully_shard(model)
    nn.init.constant_(model[2].to_empty(device="cpu").weight, 7.0)
    model[1].shift = nn.Parameter(torch.full((5,), 9.0))  # beside a weight that is on meta
    for name, value in values.items():
        model.load_state_dict({name: value}, strict=False, assign=True)
    low = {"0.bias": values["0.bias"].bfloat16()}
    assert refusal(lambda: model.load_state_dict(low, strict=False, assign=True)) == "NotSupported"
    found = whole(model)
    assert all(reference.bitwise(found[name], value) for name, value in values.items())
    assert found["2.weight"].unique().tolist() == [7.0]
    assert found["1.shift"].tolist() == [9.0] * 5


def test_values_put_into_a_meta_model_stay_while_others_are_loaded_in_pieces() -> None:
    ranks.run(_meta_in_pieces, 2, init=True, timeout_s=120)


def _meta_replaced() -> None:
    """Norms of weights, as DoRA has them: made from others' values and put in the place of a parameter."""
    from fullshard.torch_fsdp import fully_shard

    torch.manual_seed(0)
    wanted = torch.randn(3, 3)
    for early in (False, True):
        with torch.device("meta"):
            model: Any = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
            model.norms, model[0].norms = (nn.Parameter(torch.empty(3)) for _ in range(2))
        fully_shard(model[0])
        fully_shard(model)
        model.to_empty(device="cpu")
        with torch.no_grad():
            for each in model:
                each.weight.copy_(wanted)
            for holder in (model, model[0]):  # the second one while its unit is open
                holder.norms = nn.Parameter(model[0].weight.norm(dim=1))
        if early:
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        loss = model(torch.ones(1, 3)).sum()
        found = whole(model)
        for name in ("norms", "0.norms"):
            reference.assert_close(found[name], wanted.norm(dim=1), name, rtol=1e-6, atol=0.0)
        loss.backward()
        if early:
            trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
            assert trained == {id(p) for p in model.parameters()}


def _meta_all_replaced() -> None:
    """Value by value, as loaders put them; a tie that was not there when the model was cut is no value."""
    from fullshard.torch_fsdp import fully_shard

    def emptied() -> Any:
        with torch.device("meta"):
            model = nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(4)))
        fully_shard(model[1])
        fully_shard(model)
        return model.to_empty(device="cpu")

    model = emptied()
    for i, each in enumerate(model):
        each.weight = nn.Parameter(torch.full((3, 3), float(i)), requires_grad=i != 2)
    assert [p.requires_grad for p in model.parameters()] == [True, True, False, True]
    model(torch.ones(1, 3)).sum().backward()
    assert [value.unique().tolist() for value in whole(model).values()] == [[0.0], [1.0], [2.0], [3.0]]
    for put in (None, nn.Parameter(torch.ones(3, 3))):
        model = emptied()
        nn.init.ones_(model[0].weight)
        model[0].weight = model[0].weight if put is None else put
        model[3].weight = model[0].weight
        assert refusal(lambda m=model: m(torch.ones(1, 3))) == "AtRestError"  # type: ignore[misc]


def test_parameter_put_in_the_place_of_another_before_the_first_use_counts() -> None:
    ranks.run(_meta_replaced, 2, init=True, timeout_s=120)


def test_parameters_all_put_anew_count_and_a_new_tie_is_refused() -> None:
    ranks.run(_meta_all_replaced, 2, init=True, timeout_s=120)


class _Tables(nn.Module):
    """Buffers that only `__init__` computes, in the kinds that models have."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)
        self.register_buffer("scale", torch.full((4,), 2.0))
        self.register_buffer("angles", torch.arange(4.0), persistent=False)
        self.register_buffer("seen", torch.tensor([True, False]), persistent=False)
        self.register_buffer("codes", torch.full((3,), 255, dtype=torch.uint8), persistent=False)
        self.register_buffer("unused", torch.empty(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x) * self.scale + self.angles * self.seen[0] + self.codes[0]


class _Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = _Tables()
        self.register_buffer("step", torch.arange(2), persistent=False)  # of the root, and an integer

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.step[1]


def _a_part_is_loaded() -> None:
    """torch's functions put the model's own parameters where a state dict has none."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    from fullshard.torch_fsdp import fully_shard

    given, x = {"0.weight": torch.ones(5, 5)}, torch.ones(2, 5)
    for broadcast in (False, True):
        torch.manual_seed(3)
        plain = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3))
        model: Any = copy.deepcopy(plain)
        for module in (model[0], model[2], model):
            fully_shard(module)
        mine = given if rank() == 0 or not broadcast else {}
        for strict in (True, False):
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast, strict=strict)
            try:
                set_model_state_dict(model, dict(mine), options=options)  # it adds to what it is given
                assert not strict
            except RuntimeError as error:
                assert strict, error
                assert "Missing key(s)" in str(error)
                assert '"0.bias"' in str(error)
        plain.load_state_dict(given, strict=False)
        torch.testing.assert_close(model(x), plain(x))


def test_a_state_dict_of_some_parameters_loads_these_or_names_the_missing_ones() -> None:
    ranks.run(_a_part_is_loaded, 2, init=True, timeout_s=120)


def _channels_last() -> list[str]:
    """Images keep their memory order: of unsharded values on the first rank, and of a sharded model's."""
    from torch.distributed.checkpoint import state_dict as stock

    from fullshard.torch_fsdp import fully_shard

    def made(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Conv2d(3, 5, 3), nn.Conv2d(5, 2, 3)).to(memory_format=torch.channels_last)

    expected, first, second = made(0), fully_shard(made(1)), fully_shard(made(2))
    options = stock.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    given = expected.state_dict() if rank() == 0 else {}
    stock.set_model_state_dict(first, given, options=options)
    taken = stock.get_model_state_dict(first, options=stock.StateDictOptions(full_state_dict=True))
    stock.set_model_state_dict(second, taken if rank() == 0 else {}, options=options)
    values = expected.state_dict()
    return [
        f"{what}: {name}"
        for what, model in (("from unsharded", first), ("from sharded", second))
        for name, value in whole(model).items()
        if not torch.equal(value, values[name])
    ]


def test_values_in_channels_last_order_that_the_first_rank_sends_reach_all_ranks_as_they_are() -> None:
    assert ranks.run(_channels_last, 2, init=True, timeout_s=120) == [[], []]


def _blank_buffers() -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    from fullshard.errors import Uninitialised
    from fullshard.torch_fsdp import fully_shard

    torch.manual_seed(3)
    plain = _Holder()
    values, x = plain.state_dict(), torch.arange(8.0).view(2, 4)

    def emptied(load: str) -> Any:
        with torch.device("meta"):
            model = _Holder()
        fully_shard(model.inner)
        fully_shard(model)
        if load == "plain":
            model.load_state_dict(values)
            return model
        model.to_empty(device="cpu")
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, values if rank() == 0 else {}, options=options)
        return model

    for load in ("broadcast", "plain"):
        model = emptied(load)
        for _ in range(2):  # it stays refused
            try:
                model(x)
                text = ""
            except Uninitialised as error:
                text = str(error)
            names = ("'inner.angles'", "'inner.seen'", "'inner.codes'", "'step'")
            assert all(name in text for name in names), text
            assert not any(name in text for name in ("scale", "unused")), text
        for name in ("angles", "seen", "codes"):
            getattr(model.inner, name).copy_(getattr(plain.inner, name))  # 255 is what it was, and counts
        if rank() == 1:
            model.step = plain.step.clone()
        else:
            model.step.data.copy_(plain.step)
        assert reference.bitwise(model(x), plain(x))


def test_buffer_that_nothing_initialises_after_to_empty_is_refused_by_name() -> None:
    ranks.run(_blank_buffers, 2, init=True, timeout_s=120)


def _buffers_of_the_first_rank() -> None:
    """Drawn after to_empty with a seed per rank: the first rank's count, as for parameters."""
    from fullshard.torch_fsdp import fully_shard

    with torch.device("meta"):
        model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[0].register_buffer("noise", torch.empty(4), persistent=False)
    fully_shard(model)
    model.to_empty(device="cpu")
    torch.manual_seed(rank())
    for each in model:
        each.reset_parameters()
    model[0].noise.normal_()
    model(torch.ones(1, 4))
    shared = [torch.empty(4) for _ in range(2)]
    torch.distributed.all_gather(shared, model[0].noise)
    assert reference.bitwise(shared[0], shared[1])


def test_buffers_drawn_after_to_empty_are_those_of_the_first_rank() -> None:
    ranks.run(_buffers_of_the_first_rank, 2, init=True, timeout_s=120)


class _Renaming(nn.Linear):
    def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:  # type: ignore[override]
        renamed = {name.removeprefix("old."): value for name, value in state_dict.items()}
        return super().load_state_dict(renamed, strict)


def _own_loading() -> None:
    from fullshard.torch_fsdp import fully_shard

    values = {"weight": torch.randn(3, 4, generator=torch.Generator().manual_seed(0)), "bias": torch.ones(3)}
    model = _Renaming(4, 3)
    fully_shard(model)
    for times in (1, 2):  # the first call shards
        model.load_state_dict({f"old.{name}": times * value for name, value in values.items()})
        assert same(whole(model), {name: times * value for name, value in values.items()})


def test_class_with_a_load_state_dict_of_its_own_is_loaded_by_it() -> None:
    ranks.run(_own_loading, 2, init=True, timeout_s=120)


def _meta_all() -> None:
    _meta()
    _meta_with_different_seeds()
    _meta_forgotten()
    _meta_loaded()


def test_meta_device_model_gets_the_values_of_an_unsharded_one() -> None:
    ranks.run(_meta_all, 2, init=True, timeout_s=120)


# --- state dicts through torch's functions ---------------------------------------------------------------


def _trained(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build(seed)
    by_blocks(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for batch in batches(2, 2):
        loss_of(model, batch[rank()]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def _alone() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for batch in batches(2, 2):
        (sum(loss_of(model, piece) for piece in batch) / 2).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def _next_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    loss_of(model, batches(2, 3)[2][rank()]).backward()
    optimizer.step()
    optimizer.zero_grad()
    return whole(model)


def _whole_state() -> None:
    """full_state_dict gives what the same functions give of an unsharded model."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    model, optimizer = _trained()
    theirs = get_state_dict(*_alone())
    for on_host in (False, True):
        options = StateDictOptions(full_state_dict=True, cpu_offload=on_host)
        ours = get_state_dict(model, optimizer, options=options)
        if on_host and rank():
            assert ours == ({}, {})
            continue
        for name, value in theirs[0].items():
            assert type(ours[0][name]) is Tensor
            reference.assert_close(ours[0][name], value, name, rtol=1e-4, atol=1e-5)
        for name, state in theirs[1]["state"].items():
            for key, value in state.items():
                reference.assert_close(ours[1]["state"][name][key], value, f"{name}.{key}", 1e-4, 1e-5)
        torch.save(ours, io.BytesIO())
    parts = model.state_dict()
    assert all(torch.equal(parts[n].full_tensor(), v) for n, v in whole(model).items())
    assert all(parts[n].to_local().data_ptr() == p.data_ptr() for n, p in model.named_parameters())
    assert refusal(lambda: torch.save(parts, io.BytesIO())) == "StateError"


def _round_trip(folder: str) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model, optimizer = _trained()
    saved = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(saved, checkpoint_id=folder)
    second, its_optimizer = _trained(seed=1)
    read = dict(zip(("model", "optimizer"), get_state_dict(second, its_optimizer), strict=True))
    dcp.load(read, checkpoint_id=folder)
    set_state_dict(second, its_optimizer, model_state_dict=read["model"], optim_state_dict=read["optimizer"])
    assert same(_next_step(second, its_optimizer), _next_step(model, optimizer))


def _from_the_first_rank() -> None:
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_state_dict,
        set_model_state_dict,
        set_optimizer_state_dict,
    )

    model, optimizer = _trained()
    values, state = copy.deepcopy(
        get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    )
    expected = _next_step(model, optimizer)
    for broadcast in (False, True):
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
        second, its_optimizer = _trained(seed=1)
        here = not broadcast or rank() == 0
        set_model_state_dict(second, copy.deepcopy(values) if here else {}, options=options)
        set_optimizer_state_dict(second, its_optimizer, copy.deepcopy(state) if here else {}, options=options)
        assert same(_next_step(second, its_optimizer), expected), broadcast


def _states(folder: str) -> None:
    _whole_state()
    _round_trip(folder)
    _from_the_first_rank()


def test_torchs_state_dict_functions_save_and_load_all_of_it(tmp_path: Path) -> None:
    ranks.run(_states, 2, str(tmp_path / "saved"), init=True, timeout_s=120)


# --- refused by name -----------------------------------------------------------------------------------


def _refused() -> dict[str, tuple[str, str]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard

    from fullshard import torch_fsdp as t

    def linear() -> Any:
        return nn.Linear(2, 2)

    mesh = init_device_mesh("cpu", (2, 1, 1))
    nameless = init_device_mesh("cpu", (1, 2))
    named = init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))
    pair = nn.Sequential(linear(), linear())
    t.fully_shard(pair[0], mesh=named)
    t.fully_shard(pair, mesh=init_device_mesh("cpu", (2,)))
    marked = t.fully_shard(linear())
    other = nn.Sequential(linear(), linear())
    t.fully_shard(other[0], reshard_after_forward=1)
    cases: dict[str, Callable[[], Any]] = {
        "offload": lambda: t.fully_shard(linear(), offload_policy=True),
        "placement": lambda: t.fully_shard(linear(), shard_placement_fn=lambda p: "rows"),
        "dimension": lambda: t.fully_shard(linear(), shard_placement_fn=lambda p: Shard(1)),
        "axes by name": lambda: t.fully_shard(linear(), dp_mesh_dims=t.DataParallelMeshDims(shard="a")),
        "no axis": lambda: t.DataParallelMeshDims(),
        "three axes": lambda: t.fully_shard(linear(), mesh=mesh),
        "no names": lambda: t.fully_shard(linear(), mesh=nameless),
        "no forward": lambda: t.fully_shard(nn.ModuleList([linear()])),
        "no module": lambda: t.fully_shard(3),  # type: ignore[type-var]
        "no policy": lambda: t.fully_shard(linear(), mp_policy="bf16"),
        "group": lambda: t.fully_shard(linear(), mesh=named, reshard_after_forward=3),
        "meshes": lambda: pair(torch.zeros(2)),
        "flag": lambda: marked.set_reshard_after_forward(2),
        "buffers": lambda: marked.set_reduce_scatter_max_input_buffers(0),
        "prefetch": lambda: marked.set_modules_to_forward_prefetch([linear()]),
        "streams": lambda: t.share_comm_ctx([linear()]),
        "hook": lambda: marked.set_all_reduce_hook(print),
        "gather": lambda: marked.set_custom_all_gather(None),
        "reduce": lambda: marked.set_custom_reduce_scatter(None),
        "symmetric": lambda: marked.set_symm_mem_for_comm(),
        "memory": lambda: marked.set_allocate_memory_from_process_group_for_comm(True),
        "absent name": lambda: t.no_such_name,
    }
    found = {}
    for name, case in cases.items():
        try:
            case()
            found[name] = ("nothing", "")
        except Exception as error:
            found[name] = (type(error).__name__, str(error))
    return found


def test_what_the_engine_cannot_do_is_refused_by_name() -> None:
    found = ranks.run(_refused, 2, init=True, timeout_s=120)[0]
    unsupported = {
        "placement": "shard_placement_fn", "axes by name": "dp_mesh_dims",
        "meshes": "different meshes", "hook": "set_all_reduce_hook",
        "gather": "set_custom_all_gather", "reduce": "set_custom_reduce_scatter",
        "symmetric": "set_symm_mem_for_comm", "memory": "set_allocate_memory_from_process_group_for_comm",
    }  # fmt: skip
    for name, says in unsupported.items():
        kind, message = found.pop(name)
        assert (kind, says in message) == ("NotSupported", True), (name, kind, message)
    assert found.pop("absent name")[0] == "AttributeError"
    assert {found.pop(name)[0] for name in ("no names", "dimension")} == {"WrongLayout"}
    assert {name: kind for name, (kind, _) in found.items()} == dict.fromkeys(found, "OptionError")


def _hints() -> None:
    """Setters that change no number here: they are taken, and the model trains on."""
    from fullshard.torch_fsdp import fully_shard, share_comm_ctx

    model = by_blocks(build())
    share_comm_ctx(list(model.blocks))
    first, second = model.blocks[0], model.blocks[1]
    first.set_modules_to_forward_prefetch([second])
    second.set_modules_to_backward_prefetch([first])
    model.set_reshard_after_backward(False)
    model.set_is_last_backward(False)
    model.set_unshard_in_backward(False)
    model.set_post_optim_event(None)
    model.set_force_sum_reduction_for_comms(True)
    model.set_reduce_scatter_max_input_buffers(2)
    model.set_separate_reduce_scatter_group()
    model.set_allocate_memory_from_process_group_for_comm(False)
    expected = by_blocks(build())
    tokens = batches(2, 1)[0][rank()]
    assert loss_of(model, tokens).item() == loss_of(expected, tokens).item()
    nothing = fully_shard(nn.ReLU())
    nothing.unshard()
    nothing.reshard()
    assert nothing(torch.tensor([-1.0, 2.0])).tolist() == [0.0, 2.0]


def test_setters_that_this_engine_needs_not_are_taken() -> None:
    ranks.run(_hints, 2, init=True, timeout_s=120)


def test_ignored_parameters_stay_whole_on_every_rank() -> None:
    assert ranks.run(_ignored, 2, init=True, timeout_s=120) == [((WORDS, WIDTH), True)] * 2


def _ignored() -> tuple[tuple[int, ...], bool]:
    from fullshard.torch_fsdp import fully_shard

    model = build()
    kept = {model.embed.weight}
    for block in model.blocks:
        fully_shard(block, ignored_params=kept)
    fully_shard(model, ignored_params=kept)
    loss_of(model, batches(2, 1)[0][rank()]).backward()
    shape: tuple[int, ...] = tuple(model.embed.weight.shape)
    return shape, type(model.embed.weight.grad) is Tensor


def _compiled_on_meta() -> dict[str, int]:
    from fullshard.torch_fsdp import fully_shard

    found = {}
    for when in ("before to_empty", "after to_empty"):
        graphs: list[Any] = []

        def backend(graph: Any, _: Any, graphs: list[Any] = graphs) -> Any:
            graphs.append(graph)
            return graph.forward

        with torch.device("meta"):
            model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 4))
        fully_shard(model[0])
        fully_shard(model)
        if when == "before to_empty":
            model[0].compile(backend=backend)
        model.to_empty(device="cpu")
        if when == "after to_empty":
            model[0].compile(backend=backend)
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.reset_parameters()
        model(torch.randn(2, 4)).sum().backward()
        found[when] = len(graphs)
    return found


def test_compile_of_a_meta_model_before_or_after_to_empty_counts() -> None:
    for found in ranks.run(_compiled_on_meta, 2, init=True, timeout_s=120):
        assert found == {"before to_empty": 1, "after to_empty": 1}
