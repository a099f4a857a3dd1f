"""The harness itself: a rank that fails, hangs or dies is reported, and no process is left behind."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

import ranks


def _sum_of_ranks(extra: float) -> torch.Tensor:
    total = torch.tensor([dist.get_rank() + extra])
    dist.all_reduce(total)
    return total


def test_ranks_reach_each_other_run_after_run() -> None:
    for num_ranks, total in ((2, 3.0), (3, 6.0), (2, 3.0)):
        values = ranks.run(_sum_of_ranks, num_ranks, 1.0, init=True, timeout_s=30)
        assert [value.item() for value in values] == [total] * num_ranks


def _environment() -> tuple[str, str, int, bool]:
    started = dist.is_initialized()
    return os.environ["RANK"], os.environ["WORLD_SIZE"], torch.get_num_threads(), started


def test_rank_has_torchruns_environment_one_thread_and_no_process_group() -> None:
    assert ranks.run(_environment, 2, timeout_s=30) == [("0", "2", 1, False), ("1", "2", 1, False)]


def _fail_on_rank_one() -> None:
    if os.environ["RANK"] == "1":
        raise KeyError("the message")


def test_failure_of_one_rank_is_raised_with_its_traceback() -> None:
    with pytest.raises(ranks.RankFailure, match="rank 1: KeyError: 'the message'") as info:
        ranks.run(_fail_on_rank_one, 2, timeout_s=30)
    assert "_fail_on_rank_one" in info.value.errors[1].traceback
    assert info.value.errors[1].is_a("LookupError")


def test_expected_error_is_returned_and_its_absence_is_a_failure() -> None:
    type_name, message, _ = ranks.run(_fail_on_rank_one, 2, timeout_s=30, expect_error=True)[1]
    assert (type_name, message) == ("KeyError", "'the message'")
    with pytest.raises(AssertionError, match="raised nothing"):
        ranks.run(_environment, 2, timeout_s=30, expect_error=True)


def test_hang_ends_at_its_limit_with_the_stacks_and_the_processes_gone() -> None:
    ranks.run(_sum_of_ranks, 2, 1.0, init=True)  # so that the limit is not spent on starting processes
    started = time.monotonic()
    result = ranks.outcome(_hang_forever, 2, init=True, timeout_s=3)
    assert result.hung == [0, 1]
    assert "_hang_forever" in result.errors[0].traceback
    assert time.monotonic() - started < 120
    assert not ranks._pool.workers


def _hang_forever() -> None:
    if dist.get_rank() == 0:
        dist.barrier()
    time.sleep(600)


def _die() -> None:
    if os.environ["RANK"] == "1":
        os._exit(3)


def test_rank_that_dies_is_reported_with_its_exit_code() -> None:
    errors = ranks.run(_die, 2, timeout_s=30, expect_error=True)
    assert errors[1].type_name == "Exit"
    assert "exit code 3" in errors[1].message
