"""Measured link speeds in the cache folder: per cluster, replaced in one piece, never trusted blindly."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from fullshard.comm.probe import levels
from fullshard.comm.topology import Place
from fullshard.link_speeds import ClusterSpeeds, LinkSpeed, recall_speeds, remember_speeds, speeds_file

INSIDE, ACROSS = LinkSpeed(8, 4e11, 3e-6), LinkSpeed(4, 5e10, 1.5e-5)
SPEEDS = ClusterSpeeds("nccl", "CPU", 32, INSIDE, ACROSS, "2030-01-01T00:00:00+00:00")


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("FULLSHARD_CLUSTER", "alps-17")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


def test_speeds_are_remembered_per_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    assert recall_speeds() is None
    path = remember_speeds(SPEEDS)
    assert recall_speeds() == SPEEDS
    monkeypatch.setenv("FULLSHARD_CLUSTER", "alps-4")  # another host of the same
    assert recall_speeds() == SPEEDS
    monkeypatch.setenv("FULLSHARD_CLUSTER", "andes-17")
    assert recall_speeds() is None
    other = replace(SPEEDS, ranks=2, across=None)
    remember_speeds(other)
    assert recall_speeds() == other
    monkeypatch.setenv("FULLSHARD_CLUSTER", "alps-17")
    assert recall_speeds() == SPEEDS
    assert [file.name for file in path.parent.iterdir()] == ["links.json"]


def test_a_measurement_inside_one_node_keeps_the_speed_across() -> None:
    remember_speeds(SPEEDS)
    faster = LinkSpeed(8, 5e11, 2e-6)
    remember_speeds(replace(SPEEDS, inside=faster, across=None, ranks=8))
    assert recall_speeds() == replace(SPEEDS, inside=faster, ranks=8)
    remember_speeds(replace(SPEEDS, backend="gloo", across=None))  # another network
    assert recall_speeds() == replace(SPEEDS, backend="gloo", across=None)


def _damaged() -> dict[str, str]:
    good = {"version": 1, "clusters": {}}
    entry = {"backend": "nccl", "device": "CPU", "ranks": 2, "inside": None, "across": None, "measured": ""}
    slow = {"ranks": 2, "bandwidth_bytes_s": 0, "latency_s": 0}
    return {
        "empty": "",
        "cut": json.dumps(good)[:-1],
        "binary": "\udcff",
        "list": "[]",
        "of another version": json.dumps(good | {"version": 2}),
        "without clusters": json.dumps({"version": 1}),
        "entry is a number": json.dumps(good | {"clusters": {"a": 1}}),
        "entry is cut": json.dumps(good | {"clusters": {"a": {"backend": "nccl"}}}),
        "bandwidth of nothing": json.dumps(good | {"clusters": {"a": entry | {"inside": slow}}}),
        "not a number": json.dumps(good | {"clusters": {"a": entry | {"across": slow | {"ranks": "x"}}}}),
        "deep": "[" * 100_000,
    }


@pytest.mark.parametrize("kind", list(_damaged()))
def test_a_damaged_file_is_ignored_with_a_warning_and_replaced_by_the_next_measurement(kind: str) -> None:
    path = speeds_file()
    path.parent.mkdir(parents=True)
    path.write_bytes(_damaged()[kind].encode(errors="surrogateescape"))
    with pytest.warns(UserWarning, match=r"links.json .* ignored.*fullshard env --probe"):
        assert recall_speeds() is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        remember_speeds(SPEEDS)
        assert recall_speeds() == SPEEDS


def test_levels_are_nodes_and_equal_local_indices_also_where_nodes_differ() -> None:
    one_name = [7, 7, 7, 7]  # as containers may have
    even = [Place(0, 2), Place(1, 2), Place(0, 2), Place(1, 2)]
    assert levels(even, one_name) == ([[0, 1], [2, 3]], [[0, 2], [1, 3]])
    uneven = [Place(0, 3), Place(1, 3), Place(2, 3), Place(0, 1)]
    assert levels(uneven, one_name) == ([[0, 1, 2], [3]], [[0, 3], [1], [2]])


def test_ranks_that_are_dealt_out_to_nodes_in_turn_are_told_apart_by_the_names_of_their_hosts() -> None:
    in_turn = [Place(0, 2), Place(0, 2), Place(1, 2), Place(1, 2)]
    assert levels(in_turn, [5, 6, 5, 6]) == ([[0, 2], [1, 3]], [[0, 1], [2, 3]])
    uneven = [Place(0, 3), Place(0, 1), Place(1, 3), Place(2, 3)]
    assert levels(uneven, [5, 6, 5, 5]) == ([[0, 2, 3], [1]], [[0, 1], [2], [3]])
    backwards = [Place(1, 2), Place(0, 2), Place(1, 2), Place(0, 2)]
    assert levels(backwards, [5, 5, 6, 6]) == ([[0, 1], [2, 3]], [[0, 2], [1, 3]])
