"""The report of a step has a fixed size, and shows every rank whose optimizer stepped differently."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fullshard.comm.step_report import StepReport
from fullshard.errors import RankMismatch


class _Ranks:
    """Reports of many ranks in one process, reduced by hand."""

    def __init__(self, count: int) -> None:
        self.messages: list[torch.Tensor] = []
        self.reports = [StepReport(self._comm(rank, list(range(count)))) for rank in range(count)]

    def _comm(self, rank: int, members: list[int]) -> SimpleNamespace:
        return SimpleNamespace(
            device=torch.device("cpu"),
            world_rank=rank,
            replicas=2,  # waits for the maximum
            watchdog=SimpleNamespace(profiled=False),
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
        assert ranks.messages[0].numel() <= 2 + 64 * 28
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
