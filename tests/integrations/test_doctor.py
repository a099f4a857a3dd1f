"""The doctor finds and names mistakes in trainings, and nothing in those that are right."""

from __future__ import annotations

from typing import Any

import ranks
from faulty_trainings import EXPECTED


def _examined(names: list[str]) -> dict[str, tuple[list[str], str]]:
    import faulty_trainings
    from fullshard.doctor.check import check

    found = {}
    for name in names:
        report = check(getattr(faulty_trainings, name), steps=3)
        found[name] = ([finding.name for finding in report.findings], report.text())
        ranks.end_groups_of_models()
    return found


def test_each_mistake_is_found_by_its_name_and_right_trainings_pass() -> None:
    by_rank: list[Any] = ranks.run(_examined, 2, list(EXPECTED), timeout_s=120)
    assert by_rank[0] == by_rank[1]
    wrong = {name: by_rank[0][name] for name, expected in EXPECTED.items() if by_rank[0][name][0] != expected}
    assert not wrong, "\n".join(f"--- {name}: {found}\n{text}" for name, (found, text) in wrong.items())
