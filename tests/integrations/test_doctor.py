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


def test_each_mistake_is_found_by_its_name_and_right_trainings_pass() -> None:
    by_rank: list[Any] = ranks.run(_examined, 2, list(EXPECTED), timeout_s=240)
    assert by_rank[0] == by_rank[1]
    wrong = {name: by_rank[0][name] for name, expected in EXPECTED.items() if by_rank[0][name][0] != expected}
    assert not wrong, "\n".join(f"--- {name}: {found}\n{text}" for name, (found, text) in wrong.items())
    for name, note in NOTES.items():
        assert note in by_rank[0][name][1], by_rank[0][name][1]
    assert "--accept frozen-parameter-changed" in by_rank[0]["frozen_changes"][1]
