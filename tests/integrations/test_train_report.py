"""The HTML report of a run: its numbers are those of metrics.jsonl, and it stands alone."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import ranks
import training_runs as runs
from fullshard.training.charts import MAX_POINTS, Series, chart, short
from fullshard.training.display import Display
from fullshard.training.folder import RunFolder
from fullshard.training.report import render, write_report
from training_runs import STEPS

VOID = {"meta", "line"}


class Page(HTMLParser):
    """The texts of a page by the id of their element, and every tag with its attributes; checks nesting."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.texts: dict[str, str] = {}
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self._open: list[tuple[str, str | None]] = []
        self.feed(text)
        self.close()
        assert not self._open, f"not closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.tags.append((tag, attributes))
        if tag not in VOID:
            self._open.append((tag, attributes.get("id")))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        for _, key in self._open:
            if key is not None:
                self.texts[key] = self.texts.get(key, "") + data + " "


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    runs.write_texts(folder / "texts")
    config = runs.write_config(folder, sample={"prompt": "<b>the</b> & "})
    ranks.run(runs.train, 2, str(config), [], timeout_s=120)
    return folder / "run"


def test_numbers_of_the_report_are_those_of_the_metrics(run: Path) -> None:
    page = Page((run / "report.html").read_text())
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert json.loads(page.texts["metrics"]) == lines
    train, validation = runs.losses(run), runs.losses(run, "validation")
    assert page.texts["train-loss"].strip() == f"{train[-1]:.4f}"
    assert page.texts["validation-loss"].strip() == f"{validation[-1]:.4f}"
    assert page.texts["best-validation-loss"].strip() == f"{min(validation):.4f}"
    assert page.texts["step"].split() == [str(STEPS), "of", str(STEPS)]
    tokens = STEPS * runs.BATCH * runs.LENGTH
    assert page.texts["tokens"].strip() == f"{tokens:,}"
    assert page.texts["ranks"].strip() == "2, cpu"


def test_loss_curve_has_a_point_for_every_step_at_its_height(run: Path) -> None:
    text = (run / "report.html").read_text()
    loss = text[text.index("id='chart-loss'") : text.index("id='chart-learning-rate'")]
    line, dotted = re.findall(r"<polyline[^>]*points='([^']*)'", loss)
    points = [tuple(map(float, point.split(","))) for point in line.split()]
    assert len(points) == STEPS
    assert len(dotted.split()) == 3
    both = runs.losses(run) + runs.losses(run, "validation")
    low, high = min(both), max(both)
    top, bottom = 12, 226  # where the highest and the lowest value lie
    for (_, y), value in zip(points, runs.losses(run), strict=True):
        assert y == pytest.approx(bottom - (value - low) / (high - low) * (bottom - top), abs=0.06)
    for key in ("learning-rate", "gradient-norm", "throughput", "memory"):
        assert f"id='chart-{key}'" in text


def test_memory_of_the_report_is_what_ranks_of_zero3_hold(run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    unsharded = summary["whole"]
    # All of a 2-block GPT: its parameters, as many gradients, twice as many moments, and step counts.
    assert unsharded["parameters"] == 4 * summary["parameters"] == unsharded["gradients"]
    assert len(summary["held"]) == 2
    for held in summary["held"]:
        assert 0.45 < held["parameters"] / unsharded["parameters"] < 0.65
        assert held["total"] == held["parameters"] + held["gradients"] + held["optimizer_state"]
    assert sum(unit["elements"] for unit in summary["units"]) == summary["parameters"]
    page = Page((run / "report.html").read_text())
    assert "rank 0" in page.texts["memory"]
    assert "one unsharded process" in page.texts["memory"]
    assert "(root)" in page.texts["plan"]  # a model of this size is one unit
    assert "torch" in page.texts["versions"]


def test_report_stands_alone_and_shows_texts_as_texts(run: Path) -> None:
    text = (run / "report.html").read_text()
    page = Page(text)
    for tag, attributes in page.tags:
        assert tag not in ("link", "img", "iframe"), tag
        assert "src" not in attributes
        assert "href" not in attributes
    assert "http" not in re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    assert "&lt;b&gt;the&lt;/b&gt; &amp; " in text, "the sample is part of the page, not of its text"
    assert "prefers-color-scheme: dark" in text


def test_report_of_a_run_that_has_only_begun_says_so(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    page = Page(render(folder))
    assert json.loads(page.texts["metrics"]) == []
    folder.write("summary.json", {"status": "failed: </script><b>"})
    (folder.path / "metrics.jsonl").write_text(
        '{"kind": "validation", "step": 0, "loss": 5.5}\n{"kind": "tra'
    )
    page = Page(write_report(folder).read_text())
    assert page.texts["validation-loss"].strip() == "5.5000"


@pytest.mark.parametrize(
    "points",
    [
        [(1.0, 2.0)],
        [(1.0, 2.0), (2.0, 2.0)],
        [(0.0, float("nan")), (1.0, 1e-9), (2.0, 3e12)],
        [(0.0, -5.0), (1.0, 5.0)],
    ],
)
def test_chart_stays_inside_its_frame(points: list[tuple[float, float]]) -> None:
    svg = chart([Series("a <name>", points)], "step", "loss")
    Page(svg)
    for x, y in re.findall(r"([-\d.]+),([-\d.]+)", "".join(re.findall(r"points='([^']*)'", svg))):
        assert 0 <= float(x) <= 640
        assert 0 <= float(y) <= 260


def test_chart_of_a_long_run_is_thinned_without_losing_a_jump() -> None:
    points: list[tuple[float, float]] = [(float(x), 1.0 if x < 50_000 else 9.0) for x in range(100_000)]
    drawn = re.findall(r"points='([^']*)'", chart([Series("loss", points)], "step", "loss"))[0].split()
    assert len(drawn) <= MAX_POINTS
    assert len({point.split(",")[1] for point in drawn}) in (2, 3)
    assert "Nothing" in chart([Series("loss", [])], "step", "loss")


def test_narrow_terminal_shows_step_loss_and_memory_uncut(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # what rich takes for a terminal
    monkeypatch.setenv("COLUMNS", "40")
    shown = Display(400, quiet=False)
    shown.start(0)
    shown.step({"step": 123, "loss": 1.25, "tokens_per_s": 12345.0, "memory": [2**29] * 4})
    shown.stop()
    held = {"parameters": 2**20, "gradients": 2**20, "optimizer_state": 2**21, "total": 2**22}
    shown.held([held], held, [2**29])
    text = capsys.readouterr().out
    assert "123/400 loss 1.250" in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
    assert "rank 0: 4.0 MiB at rest, 512.0 MiB at the peak" in text
    assert "\N{HORIZONTAL ELLIPSIS}" not in text, "something was cut"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (3e-4, "3e-04"), (0.25, "0.25"), (1500, "1500"), (25_000, "25k"), (2.5e6, "2.5M")],
)
def test_numbers_on_an_axis_are_short(value: Any, text: str) -> None:
    assert short(value) == text
