"""On a real GPU: parity with the unsharded model, streams that do not race, memory that goes back.

Skipped where there is no GPU. Several ranks share the one card over gloo, which stages through the host.
"""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
STEPS = 4
# A unit per block, and one of 3 MiB kept full: by default a model this small is one unit that stays full.
BLOCKS: dict[str, Any] = {"merge_units": 0, "keep_full": 4 * 2**20}
STRATEGIES = ("replicate", "zero1", "zero2", "zero3")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attend = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        x = x + self.attend(h, h, h, need_weights=False)[0]
        return x + self.mlp(h)


class Net(nn.Module):
    def __init__(self, width: int = 256, depth: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(512, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 512)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _net(**kwargs: int) -> Net:
    torch.manual_seed(0)
    return Net(**kwargs).cuda()


def _tokens(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, 512, (4, 65), generator=generator).cuda()


def _loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def _deterministic() -> None:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def _train(model: nn.Module, rank: int, fused: bool = True) -> tuple[list[float], list[float]]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    losses, norms = [], []
    for step in range(STEPS):
        loss = _loss(model, _tokens(step, rank))
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, norms


def _reference(num_ranks: int) -> tuple[list[float], list[float], list[torch.Tensor]]:
    model = _net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, norms = [], []
    for step in range(STEPS):
        total = 0.0
        for rank in range(num_ranks):
            loss = _loss(model, _tokens(step, rank)) / num_ranks
            loss.backward()
            total += float(loss.detach())
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, norms, [p.detach().cpu() for p in model.parameters()]


def _whole(model: nn.Module) -> list[torch.Tensor]:
    import fullshard as fs

    with fs.full(model, writeback=False):
        return [p.detach().cpu().clone() for p in model.parameters()]


def _shared_card(configurations: list[dict[str, object]]) -> list[tuple[object, object, object]]:
    import torch.distributed as dist

    import fullshard as fs

    _deterministic()
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    rank, results = dist.get_rank(), []
    for configuration in configurations:
        model = fs.shard(_net(), **(BLOCKS | configuration))
        results.append((*_train(model, rank), _whole(model)))
    return results


def test_every_strategy_on_one_gpu_is_bitwise_the_same_and_equals_the_plain_model() -> None:
    configurations = [{"strategy": s, "prefetch": p} for s in STRATEGIES for p in (True, False)]
    configurations.append({"strategy": "zero3", "checkpoint_activations": True})
    found = ranks.run(_alone, 1, configurations, timeout_s=200)[0]
    first = found[0]
    for configuration, result in zip(configurations, found, strict=True):
        assert result[:2] == first[:2], configuration
        assert all(torch.equal(a, b) for a, b in zip(result[2], first[2], strict=True)), configuration
    losses, norms, parameters = ranks.run(_reference_on_rank, 1, 1, timeout_s=200)[0]
    _assert_close(first, (losses, norms, parameters))


def _alone(configurations: list[dict[str, object]]) -> list[tuple[object, object, object]]:
    import fullshard as fs

    _deterministic()
    results = []
    for configuration in configurations:
        model = fs.shard(_net(), **(BLOCKS | configuration))
        results.append((*_train(model, 0), _whole(model)))
    return results


def _reference_on_rank(num_ranks: int) -> tuple[object, object, object]:
    _deterministic()
    return _reference(num_ranks)


def _assert_close(found: tuple, expected: tuple) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-4)
    assert found[1] == pytest.approx(expected[1], rel=1e-3)
    for a, b in zip(found[2], expected[2], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_that_share_the_card_train_as_one_process_does(num_ranks: int) -> None:
    configurations = [
        {"strategy": "zero3"},
        {"strategy": "zero3", "prefetch": False},
        {"strategy": "zero2"},
        {"strategy": "replicate"},
    ]
    found = ranks.run(_shared_card, num_ranks, configurations, timeout_s=250)
    expected = ranks.run(_reference_on_rank, 1, num_ranks, timeout_s=200)[0]
    for i in range(len(configurations)):
        losses = [sum(values) / num_ranks for values in zip(*(r[i][0] for r in found), strict=True)]
        _assert_close((losses, found[0][i][1], found[0][i][2]), expected)
        same = zip(found[0][i][2], found[0][0][2], strict=True)
        assert all(torch.equal(a, b) for a, b in same), configurations[i]


def _half_precision() -> dict[str, object]:
    import fullshard as fs

    found: dict[str, object] = {}
    reference = _net().bfloat16()
    plain = [float(_loss(reference, _tokens(s, 0)).detach()) for s in range(2)]
    model = fs.shard(_net(), precision="bf16")
    with torch.no_grad():
        found["bf16"] = (plain, [float(_loss(model, _tokens(s, 0))) for s in range(2)])
    _train(model, 0)
    found["rest"] = {str(p.dtype) for p in model.parameters()}
    scaled = fs.shard(_net(), precision="fp16")
    optimizer = torch.optim.AdamW(scaled.parameters(), lr=1e-3, fused=True)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**30)
    losses = []
    for step in range(25):
        loss = _loss(scaled, _tokens(step % 2, 0))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(scaled.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    found["fp16"] = (losses[0], losses[-1], scaler.get_scale())
    return found


def test_bf16_and_fp16_with_a_scaler_train_on_fp32_masters() -> None:
    found = ranks.run(_half_precision, 1, timeout_s=200)[0]
    plain, sharded = found["bf16"]
    assert sharded == pytest.approx(plain, rel=1e-2)
    assert found["rest"] == {"torch.float32"}
    first, last, scale = found["fp16"]
    assert scale < 2.0**30, "the first scale overflows fp16, so it must have been lowered"
    assert last < first - 0.5


def _no_sync_and_memory() -> dict[str, object]:
    import fullshard as fs

    model = fs.shard(_net(width=512, depth=8), precision="bf16", **BLOCKS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    batches = [_tokens(step, 0) for step in range(8)]

    def step(tokens: torch.Tensor) -> None:
        _loss(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    for tokens in batches[:3]:
        step(tokens)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    at_rest = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    for tokens in batches[3:]:
        step(tokens)
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    return {
        "grown": torch.cuda.memory_allocated() - at_rest,
        "retries": stats["num_alloc_retries"],
        "full": sum(lane.full.untyped_storage().nbytes() for lane in model._fullshard.lanes),
    }


def test_step_never_waits_for_the_device_and_gives_its_memory_back() -> None:
    found = ranks.run(_no_sync_and_memory, 1, timeout_s=200)[0]
    assert found["grown"] <= 2**20
    assert found["retries"] == 0
    assert found["full"] == 0


def _compiled() -> list[float]:
    import fullshard as fs

    losses = []
    for compiled in (False, True):
        model = fs.shard(_net(), strategy="zero3", **BLOCKS)
        if compiled:
            for block in model.blocks:
                block.compile()
        losses.append(_train(model, 0)[0])
    return losses


def test_compiled_blocks_train_as_eager_ones_do() -> None:
    eager, compiled = ranks.run(_compiled, 1, timeout_s=280)[0]
    assert compiled == pytest.approx(eager, rel=2e-3)


def _from_the_host() -> dict[str, object]:
    import torch.distributed as dist

    import fullshard as fs

    _deterministic()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Net()
    model.register_buffer("steps", torch.arange(4))
    model.blocks[0].register_buffer("same", model.steps)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    whole_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    fs.shard(model, device="cuda", merge_units=0)
    return {
        "peak": torch.cuda.max_memory_allocated() / whole_bytes,
        "devices": {t.device for t in (*model.parameters(), *model.buffers())},
        "still one": model.steps is model.blocks[0].same,
        "optimizer": [id(p) for p in optimizer.param_groups[0]["params"]]
        == [id(p) for p in model.parameters()],
        "trained": (*_train(model, dist.get_rank()), _whole(model)),
    }


def test_model_on_the_host_goes_to_the_card_unit_by_unit() -> None:
    found = ranks.run(_from_the_host, 4, fresh=True, timeout_s=120)
    losses = [sum(values) / 4 for values in zip(*(f["trained"][0] for f in found), strict=True)]
    _assert_close((losses, *found[0]["trained"][1:]), ranks.run(_reference_on_rank, 1, 4, timeout_s=200)[0])
    for each in found:
        assert each["peak"] < 0.7, "a quarter at rest, and one unit at a time"
        assert each["devices"] == {torch.device("cuda", 0)}
        assert each["still one"]
        assert each["optimizer"]


def _meta() -> tuple[set[str], float]:
    import fullshard as fs

    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    fs.shard(model)
    out = model(torch.ones(2, 64, device="cuda"))
    twin = copy.deepcopy(model)
    assert torch.equal(twin(torch.ones(2, 64, device="cuda")), out)
    return {str(p.device) for p in model.parameters()}, float(out.detach().abs().sum())


def test_meta_model_is_materialised_on_the_gpu_and_can_be_copied() -> None:
    devices, total = ranks.run(_meta, 1, timeout_s=100)[0]
    assert devices == {"cuda:0"}
    assert total > 0
