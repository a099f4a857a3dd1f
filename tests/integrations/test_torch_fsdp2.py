"""torch's `fully_shard` calls on this engine: the numbers of one unsharded process, and of torch's."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import ranks
import reference

WIDTH = 6
WORDS = 11  # odd: no cut falls on a row
STEPS = 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """An embedding, blocks and a head that is tied to the embedding."""

    def __init__(self, blocks: int = 3, tie: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tie:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build(seed: int = 0, tie: bool = True) -> Net:
    torch.manual_seed(seed)
    return Net(tie=tie)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())


def batches(ranks_: int, count: int) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        [torch.randint(0, WORDS, (2, 5), generator=generator) for _ in range(ranks_)] for _ in range(count)
    ]


def by_blocks(model: Net, **options: Any) -> nn.Module:
    from fullshard.torch_fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def root_only(model: Net, **options: Any) -> nn.Module:
    from fullshard.torch_fsdp import fully_shard

    return fully_shard(model, **options)


def groups(model: Net, **options: Any) -> nn.Module:
    from fullshard.torch_fsdp import fully_shard

    fully_shard([model.embed, model.head], **options)
    fully_shard([model.blocks[0], model.blocks[1]], **options)
    assert fully_shard([model.norm], **options) == [model.norm]
    fully_shard(model.blocks[2].up, **options)
    fully_shard(model.blocks[2], **options)
    return fully_shard(model, **options)


def outer_first(model: Net, **options: Any) -> nn.Module:
    from fullshard.torch_fsdp import fully_shard

    fully_shard(model, **options)
    for block in model.blocks:
        fully_shard(block, **options)
    return model


WAYS: dict[str, Callable[..., nn.Module]] = {
    "block by block": by_blocks,
    "the root alone": root_only,
    "groups and nested": groups,
    "outer first": outer_first,
}


def _train(way: str, ranks_: int, options: dict[str, Any], mesh: tuple[int, ...] | None) -> reference.Trace:
    if mesh is not None:
        names = ("one", "two")[: len(mesh)]
        options = {**options, "mesh": init_device_mesh("cpu", mesh, mesh_dim_names=names)}
    model = WAYS[way](build(), **options)
    mine = [batch[torch.distributed.get_rank()] for batch in batches(ranks_, STEPS)]
    return reference.train_rank(model, mine, loss_of, reference.adamw, STEPS, clip=0.5)


@functools.cache
def _alone(ranks_: int) -> reference.Trace:
    return reference.train(build(), batches(ranks_, STEPS), loss_of, reference.adamw, STEPS, clip=0.5)


def _train_each() -> dict[str, reference.Trace]:
    """Every way to mark a model, and every reshard_after_forward."""
    found = {way: _train(way, 2, {}, None) for way in WAYS}
    for reshard in (True, False, 1, 2):
        options = {"reshard_after_forward": reshard}
        found[f"reshard_after_forward={reshard!r}"] = _train("block by block", 2, options, (2,))
    return found


def test_marked_in_any_way_it_trains_as_one_process_does() -> None:
    by_rank = ranks.run(_train_each, 2, init=True, timeout_s=120)
    for case in by_rank[0]:
        trace = reference.combine([found[case] for found in by_rank])
        try:
            reference.assert_close_trace(trace, _alone(2), rtol=1e-4, atol=1e-5)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error


def _on_four() -> list[reference.Trace]:
    """A group of two ranks that keep a unit together, and a mesh of replicas and shards."""
    return [
        _train("block by block", 4, {"reshard_after_forward": 2}, None),
        _train("block by block", 4, {}, (2, 2)),
    ]


def test_group_size_and_a_mesh_of_two_axes_train_as_one_process_does() -> None:
    by_rank = ranks.run(_on_four, 4, init=True, timeout_s=120)
    for traces in zip(*by_rank, strict=True):
        reference.assert_close_trace(reference.combine(traces), _alone(4), rtol=1e-4, atol=1e-5)


# --- several roots, optimizers before and after --------------------------------------------------------


def _close(model: nn.Module, plain: nn.Module, what: str) -> None:
    import fullshard as fs

    wholes = {id(m): m for m in model.modules() if "_fullshard" in m.__dict__}
    roots = {id(m.__dict__["_fullshard"]): m.__dict__["_fullshard"].root.modules[0] for m in wholes.values()}
    managers = [fs.full(root, writeback=False) for root in roots.values()]
    for manager in managers:
        manager.__enter__()
    for (name, ours), (_, theirs) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        reference.assert_close(ours.detach(), theirs.detach(), f"{what}: {name}", rtol=1e-4, atol=1e-5)
    for manager in reversed(managers):
        manager.__exit__(None, None, None)


def _both(
    model: nn.Module, plain: nn.Module, optimizers: Iterable[torch.optim.Optimizer], count: int = 3
) -> None:
    """Train the sharded model on this rank's batches and the plain one on everybody's."""
    rank = torch.distributed.get_rank()
    for batch in batches(2, 3):
        loss_of(model, batch[rank]).backward()
        (sum(loss_of(plain, piece) for piece in batch) / 2).backward()  # type: ignore[union-attr]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def _roots_side_by_side() -> None:
    from fullshard.torch_fsdp import fully_shard

    model = build(tie=False)
    plain = copy.deepcopy(model)
    before = torch.optim.SGD(model.parameters(), lr=0.1)
    for module in (model.embed, *model.blocks, model.norm):
        fully_shard(module)
    fully_shard(model.blocks[1].up)  # inside a root
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    for parameter in model.head.parameters():  # not marked: nobody synchronises it
        parameter.requires_grad_(False)
    for parameter in plain.head.parameters():
        parameter.requires_grad_(False)
    _both(model, plain, [before, theirs])
    _close(model, plain, "side by side")
    loss_of(model, batches(2, 1)[0][torch.distributed.get_rank()]).backward()
    (sum(loss_of(plain, piece) for piece in batches(2, 1)[0]) / 2).backward()  # type: ignore[union-attr]
    norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.01) for m in (model, plain)]
    torch.testing.assert_close(norms[0], norms[1], rtol=1e-4, atol=1e-6)


def _optimizers_of_all_kinds() -> None:
    """Adagrad makes its state when it is built: parameters() must give shards by then."""
    for kind in (torch.optim.Adagrad, torch.optim.AdamW):
        for after in (True, False) if kind is torch.optim.AdamW else (True,):
            model = build()
            plain = copy.deepcopy(model)
            first = None if after else kind(model.parameters(), lr=0.05)
            by_blocks(model)
            optimizer = kind(model.parameters(), lr=0.05) if first is None else first
            _both(model, plain, [optimizer, kind(plain.parameters(), lr=0.05)])
            _close(model, plain, f"{kind.__name__} built {'after' if after else 'before'}")


def _roots_and_optimizers() -> None:
    _roots_side_by_side()
    _optimizers_of_all_kinds()


def test_roots_side_by_side_and_optimizers_built_before_or_after_train_as_one_process_does() -> None:
    ranks.run(_roots_and_optimizers, 2, init=True, timeout_s=120)


# --- accumulation, frozen and unused parameters, odd outputs -------------------------------------------


def _accumulate(shape: tuple[int, ...], setter: str) -> None:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[: len(shape)])
    size = torch.distributed.get_world_size()
    model = build()
    plain = copy.deepcopy(model)
    by_blocks(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.05)
    for step in range(2):
        for index, batch in enumerate(batches(size, 6)[3 * step : 3 * step + 3]):
            getattr(model, setter)(index == 2)
            model.set_is_last_backward(index == 2)
            loss_of(model, batch[torch.distributed.get_rank()]).backward()
            for piece in batch:
                (loss_of(plain, piece) / size).backward()
        optimizer.step()
        theirs.step()
        optimizer.zero_grad()
        theirs.zero_grad()
    _close(model, plain, f"accumulated by {setter} on {shape}")


def _some_wait() -> None:
    """Modules that disagree about waiting: the sums are right all the same."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = build()
    plain = copy.deepcopy(model)
    by_blocks(model, mesh=mesh)
    for index, batch in enumerate(batches(4, 2)):
        model.blocks[0].set_requires_gradient_sync(index == 1)
        model.set_requires_gradient_sync(index == 1, recurse=False)
        loss_of(model, batch[torch.distributed.get_rank()]).backward()
        for piece in batch:
            (loss_of(plain, piece) / 4).backward()
    norms = [nn.utils.clip_grad_norm_(m.parameters(), 1e9) for m in (model, plain)]
    torch.testing.assert_close(norms[0], norms[1], rtol=1e-4, atol=1e-6)


def _accumulations_on_four() -> None:
    for shape in ((4,), (2, 2)):
        for setter in ("set_requires_gradient_sync", "set_requires_all_reduce"):
            _accumulate(shape, setter)
    _some_wait()


def test_accumulation_by_the_setters_gives_the_gradients_of_one_process() -> None:
    ranks.run(_accumulations_on_four, 4, init=True, timeout_s=120)


class Odd(nn.Module):
    """Frozen and unused parameters, a dict in and out, one block called twice, one output nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.unused = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.b.requires_grad_(False)

    def forward(self, given: dict[str, Any]) -> dict[str, Any]:
        x = self.c(self.b(self.a(given["x"])).relu())
        return {"y": [self.c(x)], "aside": self.a(x), "text": given["text"]}


def _odd() -> None:
    from fullshard.torch_fsdp import fully_shard

    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    model = Odd()
    plain = copy.deepcopy(model)
    for child in model.children():
        fully_shard(child)
    fully_shard(model)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.05) for m in (model, plain)]
    generator = torch.Generator().manual_seed(4)
    for step in range(4):
        x = torch.randn(2, 3, WIDTH, generator=generator)
        if step == 2:  # frozen and thawed while it lives
            for each in (model, plain):
                each.b.requires_grad_(True)
                each.a.weight.requires_grad_(False)
        out = model({"x": x[rank], "text": "kept"})
        assert out["text"] == "kept"
        out["y"][0].square().mean().backward()
        for part in x:
            (plain({"x": part, "text": ""})["y"][0].square().mean() / 2).backward()
        for name, parameter in model.named_parameters():
            assert (parameter.grad is None) == (plain.get_parameter(name).grad is None), (step, name)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    _close(model, plain, "odd")


def test_frozen_unused_and_repeated_modules_train_as_in_one_process() -> None:
    ranks.run(_odd, 2, init=True, timeout_s=120)


class Forked(nn.Module):
    """Ranks take different linears, and nobody takes the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.ways = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, way: int) -> Tensor:
        return self.ways[way](x)


def _unused() -> None:
    """Weight decay tells zeros from None. A copy has the same gradients as its original."""
    from fullshard.torch_fsdp import fully_shard

    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    plain, x = Forked(), torch.randn(2, 3, WIDTH)
    model = copy.deepcopy(plain)
    fully_shard(model)
    model.set_reduce_scatter_unused_params(True)
    model.set_gradient_divide_factor(3.0)
    twin = copy.deepcopy(model)
    for way, part in enumerate(x):
        (plain(part, way).square().sum() / 3).backward()
    for parameter in plain.ways[2].parameters():
        parameter.grad = torch.zeros_like(parameter)
    torch.optim.SGD(plain.parameters(), lr=0.1, weight_decay=0.5).step()
    for each in (model, twin):
        each(x[rank], rank).square().sum().backward()
        torch.optim.SGD(each.parameters(), lr=0.1, weight_decay=0.5).step()
        _close(each, plain, "zeros for what nobody used")


def test_what_nobody_used_has_a_gradient_of_zeros_where_the_setter_asks_for_it() -> None:
    ranks.run(_unused, 2, init=True, timeout_s=120)


def _replicated() -> None:
    """Odd widths: shards of ranks differ in shape, and torch's would send them about."""
    from torch.distributed._composable import replicate

    from fullshard.errors import ModelError
    from fullshard.torch_fsdp import FullyShardedDataParallel, fully_shard

    model = build(tie=False)
    plain = copy.deepcopy(model)
    for block in model.blocks[1:]:
        fully_shard(block)
    model.blocks[0] = FullyShardedDataParallel(model.blocks[0])
    replicate(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    _both(model, plain, optimizers)
    _close(model, plain, "replicated around shards")
    even = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    fully_shard(even[1])
    wrapped = nn.parallel.DistributedDataParallel(even, find_unused_parameters=True)
    with pytest.raises(ModelError, match="around sharded parameters"):
        wrapped(torch.ones(1, 4))


def test_torchs_replicate_leaves_shards_alone_and_ddp_around_them_is_an_error() -> None:
    ranks.run(_replicated, 2, init=True, timeout_s=120)


# --- precision -----------------------------------------------------------------------------------------


def _like_torchs(policies: dict[str, Any]) -> tuple[list[float], list[float]]:
    """The same calls, once from torch and once from us; torch's own policy objects for both."""
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.fsdp import fully_shard as torchs

    from fullshard.torch_fsdp import fully_shard as ours

    said = {name: MixedPrecisionPolicy(**fields) for name, fields in policies.items()}
    found = []
    for fully_shard in (torchs, ours):
        model = build(tie=False)
        for block in model.blocks:
            fully_shard(block.norm, mp_policy=said["norm"])
            fully_shard(block, mp_policy=said["block"])
        fully_shard(model, mp_policy=said["root"])
        optimizer = reference.adamw(model.parameters())
        losses = []
        for batch in batches(2, STEPS):
            out = model(batch[torch.distributed.get_rank()])
            loss = F.cross_entropy(out.float().flatten(0, 1), batch[torch.distributed.get_rank()].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert [p.dtype for p in model.parameters()] == [torch.float32] * len(list(model.parameters()))
        found.append((losses, out.dtype))
    assert found[0][1] == found[1][1]
    return found[0][0], found[1][0]


@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float32])
def test_policies_of_each_block_compute_as_torchs_do(compute: torch.dtype) -> None:
    policies = {
        "norm": {"output_dtype": compute},
        "block": {"param_dtype": compute, "reduce_dtype": torch.float32},
        "root": {"param_dtype": compute, "reduce_dtype": torch.float32, "output_dtype": torch.float32},
    }
    for torchs, ours in ranks.run(_like_torchs, 2, policies, init=True, timeout_s=120):
        assert ours == pytest.approx(torchs, rel=2e-2 if compute == torch.bfloat16 else 1e-5)


def _dtypes() -> dict[str, Any]:
    from fullshard.torch_fsdp import MixedPrecisionPolicy, fully_shard

    seen: dict[str, Any] = {}

    class Watched(nn.Linear):
        def __init__(self, name: str) -> None:
            super().__init__(WIDTH, WIDTH)
            self.name = name

        def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
            seen[self.name] = (x.dtype, self.weight.dtype, None if y is None else y.dtype)
            return super().forward(x)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = Watched("plain"), Watched("half"), Watched("uncast")

        def forward(self, x: Tensor) -> Tensor:
            return self.third(self.second(self.first(x)).half(), torch.ones(2))

    model = Model()
    fully_shard(model.second, mp_policy=MixedPrecisionPolicy(torch.float16, output_dtype=torch.float32))
    fully_shard(model.third, mp_policy=MixedPrecisionPolicy(torch.float16, cast_forward_inputs=False))
    fully_shard(model, mp_policy=MixedPrecisionPolicy(output_dtype=torch.bfloat16))
    out = model(torch.randn(2, WIDTH))
    out.float().sum().backward()
    low = Watched("low").to(torch.bfloat16)
    fully_shard(low, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    low(torch.randn(2, WIDTH)).sum().backward()
    return {
        **seen,
        "out": out.dtype,
        "gradients": {p.grad.dtype for p in model.parameters() if p.grad is not None},
        "low at rest": (low.bias.dtype, low.bias.grad.dtype if low.bias.grad is not None else None),
    }


def test_each_module_casts_its_own_inputs_and_outputs() -> None:
    half, full, low = torch.float16, torch.float32, torch.bfloat16
    assert ranks.run(_dtypes, 2, init=True, timeout_s=120)[0] == {
        "plain": (full, full, None),
        "half": (half, half, None),
        "uncast": (half, half, full),
        "low": (low, low, None),
        "out": low,
        "gradients": {full},
        "low at rest": (low, low),  # a bf16 model stays one, as with torch's
    }


def _norms_in_bf16() -> list[torch.dtype]:
    """Somebody lowers the statistics after fully_shard: the parameters beside them follow."""
    from fullshard.torch_fsdp import MixedPrecisionPolicy, fully_shard

    found = []
    for lowered in (False, True):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))
        for module in (*model, model):
            fully_shard(module, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
        seen: list[torch.dtype] = []
        model[1].register_forward_pre_hook(lambda m, _, seen=seen: seen.append(m.weight.dtype))
        if lowered:
            model[1].running_mean = model[1].running_mean.bfloat16()
            model[1].running_var = model[1].running_var.bfloat16()
        model(torch.randn(4, WIDTH)).sum().backward()
        found += seen
    return found


def test_batch_norm_computes_in_the_dtype_of_its_statistics() -> None:
    found = ranks.run(_norms_in_bf16, 2, init=True, timeout_s=120)
    assert found == [[torch.float32, torch.bfloat16]] * 2


def _compiled() -> None:
    losses = []
    for compiled in ("never", "before", "after"):
        model = build()
        if compiled == "before":
            for block in model.blocks:
                block.compile(backend="eager", fullgraph=True)
        by_blocks(model)
        if compiled == "after":
            for block in model.blocks:
                block.compile(backend="eager")  # before the model is sharded
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in batches(2, 3):
            loss = loss_of(model, batch[torch.distributed.get_rank()])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[:3] == losses[3:6] == losses[6:]
    from torch._dynamo.utils import counters

    assert counters["stats"]["unique_graphs"]


@pytest.mark.long
def test_block_compiled_before_or_after_fully_shard_gives_the_same_losses() -> None:
    ranks.run(_compiled, 2, init=True, timeout_s=180)
