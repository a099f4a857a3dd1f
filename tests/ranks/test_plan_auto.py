"""fs.shard(model, plan="auto"): one choice on all ranks, the numbers of one process, a record to repeat."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fullshard as fs
import ranks
from fullshard.errors import OptionError
from fullshard.planning.automatic import Situation, choose_for, on_meta
from fullshard.planning.machines import as_values, described
from fullshard.planning.request import request_of
from fullshard.planning.settings import Choice, Settings


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(self.up(x).relu())
        return out


def build(width: int = 32, depth: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[Block(width) for _ in range(depth)])


def train(model: nn.Module, batch: torch.Tensor, steps: int = 3) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def remember(folder: Path) -> None:
    """Rates of a card, so that nothing is measured and the choice depends on no machine."""
    from fullshard.link_speeds import remember_rates, speeds_file

    assert folder in speeds_file().parents
    remember_rates(as_values(described("h100")))


def choices(folder: str) -> dict[str, Any]:
    os.environ["XDG_CACHE_HOME"] = folder
    batch = torch.ones(4, 32)
    found: dict[str, Any] = {}
    model = fs.shard(build(), plan="auto")
    found["untraced"] = fs.plan(model).choice.to_dict()
    found["losses"] = train(model, batch)
    model = fs.shard(build(), plan=fs.Planning(batch=batch, optimizer="sgd"), precision="fp32")
    found["traced"] = fs.plan(model).choice.to_dict()
    found["losses of the traced"] = train(model, batch)
    file = Path(folder) / f"{torch.distributed.get_rank()}.json"
    fs.plan(model).choice.save(file)
    for name, plan in (
        ("file", str(file)),
        ("dict", json.loads(file.read_text())),
        ("record", Choice.load(file)),
        ("plan", fs.plan(model)),
    ):
        again = fs.shard(build(), plan=plan)
        found[name] = fs.plan(again).choice.to_dict()
        found[f"losses of {name}"] = train(again, batch)
    by_word = fs.shard(build(), strategy="auto")
    found["strategy"] = fs.plan(by_word).choice.to_dict()
    kept = fs.shard(build(), plan="auto", strategy="zero2", checkpoint_activations=True)
    found["kept"] = fs.plan(kept).choice.settings.strategy, fs.plan(kept).strategy
    by_default = [
        fs.plan(build(), ranks=2, plan="auto", **given).strategy for given in ({}, {"strategy": "zero3"})
    ]
    named = fs.shard(build(), plan="auto", strategy="zero3", keep_full=None)
    found["default"] = *by_default, fs.plan(named).strategy, fs.plan(named).choice.settings.strategy
    for name, plan, remedy in (
        (
            "small",
            fs.Planning(batch=torch.ones(4, 128), memory="1MiB"),
            "nothing fits for Sequential on 2 ranks",
        ),
        ("no file", "no/such/plan.json", "cannot be read"),
        ("number", 3, "plan is 3"),
        ("unknown", {"batches": batch}, "plan has 'batches'"),
        ("settings", {"settings": {"strategy": "zero4"}}, "zero4"),
        ("wrong batch", fs.Planning(batch=torch.ones(4, 5)), "fails with its batch"),
    ):
        with pytest.raises(OptionError, match=remedy):
            fs.shard(build(128 if name == "small" else 32), plan=plan)
        found[name] = True
    return found


def test_ranks_choose_alike_and_train_as_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    remember(tmp_path)
    first, second = ranks.run(choices, 2, str(tmp_path))
    assert first == second
    reference = train(build(), torch.ones(4, 32))
    for name in ("losses", *(key for key in first if key.startswith("losses of"))):
        torch.testing.assert_close(torch.tensor(first[name]), torch.tensor(reference))
    for name in ("file", "dict", "record", "plan"):
        assert first[name] == first["traced"]
    assert first["kept"] == ("zero2", "zero2")
    assert first["default"][0] != "zero3"  # otherwise the next line shows nothing
    assert first["default"][1:] == ("zero3", "zero3", "zero3")
    assert "activations are not known" in first["untraced"]["why"]
    assert "activations are not known" not in first["traced"]["why"]


def test_settings_follow_memory_and_links() -> None:
    model = on_meta(build(1024, 8))
    batch = torch.zeros(4096, 1024)
    h100 = described("h100")

    def settings(memory: int, count: int = 8, inner: int = 8, host: int = 2**40, **more: Any) -> Settings:
        here = Situation(count, inner, memory, host, True)
        given = {"precision": "bf16"} | more
        return choose_for(model, request_of({"batch": batch}), given, here, h100).settings

    plenty = settings(2**36)
    assert (plenty.checkpoint_activations, plenty.offload) == (False, None)
    peaks = {}
    for again in (False, True):
        one = choose_for(
            model,
            request_of({"batch": batch}),
            {"precision": "bf16", "strategy": "zero2", "checkpoint_activations": again},
            Situation(8, 8, 2**36, 0, True),
            h100,
        )
        peaks[again] = one.peak_bytes
    tight = settings(int(peaks[True] / 0.91))
    assert tight.checkpoint_activations in (True, "offload")
    assert settings(2**36, strategy="hybrid", count=64).strategy == "hybrid"
    assert settings(2**36, 64, 8).micro_batch is None
    with pytest.raises(OptionError, match="nothing fits for Sequential on 8 ranks"):
        settings(2**26)
    request = request_of({"batch": batch, "disk": "scratch/run"})
    assert request.free_on_disk() > 0  # of the nearest folder that exists
    larger = on_meta(build(1024, 16))
    small = Situation(1, 1, 2**31, 2**30, True, 2**40)  # half of the host is for buffers of the disk
    found = choose_for(larger, request, {"precision": "bf16"}, small, h100).settings.offload_option()
    assert isinstance(found, fs.Offload)
    assert found.disk == "scratch/run"
    with pytest.raises(OptionError, match=r"Planning\.disk is 3"):
        request_of({"disk": 3})


def test_the_plan_of_settings_that_are_chosen_is_printed_and_repeated() -> None:
    model = build()
    plan = fs.plan(model, ranks=16, node_ranks=8, plan=fs.Planning(machine="h100", batch=torch.ones(4, 32)))
    assert plan.choice.ranks == 16
    assert plan.choice.line in str(plan)
    assert "rejected" in str(plan.choice)
    same = fs.plan(model, ranks=16, node_ranks=8, plan=plan)
    assert same == plan
    with pytest.raises(OptionError, match="unknown card"):
        fs.plan(model, plan=fs.Planning(machine="h101"))
    with pytest.raises(OptionError, match="Write batch=EXAMPLE"):
        fs.Planning(inputs=3)  # type: ignore[call-arg]


def test_a_copy_on_meta_takes_no_memory_and_keeps_ties() -> None:
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8, bias=False))
    model[1].weight = model[0].weight
    model.register_buffer("table", torch.zeros(3))
    copied = on_meta(model)
    assert copied[1].weight is copied[0].weight
    assert all(t.is_meta for t in (*copied.parameters(), *copied.buffers()))
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))
