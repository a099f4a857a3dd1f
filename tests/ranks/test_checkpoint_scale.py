"""Checkpoints of many ranks: a small manifest, and no more of it is parsed than is needed."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import ranks
from fullshard.checkpoint import commit, random_state
from fullshard.checkpoint.format import manifest
from fullshard.checkpoint.format.manifest import Count, FileRecord, Manifest, rank_file
from fullshard.checkpoint.format.values import Encoder, decode
from fullshard.checkpoint.saving import extra_values


def _manifest(count: int, **changes: Any) -> Manifest:
    """As `count` ranks save it, each with random states of its own."""
    encoder = Encoder(extra_values.inline_bytes(count))
    state = encoder.encode(random_state.capture(torch.device("cpu")), "random")
    own = {"extra": {}, "values": {}, "modules": {}, "optimizer": {}, "random": state}
    stored = sum(tensor.nbytes for tensor in encoder.tensors.values())
    files = {rank_file(rank): FileRecord(stored, (0,)) for rank in range(count if stored else 0)}
    fields: dict[str, Any] = {"id": "0" * 16, "saved_at_ns": 7, "layout": {"ranks": count, "run": "a"}}
    fields |= {"software": {}, "block_bytes": 2**20, "files": files, "ranks": (own,) * count}
    return Manifest(**fields | {"model": Count(), "optimizer": Count()} | changes)


@pytest.mark.parametrize(("count", "most"), [(1, 20_000), (64, 10**6), (104, 2 * 10**6), (1024, 10**6)])
def test_the_manifest_of_many_ranks_is_small(count: int, most: int) -> None:
    data = manifest.to_bytes(_manifest(count))
    assert len(data) < most
    assert len(manifest.from_bytes(data).ranks) == count


def test_states_of_random_numbers_are_the_same_inline_and_in_files() -> None:
    random.gauss(0, 1)
    expected = random_state.capture(torch.device("cpu"))
    for count in (1, 1024):
        encoder = Encoder(extra_values.inline_bytes(count))
        tree = json.loads(json.dumps(encoder.encode(expected, "random")))
        assert bool(encoder.tensors) == (count > 1)
        random_state.restore(decode(tree, lambda name, e=encoder: e.tensors[name]), torch.device("cpu"))
        now = random_state.capture(torch.device("cpu"))
        assert now["torch"].equal(expected["torch"])
        assert now["python"][0::2] == expected["python"][0::2]
        assert np.array_equal(now["python"][1], expected["python"][1])
        assert np.array_equal(now["numpy"][1], expected["numpy"][1])
    old = expected | {"python": random.getstate()}  # as checkpoints had it before
    random_state.check(old, torch.device("cpu"))
    random_state.restore(old, torch.device("cpu"))
    assert random.getstate() == old["python"]


def test_a_summary_needs_no_parse_of_the_rest_and_notices_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    tricky = {"ranks": 3, "run": 'x","block_bytes":5', "block_bytes": 9}
    for saved in (_manifest(2), _manifest(2, layout=tricky), _manifest(2, id='",\\"block_bytes\\":1')):
        data = manifest.to_bytes(saved)
        summary = manifest.summary_from_bytes(data)
        assert (summary.id, summary.saved_at_ns) == (saved.id, saved.saved_at_ns)
        assert summary.layout == saved.layout
        for at in (3, 200, len(data) - 5):
            with pytest.raises(manifest.DamagedCheckpoint):
                manifest.summary_from_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(manifest.DamagedCheckpoint):
            manifest.summary_from_bytes(data[:-10])
    parsed: list[int] = []
    parse = manifest.parse_json
    monkeypatch.setattr(manifest, "parse_json", lambda name, d: parsed.append(len(d)) or parse(name, d))
    manifest.summary_from_bytes(manifest.to_bytes(_manifest(1024)))
    assert max(parsed) < 1000


def _save_as_one_of_many(folder: str) -> list[Any]:
    """Two ranks that keep their values in files, as 1024 would."""
    import fullshard as fs

    rank, found = dist.get_rank(), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extra_values, "inline_bytes", lambda ranks: 2**18 // 1024)
        model = fs.shard(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)))
        optimizer = torch.optim.AdamW(model.parameters())
        for step in (1, 2, 3):
            torch.manual_seed(10 * step + rank)
            random.seed(10 * step + rank)
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            extra = {"mine": np.arange(500) + rank, "ours": torch.arange(100), "step": step}
            fs.save(f"{folder}/{step}", model, optimizer, extra=extra, keep_last=2)
        expected = (torch.rand(1).item(), random.random())
    found.append(Path(fs.latest(folder)).name)  # type: ignore[arg-type]
    loaded = fs.load(f"{folder}/3", model, optimizer)
    found.append((torch.rand(1).item(), random.random()) == expected)
    found.append((loaded["mine"] - rank).tolist() == list(range(500)))
    found.append((loaded["ours"].tolist(), loaded["step"]) == (list(range(100)), 3))
    return found


def test_values_of_many_ranks_are_saved_in_files_and_come_back(tmp_path: Path) -> None:
    for found in ranks.run(_save_as_one_of_many, 2, str(tmp_path), init=True, timeout_s=60):
        assert found == ["3", True, True, True]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "3"]
    saved = commit.read_manifest(tmp_path / "3")
    assert {"rank-00000.safetensors", "rank-00001.safetensors", "extra.safetensors"} <= set(saved.files)
    assert all(len(json.dumps(own)) < 1500 for own in saved.ranks)
