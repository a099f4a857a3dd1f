"""No false alarm: model families that people train, and the options of fs.shard, pass the doctor.

Two families are not what one process computes on the global batch, and are named for it: BatchNorm has the
statistics of each rank's part, and a masked language model averages over as many tokens as a rank has masked.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch

import ranks
import zoo
from faulty_trainings import Model, batch, loop, sharded
from zoo import FAMILIES

DIFFERENT = {"resnet_batchnorm": ["batchnorm-statistics-differ"], "bert": ["mean-over-uneven-counts"]}
OPTIONS: dict[str, dict[str, Any]] = {
    "zero1": {"strategy": "zero1"},
    "zero2 in bf16": {"strategy": "zero2", "precision": "bf16"},
    "replicate, recomputed": {"strategy": "replicate", "checkpoint_activations": True},
    "hybrid": {"strategy": "hybrid"},
    "one unit": {"merge_units": None},
    "on the host": {"offload": "host", "precision": "bf16"},
    "activations on the host": {"checkpoint_activations": "offload"},
    "scattered sums": {"reduce": "scatter"},
    "everything kept": {"keep_full": "all"},
}


def _train(name: str) -> None:
    import fullshard as fs

    family, rank = FAMILIES[name], int(os.environ["RANK"])
    model = fs.shard(zoo.build(family), merge_units=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        family.loss(model, family.batch(2 * step + rank)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()


def _train_with(options: dict[str, Any]) -> None:
    mesh = {}
    if options.get("strategy") == "hybrid":
        from torch.distributed.device_mesh import init_device_mesh

        mesh["mesh"] = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    loop(sharded(Model(), **options, **mesh))


def _train_eight_bit() -> None:
    import fullshard as fs

    model = sharded(Model(), precision=fs.Precision(wire=torch.int8, gather=torch.int8))
    loop(model)


def _train_from_meta() -> None:
    with torch.device("meta"):
        model = Model()
    loop(sharded(model, device="cpu"))


def _train_unevenly() -> None:
    import fullshard as fs

    model = sharded(Model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own = [batch(step) for step in range(1 + int(os.environ["RANK"]))]
    for x, y in fs.even_batches(own, model):
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def _examined() -> dict[str, tuple[list[str], str]]:
    from fullshard.doctor.check import check

    reports = {name: check(partial(_train, name), steps=2) for name in FAMILIES}
    reports |= {name: check(partial(_train_with, options), steps=2) for name, options in OPTIONS.items()}
    own = (_train_eight_bit, _train_from_meta, _train_unevenly)
    reports |= {train.__name__: check(train, steps=2) for train in own}
    ranks.end_groups_of_models()
    return {
        n: ([finding.name for finding in report.findings], report.text()) for n, report in reports.items()
    }


def test_families_and_options_pass_unless_they_differ_from_one_process() -> None:
    found = ranks.run(_examined, 2, timeout_s=120)[0]
    wrong = {name: text for name, (names, text) in found.items() if names != DIFFERENT.get(name, [])}
    assert not wrong, "\n".join(f"--- {name}\n{text}" for name, text in wrong.items())
    missing = [name for name, (_, text) in found.items() if "not compared" in text]
    assert not missing, missing
