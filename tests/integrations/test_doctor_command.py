"""`fullshard doctor`: the runs that it compares, its outputs, and one message for what cannot be examined."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import ranks
import warm
from fullshard.doctor.judges import Examination, judged
from fullshard.tools.cli import doctor
from fullshard.tools.cli.app import run

SCRIPT = Path(__file__).resolve().parents[1] / "support" / "faulty_trainings.py"
RATES = {
    "rate_scaled_once": [],
    "right_warmup_by_ranks": [],
    "right_measured_first": [],
    "rate_scaled_twice": ["learning-rate-scaled-twice"],
    "rate_of_one_group_scaled_twice": ["learning-rate-scaled-twice"],
    "rate_scaled_twice_with_a_warmup_by_ranks": ["learning-rate-scaled-twice"],
    "loss_times_ranks": ["loss-scaled-by-ranks"],
    "right_same_global_batch": [],
    "gradients_times_ranks": ["differs-from-one-process"],
}
RESUMED = {
    "right_resume": "",
    "right_resume_with_a_schedule_of_a_function": "",
    "resumed_data": "begins again with the first batch",
    "resumed_schedule": "schedule",
    "resumed_schedule_of_a_function": "no scheduler was given its state",
    "resumed_optimizer": "learning rate",
    "resumed_with_a_new_optimizer": "fs.load was called without it",
}


def _events(names: list[str], folder: str, again: bool) -> dict[str, list[Any]]:
    """What each training records, and what it records when it is started once more."""
    import faulty_trainings
    from fullshard.doctor.recorder import Enough, Recorder

    found: dict[str, list[Any]] = {}
    for name in names:
        for steps in (5, 2) if again else (5,):
            recorder = Recorder(steps, False, Path(folder) / name)
            recorder.start()
            try:
                getattr(faulty_trainings, name)()
            except Enough:
                pass
            finally:
                recorder.stop()
            found.setdefault(name, []).append(recorder.events)
    ranks.end_groups_of_models()
    return found


def test_learning_rate_is_compared_with_one_process_and_a_resume_with_the_run_that_went_on(
    tmp_path: Path,
) -> None:
    both = ranks.run(_events, 2, [*RATES, *RESUMED], str(tmp_path / "two"), True, timeout_s=120)
    alone = ranks.run(_events, 1, list(RATES), str(tmp_path / "one"), False, timeout_s=120)[0]
    for name, expected in RATES.items():
        examined = Examination([rank[name][0] for rank in both], alone[name][0])
        assert [finding.name for finding in judged(examined)] == expected, name
    for name, why in RESUMED.items():
        runs = [[rank[name][i] for rank in both] for i in range(2)]
        found = judged(Examination(runs[0], [], runs[1]))
        assert [finding.name for finding in found] == (["wrong-resume"] if why else []), name
        assert all(why in finding.detail for finding in found), found
    assert not Path("checkpoints-of-a-run").exists()


def test_a_script_is_examined_unchanged_with_json_and_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(sys, "executable", f"{warm.commands()}/python")
    page = tmp_path / "report.html"
    words = ["--steps", "2", "--ranks", "2", "--json", "--html", str(page), str(SCRIPT), "same_data"]
    assert run(["doctor", *words]) == 1
    report = json.loads(capsys.readouterr().out)
    assert not report["same"]
    assert [finding["name"] for finding in report["findings"]] == ["same-data-on-ranks"]
    assert report["comparisons"] > 50
    assert len(report["losses"]) == 2
    assert {cell["stage"] for cell in report["differences"]} >= {"output", "gradient", "parameter"}
    text = page.read_text()
    assert "src=" not in text
    for part in ("<svg", "same-data-on-ranks", "blocks.1"):
        assert part in text


def test_a_report_of_a_script_has_its_plan_and_the_error_of_each_rank_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(sys, "executable", f"{warm.commands()}/python")
    script, out = tmp_path / "train.py", tmp_path / "report.json"
    script.write_text(
        "import torch, torch.distributed as dist, fullshard as fs\n"
        "dist.init_process_group('gloo')\n"
        "model = fs.shard(torch.nn.Linear(8, 8), strategy='zero2')\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "model(torch.ones(2, 8)).sum().backward()\n"
        "optimizer.step()\n"
        "raise ValueError(f'no batch on rank {dist.get_rank()}')\n"
    )
    assert run(["doctor", "--report", "--out", str(out), str(script), "--password", "hunter2"]) == 0
    text = out.read_text()
    assert "hunter2" not in text
    by_rank = json.loads(text)["ranks"]
    assert [one["error"] for one in by_rank] == [f"ValueError: no batch on rank {rank}" for rank in range(2)]
    assert "'zero2', 2 ranks" in str(by_rank[0]["models"])


def _recorded(events: list[dict[str, Any]], error: str | None = None) -> Any:
    def run_nothing(request: Any, *_: Any) -> list[dict[str, Any]]:
        return [{"events": events, "error": error}] * request.ranks

    return run_nothing


@pytest.mark.parametrize(
    ("events", "error", "message"),
    [
        ([], None, "never calls fs.shard"),
        ([{"kind": "sharded", "step": 0}], None, "never takes an optimizer step"),
        ([], "ValueError: no data", "fails by itself: rank 0 of 2: ValueError: no data"),
    ],
)
def test_a_script_that_cannot_be_examined_gets_one_clear_message(
    events: list[dict[str, Any]],
    error: str | None,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(doctor, "_run", _recorded(events, error))
    assert run(["doctor", str(SCRIPT)]) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.count("\n") == 1


_CLOSED = "RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:5342"


@pytest.mark.parametrize(
    ("errors", "message"),
    [
        ([_CLOSED, "KeyError: 'labels'"], "rank 1 of 2: KeyError: 'labels'"),
        (
            ["Stalled: rank 1 does not come", "ended with exit code -11"],
            "rank 1 of 2: ended with exit code -11",
        ),
        ([_CLOSED, None], ":5342 (rank 1 had ended by itself)"),
    ],
)
def test_of_several_ranks_that_fail_the_one_with_an_error_of_its_own_is_named(
    errors: list[str | None],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    stalled = {"kind": "refused", "step": 0, "error": "Stalled", "what": "x", "remedy": "y"}
    results = [
        {"events": [stalled] if error and error.startswith("Stalled") else [], "error": error}
        for error in errors
    ]
    monkeypatch.setattr(doctor, "_run", lambda *_: results)
    assert run(["doctor", str(SCRIPT)]) == 2
    assert message in capsys.readouterr().err


def test_a_script_that_does_not_find_its_checkpoint_again_is_told_that_resuming_was_not_checked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nothing: dict[str, Any] = {key: {} for key in ("copies", "buffers", "beside")}
    step = {"kind": "step", "step": 0, "model": 0, "optimizer": 0, "rates": [], "bases": [], "unheld": []}
    saved = {"kind": "saved", "step": 0, "path": "/checkpoint", "optimizer": True}
    sharded = {"kind": "sharded", "step": 0, "model": 0, "untied": [], "recomputes": False}
    loaded = {"kind": "loaded", "step": 0, "path": "/checkpoint", "extra": [], "optimizer": True}
    for again, told in (([], True), ([loaded], False)):
        events = [sharded, *again, step | nothing, saved]
        monkeypatch.setattr(doctor, "_run", _recorded(events))
        assert run(["doctor", str(SCRIPT)]) == 0
        assert ("resuming was not checked" in capsys.readouterr().out) == told


def test_what_the_engine_refuses_is_a_finding(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = {"kind": "refused", "step": 0, "error": "OptimizerError", "remedy": "Build it."}
    alone = refused | {"what": "SGD holds a tensor that the sharded model does not own"}
    for event, name in ((alone, "parameter-not-synchronised"), (refused | {"what": "x"}, "refused")):
        monkeypatch.setattr(doctor, "_run", _recorded([event], "OptimizerError: ..."))
        assert run(["doctor", str(SCRIPT)]) == 1
        assert f"FOUND {name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no script is given"),
        (["missing.py"], "there is no script 'missing.py'"),
        (["-m", "no_such_module_here"], "there is no module"),
        (["--ranks", "0", str(SCRIPT)], "--ranks is 0"),
        (["--accept", "same-data", str(SCRIPT)], "there is no finding 'same-data'"),
        (["--html", "no/such/folder/page.html", str(SCRIPT)], "--html 'no/such/folder/page.html' cannot be"),
        (["--cluster", "--out", "."], "--out '.' cannot be written"),
        (["--cluster", str(SCRIPT)], "--cluster takes no script"),
        (["--cluster", "--report"], "--cluster and --report do not go together"),
        (["--report", "--html", "page.html"], "--html and --report do not go together"),
    ],
)
def test_an_invalid_request_is_refused_before_anything_starts(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["doctor", *words]) == 2
    assert message in capsys.readouterr().err
