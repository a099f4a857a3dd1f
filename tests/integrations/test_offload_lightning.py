"""Lightning's strategies with offload: values rest in host memory, and the numbers are plain Lightning's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_lightning_fabric import _trained
from torch.distributed.fsdp import CPUOffload

import fullshard as fs
import lightning_cases as cases
import ranks
from engines import BLOCKS
from fullshard.errors import OptionError
from fullshard.lightning import FullShardFabricStrategy, FullShardStrategy
from lightning_cases import Gan, Lit, Seen, assert_same_run, fitted, sharded


class Resting(Lit):
    """Keeps where its values rested while it trained."""

    def on_train_end(self) -> None:
        runtime = self.__dict__.get("_fullshard")
        self.seen.other["homes"] = runtime and {lane.homes.state.kind for lane in runtime.lanes}


class RestingGan(Gan):
    on_train_end = Resting.on_train_end


CLIP = {"gradient_clip_val": 0.5}
CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "cpu_offload": (Resting, {"cpu_offload": True}, CLIP | {"val": True}),
    "torch's CPUOffload": (Resting, {"cpu_offload": CPUOffload(offload_params=True)}, {}),
    "offload": (
        Resting, {"offload": "host", "strategy": "zero2"}, {"accumulate_grad_batches": 2, "micro": 2}
    ),
    "optimizer": (Resting, {"offload": "optimizer"}, CLIP),
    "chunks": (Resting, {"offload": fs.Offload(chunk=7)}, CLIP),
    "by hand": (RestingGan, {"cpu_offload": True}, {}),
}  # fmt: skip


def _fits(folder: Path) -> dict[str, Seen]:
    found = {}
    for name, (make, options, run) in CASES.items():
        found[name] = fitted(make, sharded(**(BLOCKS | options)), **run)
        plain = {k: v for k, v in options.items() if k not in ("offload", "cpu_offload")}
        without = fitted(make, sharded(**(BLOCKS | plain)), **run)
        assert (found[name].losses, found[name].norms) == (without.losses, without.norms), name
        for key, value in without.weights.items():
            assert torch.equal(found[name].weights[key], value), (name, key)
    for strategy in ("fullshard_cpu_offload", sharded(cpu_offload=False)):
        expected = {"host"} if strategy == "fullshard_cpu_offload" else {"device"}
        assert fitted(Resting, strategy).other["homes"] == expected
    _resumed(folder)
    _fabric(folder)
    return found


def _resumed(folder: Path) -> None:
    """A checkpoint of an offloaded fit continues a plain one, and the other way round, with the same bits."""
    mine = cases.loader(cases.batches(*cases.place(), 6))
    results = []
    for first, second in ((False, True), (True, False)):
        path = folder / f"{first}.ckpt"
        with cases.quietly():
            begun = cases.trainer(sharded(cpu_offload=first), max_steps=3)
            begun.fit(Lit(), mine)
            begun.save_checkpoint(path)
            module = Lit()
            cases.trainer(sharded(cpu_offload=second), max_steps=6).fit(module, mine, ckpt_path=path)
        results.append((module.seen.losses, module.seen.norms))
    assert results[0] == results[1]


def _fabric(folder: Path) -> None:
    for options in ({"cpu_offload": True}, {"offload": fs.Offload(host="1MiB", disk=folder)}):
        ours, theirs = (
            _trained(
                FullShardFabricStrategy(**given), {"precision": "bf16-mixed"}, {"clip": {"max_norm": 0.5}}
            )
            for given in (options, {})
        )
        assert (ours.losses, ours.norms) == (theirs.losses, theirs.norms)
        assert all(torch.equal(ours.weights[name], value) for name, value in theirs.weights.items())


def test_offloaded_fits_have_the_bits_of_fits_without_and_the_numbers_of_plain_lightning(
    tmp_path: Path,
) -> None:
    by_rank = ranks.run(_fits, 2, tmp_path, timeout_s=240)
    for name, (make, _, run) in CASES.items():
        found = [seen[name] for seen in by_rank]
        assert {frozenset(seen.other["homes"]) for seen in found} == {frozenset({"host"})}, name
        assert_same_run(found, fitted(make, **run))


def _second_trainer() -> None:
    module, data = Lit(), cases.loader(cases.batches(0, 1))
    with cases.quietly():
        cases.trainer(sharded(cpu_offload=True)).fit(module, data)
        cases.trainer(sharded(offload="host")).fit(module, data)
        with pytest.raises(fs.FullshardError, match=r"is sharded already with offload=Offload"):
            cases.trainer(sharded()).fit(module, data)


def test_a_second_trainer_with_another_offload_is_refused() -> None:
    ranks.run(_second_trainer, 1, timeout_s=120)


@pytest.mark.parametrize("kind", [FullShardStrategy, FullShardFabricStrategy])
def test_wrong_values_are_refused(kind: Any) -> None:
    for options in ({"cpu_offload": "cpu"}, {"cpu_offload": True, "offload": "optimizer"}):
        with pytest.raises(OptionError, match="cpu_offload"):
            kind(**options)
