"""The report of a step has a fixed size, and shows every rank whose optimizer stepped differently."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fullshard.comm.step_report import StepReport, first_difference
from fullshard.errors import RankMismatch


class _Recorder:
    spans_hosts = False

    def channels(self) -> list[str]:
        return ["gather", "reduce"]

    def trail(self, channels: list[str]) -> int:
        return len(channels)


class _Ranks:
    """Reports of many ranks in one process, reduced by hand."""

    def __init__(self, count: int) -> None:
        self.messages: list[torch.Tensor] = []
        self.reports = [StepReport(self._comm(rank, list(range(count)))) for rank in range(count)]

    def _comm(self, rank: int, members: list[int]) -> SimpleNamespace:
        return SimpleNamespace(
            device=torch.device("cpu"),
            world_rank=rank,
            all_ranks=len(members),
            replicas=2,  # waits for the maximum
            two_level=False,
            watchdog=SimpleNamespace(profiled=False, host_waits=True, recorder=_Recorder()),
            world=SimpleNamespace(members=members),
            max_everywhere=self.messages.append,
        )

    def exchange(self) -> None:
        self.messages.clear()
        for report in self.reports:
            report.exchange([True, False])
        largest = torch.stack(self.messages).amax(0)
        for message in self.messages:
            message.copy_(largest)


@pytest.mark.parametrize("count", [1, 3, 64, 65, 1024])
def test_one_rank_that_steps_differently_is_named_however_many_there_are(count: int) -> None:
    ranks = _Ranks(count)
    for odd, notes in ((None, ()), (count - 1, (7, 8, 10)), (count // 2, (7, 8, 9))):
        for rank, report in enumerate(ranks.reports):
            report.note(7, 8, 9)
            if rank == odd and count > 1:
                if notes == (7, 8, 9):
                    report.note(*notes)  # one step more
                else:
                    report._sums[2] += 1  # another learning rate
        ranks.exchange()
        assert ranks.messages[0].numel() <= 2 + 64 * 52
        for report in ranks.reports:
            if odd is None or count == 1:
                report.check()
                continue
            what = "numbers of optimizer steps" if notes == (7, 8, 9) else "learning rates"
            with pytest.raises(RankMismatch, match=what) as caught:
                report.check()
            assert f"{odd % 64}" in str(caught.value)


def test_stand_ins_for_ranks_that_are_not_there_write_no_row() -> None:
    ranks = _Ranks(256)
    report = ranks.reports[200]
    report.note(1, 2, 3)
    report.exchange([True, True])
    report.check()


def test_the_first_operation_that_differs_is_named_and_gathers_ahead_are_none() -> None:
    same = {"gather": (9, ["a", "b", "c"]), "reduce": (4, ["c", "b"])}
    ahead = {"gather": (10, ["a", "b", "c", "d"]), "reduce": (4, ["c", "b"])}
    other = {"gather": (9, ["a", "x", "c"]), "reduce": (4, ["c", "b"])}
    more = {"gather": (9, ["a", "b", "c"]), "reduce": (5, ["c", "b", "a"])}
    assert first_difference({0: same, 1: same, 2: ahead}) is None
    assert first_difference({0: same, 1: other, 2: same}) == (
        "rank 1 began gather, x, where rank 0 began gather, b (operation 8)"
    )
    assert "rank 2 has begun 1 operations more than rank 0" in str(
        first_difference({0: same, 1: same, 2: more})
    )
