"""Old checkpoints load: `support/old_checkpoint` was written on two ranks before the package was reorganized.

`expected.json` holds the values of that run, as the program that saved it had them in memory.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import shutil
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ranks
import reference
from painting import whole_state

OLD = Path(__file__).resolve().parents[1] / "support" / "old_checkpoint"


class Net(nn.Module):
    """The model of the old run."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 5, bias=False)
        self.tied = nn.Linear(7, 5, bias=False)
        self.tied.weight = self.last.weight


def _load(folder: Path) -> dict[str, Any]:
    import fullshard as fs

    model = fs.shard(Net())
    named = list(model.named_parameters())
    groups = [[p for n, p in named if n.endswith("weight") == weights] for weights in (True, False)]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups], lr=0.5)
    loaded = fs.load(folder, model, optimizer)
    options = [(group["lr"], group["weight_decay"], group["betas"]) for group in optimizer.param_groups]
    drawn = [random.random(), float(np.random.rand()), torch.rand(1).item()]
    values = whole_state(model, optimizer)
    return {"values": values, "extra": dict(loaded), "notes": loaded.notes, "drawn": drawn, "groups": options}


@pytest.mark.filterwarnings("ignore:.*differed between the 2 ranks")
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("files", ["shared", "parts"])
def test_old_checkpoints_load(files: str, count: int) -> None:
    expected = json.loads((OLD / "expected.json").read_text())
    for rank, found in enumerate(ranks.run(_load, count, OLD / files)):
        values = {
            name: torch.tensor(v, dtype=getattr(torch, d)) for name, (d, v) in expected["values"].items()
        }
        extra = {"step": 3, "scheduler": {"last_lr": [0.01], "best": math.inf, "window": (1, 2)}}
        if count == 2:
            extra["seed"] = 40 + rank
            values["norm.running_mean"] = torch.tensor(expected["running_mean_by_rank"][rank])
            assert found["drawn"] == expected["drawn_by_rank"][rank]
            assert found["notes"] == ()
            if rank == 1:  # `values` holds the first rank's
                del values["norm.running_var"], found["values"]["norm.running_var"]
        assert found["values"].keys() == values.keys()
        for name, value in values.items():
            assert reference.bitwise(found["values"][name], value), name
        assert torch.equal(found["extra"].pop("order"), torch.arange(6))
        assert found["extra"] == extra
        assert found["groups"] == [(0.01, 0.1, (0.9, 0.999)), (0.01, 0.0, (0.9, 0.999))]


def test_a_changed_number_in_an_old_checkpoint_is_noticed(tmp_path: Path) -> None:
    """The comparison above is one of values: a number that changed with its checksums is another number."""
    folder = Path(shutil.copytree(OLD / "shared", tmp_path / "changed"))
    path, name = folder / "model.safetensors", "fullshard.json"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    body = json.loads((folder / name).read_bytes())
    del body["sha256"]
    body["files"][path.name]["crc32"] = f"{zlib.crc32(data):08x}"
    rest = b'",' + json.dumps(body, separators=(",", ":")).encode()[1:]
    (folder / name).write_bytes(b'{"sha256":"' + hashlib.sha256(rest).hexdigest().encode() + rest)
    expected = json.loads((OLD / "expected.json").read_text())["values"]
    (found,) = ranks.run(_load, 1, folder)
    wrong = [n for n, (_, v) in expected.items() if found["values"][n].tolist() != v]
    assert len(wrong) == 1
