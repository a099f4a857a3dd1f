"""The doctor finds and names mistakes in trainings, and nothing in those that are right."""

from __future__ import annotations

import json
from typing import Any

import ranks
from faulty_trainings import EXPECTED

# What a report says of trainings in which something cannot be compared.
NOTES = {
    "right_gradient_penalty": "not compared: gradients of steps that take gradients of gradients",
    "right_closure_twice": "it calls its closure 2 times",
    "diverging": "note: the loss is not finite: ",
}


def _examined(names: list[str]) -> dict[str, tuple[list[str], str]]:
    import faulty_trainings
    from fullshard.doctor.check import check

    found = {}
    for name in names:
        report = check(getattr(faulty_trainings, name), steps=3)
        found[name] = ([finding.name for finding in report.findings], report.text())
        json.dumps(report.data(), allow_nan=False)  # valid, also where a loss is no number
        ranks.end_groups_of_models()
    return found


def _of_lightning() -> dict[str, list[str]]:
    """By mistake: of a fit on this rank's part of each batch, or on the same batches on all ranks."""
    import torch

    from fullshard.doctor.check import check
    from lightning_cases import Lit, batches, loader, place, quietly, sharded, trainer

    class Mistaken(Lit):
        mistake = ""

        def loss(self, batch: Any) -> Any:
            squares = (self(batch[0]) * self.scale.mean() - batch[1]) ** 2
            return squares.sum() if self.mistake == "loss-is-a-sum" else squares.mean()

        def configure_optimizers(self) -> Any:
            held = [
                p for n, p in self.named_parameters() if n != "scale" or self.mistake != "in no optimizer"
            ]
            return torch.optim.SGD(held, lr=0.01)

    rank, count = place()
    found = {}
    for mistake in ("", "same data", "loss-is-a-sum", "in no optimizer"):
        module = Mistaken()
        module.mistake = mistake
        data = loader(batches(0 if mistake == "same data" else rank, count, 4))

        def fit(module: Any = module, data: Any = data) -> None:
            with quietly():
                trainer(sharded()).fit(module, data)

        found[mistake] = [finding.name for finding in check(fit, steps=3).findings]
        ranks.end_groups_of_models()
    return found


def test_what_a_step_of_lightning_reads_and_does_is_examined() -> None:
    """The step runs in place of the forward, which gets no arguments."""
    first, second = ranks.run(_of_lightning, 2, timeout_s=200)
    assert first == second
    assert first == {
        "": [],
        "same data": ["same-data-on-ranks"],
        "loss-is-a-sum": ["loss-is-a-sum"],
        "in no optimizer": ["parameter-in-no-optimizer"],
    }


def test_each_mistake_is_found_by_its_name_and_right_trainings_pass() -> None:
    by_rank: list[Any] = ranks.run(_examined, 2, list(EXPECTED), timeout_s=240)
    assert by_rank[0] == by_rank[1]
    wrong = {name: by_rank[0][name] for name, expected in EXPECTED.items() if by_rank[0][name][0] != expected}
    assert not wrong, "\n".join(f"--- {name}: {found}\n{text}" for name, (found, text) in wrong.items())
    for name, note in NOTES.items():
        assert note in by_rank[0][name][1], by_rank[0][name][1]
    assert "--accept frozen-parameter-changed" in by_rank[0]["frozen_changes"][1]
