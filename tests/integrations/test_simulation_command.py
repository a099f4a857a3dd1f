"""`fullshard simulate`: what it prints, what it refuses, and the timeline that it writes."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import ranks
import warm
from fullshard.planning.network import Link, Network
from fullshard.tools import cli
from fullshard.tools.simulation.group import Cluster, joined
from fullshard.tools.simulation.models import decoder
from fullshard.tools.simulation.presets import gpt
from fullshard.tools.simulation.run import Result, Scenario, build
from fullshard.tools.simulation.timeline import ROOT, ROWS, Timeline, trace

CPU = torch.device("cpu")
MS = {"ms": 1, "s": 1000}  # a step is measured, so either may be printed
SMALL = ("gpt-8m", "--layers", "2", "--tokens", "16", "--steps", "2", "--warmup", "1", "--device", "cpu")
OWN_MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(1024, 1024), nn.ReLU()) for _ in range(3))

    def forward(self, x, *, scale):
        for block in self.blocks:
            x = block(x)
        return (x * scale).square()

def make():
    return Net(), {"x": torch.randn(4, 1024), "scale": torch.ones(())}

def wrong():
    return Net()
"""


def _printed(arguments: tuple[str, ...]) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main(arguments)
    return code, out.getvalue(), err.getvalue()


def _run(*arguments: str) -> tuple[int, str, str]:
    (found,) = ranks.run(_printed, 1, ("simulate", *arguments))
    return found  # type: ignore[no-any-return]


# --- the command -----------------------------------------------------------------------------------------


def test_module_runs_as_a_command() -> None:
    found = subprocess.run(
        [f"{warm.commands()}/fullshard", "simulate", *SMALL, "--ranks", "4", "--link", "1GB/s"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
        check=True,
    )
    assert found.stdout.startswith(
        "gpt-8m: 3.7 M parameters, 2 layers of width 256; 16 tokens per rank and step"
    )
    assert "4 ranks, 1 GB/s and 14 µs per hop each; this CPU plays rank 0" in found.stdout
    rows = {line[:29].strip(): line[29:].split() for line in found.stdout.splitlines()[4:]}
    for row in ("step", "exposed communication", "busiest link in use", "sent", "memory, at rest by plan"):
        assert len(rows[row]) == 2, found.stdout  # a number and its unit
    assert rows["step"][1] in MS  # seconds on a busy machine
    assert rows["sent"][1] == "MiB"
    assert not found.stderr


def test_both_engines_stand_side_by_side_with_their_ratio() -> None:
    code, out, _ = _run(*SMALL, "--engine", "both", "--ranks", "8", "--link", "100MB/s")
    assert code == 0
    head, step = out.splitlines()[3:5]
    assert head.split() == ["fullshard", "FSDP2", "FSDP2", "/", "fullshard"]
    label, ours, unit, theirs, other, ratio = step.split()
    assert label == "step"
    took = float(theirs) * MS[other] / (float(ours) * MS[unit])
    assert float(ratio) == pytest.approx(took, abs=0.02)


def test_json_has_every_figure() -> None:
    code, out, _ = _run(*SMALL, "--json", "--rank", "3", "--node-ranks", "2", "--inside", "1TB/s")
    said = json.loads(out)
    assert code == 0
    assert said["model"] == "gpt-8m"
    assert said["rank"] == 3
    assert said["network"]["node_ranks"] == 2
    figures = said["engines"]["fullshard"]
    assert figures["step_s"] > 0
    assert figures["sent_bytes"] > 1e6
    assert figures["rest_bytes"] == pytest.approx(3.74e6 * 16 / 8, rel=0.01)


def _offloads() -> list[tuple[int, str, str]]:
    """Several commands of one process."""
    said = (
        "simulate",
        *SMALL,
        "--ranks",
        "4",
        "--node-ranks",
        "2",
        "--inside",
        "90GB/s",
        "--offload",
        "host",
    )
    return [
        _printed((*said, "--json", "--host-link", "1MB/s", "--host-memory", "1GiB")),
        _printed((*said, "--json")),
        _printed((*said, "--host-link", "1MB/s")),
        _printed((*said, "--host-link", "900TB/s")),
        _printed((*said, "--host-memory", "9MiB")),
        _printed((*said, "--engine", "both")),
        _printed(("simulate", *SMALL, "--host-link", "1MB/s")),
    ]


def test_offload_is_simulated_over_a_slower_host_link_and_in_a_nodes_share_of_memory() -> None:
    (answers,) = ranks.run(_offloads, 1)
    slow, own, text, fast, small, rival, none = answers
    assert [code for code, _, _ in answers] == [0, 0, 0, 2, 2, 2, 2]
    figures = json.loads(slow[1])["engines"]["fullshard"]
    link = figures["host_link"]
    moved = link["moved"]
    num_elements = figures["host_bytes"] / 2 / 16  # of a rank; fp32 is not cast
    assert moved["step_up"] == 16 * num_elements
    assert moved["step_down"] == 12 * num_elements
    assert moved["pass_down"] == 4 * num_elements
    assert link["step_s"] == pytest.approx(12 * num_elements / 0.5e6 + 4 * num_elements / 1e6)
    assert link["computed_step_s"] >= link["busy_s"]
    assert figures["rest_bytes"] == 0
    plain = json.loads(own[1])["engines"]["fullshard"]
    assert plain["host_link"]["computed_step_s"] == plain["step_s"]
    assert plain["host_link"]["link_bytes_s"] == plain["host_link"]["own_bytes_s"]
    assert "step over this link, computed" in text[1]
    assert "--host-link is 900000 GB/s, and copies of this machine reach" in fast[2]
    assert "the 2 ranks of a host need" in small[2]
    assert "It is for fullshard" in rival[2]
    assert "Give --offload host." in none[2]


def test_presets_are_listed() -> None:
    code, out, _ = _printed(("simulate", "--list"))
    assert code == 0
    assert "llama-70b" in out
    assert "80 layers of width 8192" in out


@pytest.mark.parametrize("engine", ["fullshard", "fsdp2"])
def test_model_of_ones_own_is_simulated(engine: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN_MODEL)
    code, out, err = _run(
        f"{tmp_path}/own.py:make", "--engine", engine, "--ranks", "4", "--steps", "1", "--json"
    )
    assert code == 0, err
    assert json.loads(out)["engines"][engine]["messages"] > 3


def test_command_leaves_nothing_in_the_process() -> None:
    first, second = (_run(*SMALL, "--ranks", count, "--json")[0] for count in ("4", "8"))
    assert first == second == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "no model was given"),
        (("gpt-9m",), "Choose one of gpt-8m"),
        (("no/such.py:make",), "cannot be loaded"),
        (("gpt-8m", "--ranks", "many"), "--ranks"),
        (("gpt-8m", "--ranks", "0"), "at least one rank"),
        (("gpt-8m", "--rank", "8"), "rank 8 of 8 ranks"),
        (("gpt-8m", "--link", "fast"), "50GB/s"),
        (("gpt-8m", "--link", "0GB/s"), "bandwidth above 0"),
        (("gpt-8m", "--latency", "20"), "20us"),
        (("gpt-8m", "--node-ranks", "4"), "--inside"),
        (("gpt-8m", "--keep-node", "1MiB"), "--node-ranks"),
        (("gpt-8m", "--inside-latency", "1us"), "--node-ranks"),
        (("gpt-8m", "--rings"), "--node-ranks"),
        (("gpt-8m", "--node-ranks", "3", "--inside", "1GB/s"), "multiple"),
        (("gpt-8m", "--strategy", "zero4"), "zero3"),
        (("gpt-8m", "--strategy", "hybrid"), "--node-ranks"),
        (("gpt-8m", "--precision", "fp64"), "bf16"),
        (("gpt-8m", "--keep-full", "much"), "2GiB"),
        (("gpt-8m", "--keep-full", "-1"), "keep_full"),
        (("gpt-8m", "--steps", "0"), "at least 1"),
        (("gpt-8m", "--layers", "0"), "at least 1"),
        (("gpt-8m", "--device", "tpu"), "cpu"),
        (("gpt-8m", "--device", "cuda:99"), "cpu"),
        (("gpt-8m", "--timeline", "/no/such/folder/t.json"), "no folder"),
        (("gpt-8m", "--engine", "ddp"), "fsdp2"),
    ],
)
def test_wrong_option_is_one_line_with_its_remedy(arguments: tuple[str, ...], says: str) -> None:
    code, out, err = _printed(("simulate", *arguments))
    assert code == 2
    assert not out
    assert err.startswith("fullshard: ")
    assert err.count("\n") == 1
    assert says in err


def test_rank_that_does_not_fit_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "fullshard.tools.cli.simulate.simulate", lambda _, engine, __: Result(engine, None, None, 0)
    )
    code, out, err = _printed(("simulate", *SMALL, "--engine", "both"))
    assert (code, err) == (1, "")
    assert out.endswith(
        "fullshard: the rank does not fit in memory\nFSDP2: the rank does not fit in memory\n"
    )


def test_function_that_returns_no_batch_is_refused(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN_MODEL)
    code, _, err = _printed(("simulate", f"{tmp_path}/own.py:wrong"))
    assert code == 2
    assert "Return (model, batch)" in err


@pytest.mark.parametrize("said", [("--strategy", "replicate"), ("--precision", "int8")])
def test_what_fsdp2_has_not_is_refused(said: tuple[str, ...]) -> None:
    code, _, err = _run(*SMALL, "--engine", "fsdp2", *said)
    assert code == 2
    assert "FSDP2" in err


# --- the timeline ----------------------------------------------------------------------------------------


def _traced(engine: str, said: dict[str, Any], path: str) -> dict[str, Any]:
    what = decoder("tiny", gpt(3, 32, 2, 64, context=16), 16)
    network = Network(8, Link(2e7, 20e-6), *((4, Link(1e9)) if "strategy" in said else ()))
    scenario = Scenario(what, network, CPU, precision="fp32", merge_units=0, **said)
    with joined(Cluster(network, CPU)) as cluster:
        training = build(scenario, engine)
        for _ in range(2):
            training()
        runtime = vars(training.model).get("_fullshard")
        watched = [] if runtime is None else [runtime, runtime.comm, runtime.comm.recorder, *runtime.units]
        before = [set(vars(one)) for one in watched]
        hooks = [(len(m._forward_hooks), len(m._backward_hooks)) for m in training.model.modules()]
        cluster.wire.traffic.clear()
        timeline = Timeline()
        timeline.add(engine, trace(training, cluster))
        timeline.write(Path(path))
        after = [(len(m._forward_hooks), len(m._backward_hooks)) for m in training.model.modules()]
        return {
            "inside_s": cluster.wire.traffic.inside_s,
            "across_s": cluster.wire.traffic.across_s,
            "waited_s": cluster.wire.traffic.waited_s,
            "messages": cluster.wire.traffic.messages,
            "units": [] if runtime is None else [unit.name or ROOT for unit in runtime.units],
            "clean": before == [set(vars(one)) for one in watched] and hooks == after,
        }


def _rows(path: Path) -> dict[str, list[dict[str, Any]]]:
    events = json.loads(path.read_text())["traceEvents"]
    rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for one in events:
        if one["ph"] == "X":
            assert set(one) == {"ph", "pid", "tid", "name", "cat", "ts", "dur", "args"}
            rows[ROWS[one["tid"]]].append(one)
    names = {e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert names == set(rows)
    links = {"inside", "across"} if "across" in rows else {"wire"}
    assert names - {"inside"} == {"compute", "host", *links} - {"inside"}
    for row in rows.values():
        assert all(one["ts"] >= 0 and one["dur"] >= 0 for one in row)
        for one, other in pairwise(row):
            assert one["ts"] + one["dur"] <= other["ts"] + 1e-3, (one, other)
    return rows


@pytest.mark.parametrize(
    "said",
    [
        {"keep_full": 0},
        {"keep_full": 0, "checkpoint_activations": True},
        {"keep_full": 0, "strategy": "hybrid"},
        {"keep_full": 0, "strategy": "zero3"},
        {"keep_full": 0, "strategy": "zero3", "keep_node": 0},
    ],
)
def test_timeline_shows_every_units_gather_compute_release_and_reduce(
    said: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "step.json"
    (found,) = ranks.run(_traced, 1, "fullshard", said, str(path))
    rows = _rows(path)
    names = {row: [one["name"] for one in events] for row, events in rows.items()}
    links = [row for row in ("wire", "inside", "across") if row in rows]
    assert links == (["inside", "across"] if "strategy" in said else ["wire"])
    wire = sorted((one for row in links for one in rows[row]), key=lambda one: one["ts"])
    names["wire"] = [one["name"] for one in wire]
    assert found["units"] == [ROOT, "blocks.0", "blocks.1", "blocks.2"]
    for unit in found["units"]:
        assert f"gather {unit} (forward)" in names["wire"]
        assert f"reduce {unit} (backward)" in names["wire"]
        assert f"forward {unit}" in names["compute"]
        assert f"backward {unit}" in names["compute"]
        assert f"release {unit}" in names["host"]
        assert f"issue {unit}" in names["host"]
        assert (f"gather {unit} (backward)" in names["wire"]) == (unit != ROOT)
        assert (f"recompute {unit}" in names["compute"]) == (
            "checkpoint_activations" in said and unit != ROOT
        )
        gathered = next(one for one in wire if one["name"] == f"gather {unit} (forward)")
        computed = next(one for one in rows["compute"] if one["name"] == f"forward {unit}")
        assert gathered["ts"] + gathered["dur"] <= computed["ts"] + 1e-3
        assert gathered["args"] == {"unit": unit, "sent_bytes": gathered["args"]["sent_bytes"]}
    assert names["compute"][-1] == "optimizer step"
    assert ("reduce across blocks.1 (backward)" in names["wire"]) == ("strategy" in said)
    assert ("gather across blocks.1 (forward)" in names["wire"]) == (said.get("strategy") == "zero3")
    again = said.get("strategy") == "hybrid" or "keep_node" in said  # hybrid: gradients, from their owners
    assert ("gather across blocks.1 (backward)" in names["wire"]) == again
    if links == ["wire"]:
        assert len(wire) == found["messages"]
    for row in links:
        in_use_us = found["inside_s" if row == "inside" else "across_s"] * 1e6
        assert sum(one["dur"] for one in rows[row]) == pytest.approx(in_use_us, rel=1e-3)
    waits = sum(one["dur"] for one in rows["compute"] if one["cat"] == "wait")
    assert waits >= found["waited_s"] * 1e6 * 0.99
    assert found["clean"]


def test_timeline_of_fsdp2_shows_messages_and_blocks(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    (found,) = ranks.run(_traced, 1, "fsdp2", {}, str(path))
    rows = _rows(path)
    assert {one["name"] for one in rows["wire"]} == {"gather", "reduce-scatter"}
    assert sum(one["dur"] for one in rows["wire"]) == pytest.approx(found["across_s"] * 1e6, rel=1e-4)
    for block in ("blocks.0", "blocks.1", "blocks.2"):
        for kind in ("forward", "backward"):
            assert f"{kind} {block}" in {one["name"] for one in rows["compute"]}
    assert found["clean"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_timeline_of_a_gpu_holds_the_wire_for_its_time(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    said = ("gpt-124m", "--layers", "4", "--tokens", "1024", "--ranks", "8", "--link", "5GB/s", "--json")
    code, out, err = _run(*said, "--timeline", str(path))
    assert code == 0, err
    figures = json.loads(out)["engines"]["fullshard"]
    rows = _rows(path)
    took_s = sum(one["dur"] for one in rows["wire"]) / 1e6
    assert took_s == pytest.approx(figures["wire_s"], rel=1e-3)
    assert figures["step_s"] >= figures["wire_s"]
    assert figures["peak_bytes"] > 0
    assert "forward blocks.0..3" in {one["name"] for one in rows["compute"]}  # merged: four small blocks


def test_both_engines_share_a_timeline(tmp_path: Path) -> None:
    path = tmp_path / "both.json"
    code, out, _ = _run(*SMALL, "--engine", "both", "--timeline", str(path))
    assert code == 0
    assert "ui.perfetto.dev" in out
    events = json.loads(path.read_text())["traceEvents"]
    titles = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert titles == {0: "fullshard", 1: "fsdp2"}
    assert {e["pid"] for e in events if e["ph"] == "X"} == {0, 1}
