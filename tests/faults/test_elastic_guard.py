"""`fs.Guard`: a batch that spoils a run is left out, and the run ends as one that never had it."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from test_elastic import Agent, agents, same_as_undisturbed

import elastic_train
import fullshard as fs
from fullshard.checkpoint import rollbacks
from fullshard.errors import GradientError, OptionError, RolledBack

STEPS = 6


def train(folder: Path, accidents: list[Any], policy: dict[str, object], steps: int = STEPS) -> None:
    """In this process, one rank; raises what the script raises."""
    elastic_train.main(folder / "run", steps, accidents, policy)


def restarted(folder: Path, accidents: list[Any], policy: dict[str, object], steps: int = STEPS) -> int:
    """As whoever restarts it would: how often it was rolled back."""
    for number in range(9):
        try:
            train(folder, accidents, policy, steps)
        except RolledBack:
            continue
        return number
    raise AssertionError("it does not come to an end")


def decisions(folder: Path) -> list[tuple[int, str, bool]]:
    return [(one.step, one.action, one.suspect) for one in rollbacks.read(folder / "run")]


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr(rollbacks, "_loaded_at_ns", None)


@pytest.mark.timeout(600)
def test_two_ranks_roll_back_and_leave_out_the_batch_that_is_bad_on_one_of_them(tmp_path: Path) -> None:
    words = [
        elastic_train.__file__,
        tmp_path / "run",
        STEPS,
        json.dumps([[3, 1, "nan"]]),
        '{"on_nan": "rollback"}',
    ]
    with agents(tmp_path) as started:
        started.append(Agent(tmp_path, "here", ["--elastic", "2:2"], words))
        assert started[0].wait() == 0, started[0].text
    same_as_undisturbed(tmp_path, STEPS, frozenset({3}))
    assert decisions(tmp_path) == [(3, "rollback", False)]
    assert "RolledBack" in started[0].text
    assert "step 3 is rejected, because the loss is nan on rank 1; the run goes back" in started[0].text


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_a_bad_batch_is_left_out_by_either_policy(tmp_path: Path, policy: str) -> None:
    starts = restarted(tmp_path, [[2, 0, "nan"]], {"on_nan": policy})
    assert starts == (1 if policy == "rollback" else 0)
    same_as_undisturbed(tmp_path, STEPS, frozenset({2}))
    assert decisions(tmp_path) == [(2, policy, False)]


def test_a_loss_that_jumps_is_left_out_and_stays_out_after_a_restart(tmp_path: Path) -> None:
    policy = {"on_spike": "skip", "spike": 5.0}
    accidents = [[9, 0, "spike"], [10, 0, "raise"]]
    with pytest.raises(ValueError, match="once"):
        train(tmp_path, accidents, policy, 12)
    for saved in (tmp_path / "run").glob("step-*"):
        if saved.name not in ("step-7",):
            rename = saved.rename(tmp_path / f"{saved.name}-away")
            assert rename.exists()
    train(tmp_path, accidents, policy, 12)  # from step 8, with no losses to compare the ninth with
    same_as_undisturbed(tmp_path, 12, frozenset({9}))
    assert decisions(tmp_path) == [(9, "skip", False)]


def test_a_checkpoint_whose_parameters_are_spoilt_is_passed_over(tmp_path: Path) -> None:
    starts = restarted(tmp_path, [[2, 0, "spoil"]], {"on_nan": "rollback"}, 8)
    assert starts == 2
    # Step 3 is rejected, then step 4 right after the checkpoint of step 2: so that of step 1 is loaded.
    assert decisions(tmp_path) == [(3, "rollback", False), (4, "rollback", True)]
    same_as_undisturbed(tmp_path, 8, frozenset({2, 3, 4}))


def test_what_no_checkpoint_mends_is_an_error_and_so_is_a_policy_to_raise(tmp_path: Path) -> None:
    every = [[step, 0, "nan"] for step in range(20)]
    with pytest.raises(
        GradientError, match="step 1: the loss is nan on rank 0; there is no checkpoint before it"
    ):
        restarted(tmp_path / "a", every, {"on_nan": "rollback"})
    with pytest.raises(GradientError, match="8 steps in a row were rejected"):
        train(tmp_path / "b", every, {"on_nan": "skip"}, 20)
    with pytest.raises(GradientError, match="step 4: the loss is nan on rank 0"):
        train(tmp_path / "c", every[4:], {})
    with pytest.raises(GradientError, match="after each of 3 checkpoints"):
        restarted(tmp_path / "d", [[step, 0, "nan"] for step in range(4, 20)], {"on_nan": "rollback"}, 20)


def test_a_skipped_step_is_logged_with_its_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="fullshard"):
        train(tmp_path, [[1, 0, "nan"]], {"on_nan": "skip"}, 3)
    assert "step 1 is rejected, because the loss is nan on rank 0; its batch is left out" in caplog.text


def test_other_numbers_must_be_finite_too_and_options_are_checked(tmp_path: Path) -> None:
    batches = fs.Batches(8, 2, epochs=1, rank=0, ranks=1)
    guard = fs.Guard(tmp_path, batches, on_nan="skip")
    for step, _ in batches.steps(torch.utils.data.DataLoader(list(range(8)), batch_sampler=batches)):
        assert guard.rejects(1.0, torch.tensor(math.inf if step == 1 else 2.0)) is (step == 1)
    for options in ({"on_nan": "ignore"}, {"spike": 0.5}):
        with pytest.raises(OptionError):
            fs.Guard(tmp_path, batches, **options)  # type: ignore[arg-type]
