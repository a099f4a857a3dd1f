"""Copies in memory after a loss: of a rank in the middle of a save, of hosts, of bits, of the agent."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from test_elastic import Agent, agents, free_port, joined, meeting, same_as_undisturbed

import fullshard as fs
import peer_train
import ranks
from engines import my_rank
from fullshard.checkpoint.saving.peer_copies import PeerJob
from fullshard.errors import DamagedCheckpoint
from painting import IGNORE, load, paint, painted, scramble, shard, trained, whole_state
from peer_hosts import Hosts, Spots, arrive, hosts


def _state(spots: Spots) -> tuple[Any, Any]:
    arrive(spots)
    model = shard(**IGNORE)
    return model, trained(model)


def _save(model: Any, optimizer: Any, path: Path, salt: str, **options: Any) -> None:
    paint(model, optimizer, salt)
    fs.save(path, model, optimizer, extra={"salt": salt}, **options).wait()


def _newest(spots: Spots, root: Path, verify: bool = False) -> tuple[str, list[str], list[str]]:
    """What goes on: its name and values, what is wrong with them, and what was said."""
    model, optimizer = _state(spots)
    scramble(model, optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        path = fs.latest(root, verify=verify)
    salt = load(path, model, optimizer)["salt"]
    values = {n: v for n, v in whole_state(model, optimizer).items() if n != "scratch"}
    return f"{path.name} {salt}", painted(values, salt), [str(warning.message) for warning in caught]


# --- a rank dies in the middle of a save ---------------------------------------------------------------

# Where the second of three ranks is killed, and which step is the newest then. At the end it may be either:
# its state is complete elsewhere, if the others have come as far.
MOMENTS = {
    "_write_own": {"step-1 a"},
    "_take_for_peers": {"step-1 a"},
    "_send": {"step-1 a"},
    "_complete": {"step-1 a", "step-2 b"},
    "after _complete": {"step-1 a", "step-2 b"},
}


def _killed_in(spots: Spots, root: Path, moment: str) -> None:
    model, optimizer = _state(spots)
    _save(model, optimizer, root / "step-1", "a", peers=1)
    name = moment.split()[-1]
    method = getattr(PeerJob, name)

    def killed(job: PeerJob, *args: Any) -> Any:
        if moment.startswith("after"):
            method(job, *args)
        os.kill(os.getpid(), signal.SIGKILL)

    if my_rank() == 1:
        setattr(PeerJob, name, killed)  # this process is gone before anybody else could use it
    _save(model, optimizer, root / "step-2", "b", peers=1)


@pytest.mark.parametrize("moment", MOMENTS)
def test_rank_killed_in_the_middle_of_a_save_leaves_one_step_or_the_other(
    tmp_path: Path, moment: str
) -> None:
    with hosts() as up:
        ended = ranks.outcome(
            _killed_in, 3, up.spots("abc", "one"), tmp_path, moment, timeout_s=60, grace_s=60
        )
        assert sorted(ended.errors) == [0, 1, 2]
        assert ended.errors[1].type_name == "Exit"
        assert ended.errors[0].is_a("FullshardError"), ended.errors[0]
        assert ended.errors[2].is_a("FullshardError"), ended.errors[2]
        results = ranks.run(_newest, 2, up.spots("ac"), tmp_path)
        assert results[0] == results[1]
        assert results[0][0] in MOMENTS[moment]
        assert results[0][1:] == ([], [])


# --- hosts are lost, or bits ---------------------------------------------------------------------------


def _disk_then_memory(spots: Spots, root: Path) -> None:
    model, optimizer = _state(spots)
    _save(model, optimizer, root / "step-1", "a")
    _save(model, optimizer, root / "step-2", "b", peers=1)


def test_both_copies_lost_falls_back_to_disk_and_says_which(tmp_path: Path) -> None:
    with hosts() as up:
        ranks.run(_disk_then_memory, 4, up.spots("abcd"), tmp_path)
        up.lose("b")
        for rank, found in enumerate(ranks.run(_newest, 3, up.spots("acd"), tmp_path)):
            assert found == ("step-2 b", [], []), rank  # the copy of rank 1 is on the host after its own
        up.lose("c")
        for rank, (found, wrong, said) in enumerate(ranks.run(_newest, 2, up.spots("ad"), tmp_path)):
            assert (found, wrong) == ("step-1 a", [])
            if rank == 0:
                [text] = said
                assert "step-2' is not complete in memory: all copies of rank 1 (of 4) are lost" in text
                assert "Training goes on from 'step-1', which is on disk" in text


def _change_a_byte(up: Hosts, name: str, rank: int) -> None:
    """In the copy of this rank's state that a host keeps."""
    process, word, numbers = up.keepers[name].variables()["FULLSHARD_KEEPER"].split(":")
    from fullshard.elastic.keeper_places import Places

    places = Places(word, int(process), [int(n) for n in numbers.split(",")])
    for index, _, described in places.held():
        if described["rank"] == rank:
            begin, size = described["files"][f"part-{rank:05}.safetensors"]
            place, byte = places.open(index), bytearray(1)
            place.read_into(begin + size - 3, memoryview(byte))
            place.write(begin + size - 3, memoryview(bytes([byte[0] ^ 1])))
            place.close()


def test_a_damaged_copy_is_never_loaded_and_verify_takes_the_other_one(tmp_path: Path) -> None:
    with hosts() as up:
        ranks.run(_disk_then_memory, 2, up.spots("ab"), tmp_path)
        _change_a_byte(up, "a", 0)
        errors = ranks.run(_newest, 1, up.spots("a"), tmp_path, expect_error=True)
        assert errors[0].type_name == DamagedCheckpoint.__name__
        assert "their checksum differs" in errors[0].message
        for rank, (found, wrong, said) in enumerate(ranks.run(_newest, 2, up.spots("ab"), tmp_path, True)):
            assert (found, wrong) == ("step-2 b", [])
            assert [("copy of rank 0" in text and "left out" in text) for text in said] == [True] * (
                rank == 0
            )
        _change_a_byte(up, "b", 0)
        for found, wrong, _ in ranks.run(_newest, 2, up.spots("ab"), tmp_path, True):
            assert (found, wrong) == ("step-1 a", [])


# --- the agent is killed -------------------------------------------------------------------------------

AGENT = """
import sys, time
from fullshard.elastic.keeper import Keeper
with Keeper("test") as keeper:
    print(keeper.variables()["FULLSHARD_KEEPER"], flush=True)
    time.sleep(600)
"""


def test_agent_that_is_killed_leaves_no_memory_and_no_file(tmp_path: Path) -> None:
    from fullshard.elastic.keeper_places import Places
    from fullshard.errors import StateError

    agent = subprocess.Popen([sys.executable, "-c", AGENT], stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    try:
        assert agent.stdout is not None
        process, word, numbers = agent.stdout.readline().strip().split(":")
        places = Places(word, int(process), [int(n) for n in numbers.split(",")])
        place = places.take(2**20)
        place.reserve(2**20)
        place.complete({"id": "x"})
        place.close()
        assert len(places.held()) == 1
        links = [os.readlink(f"/proc/{process}/fd/{n}") for n in numbers.split(",")]
        assert all(link.startswith("/memfd:fullshard test") for link in links)  # no name in a file system
    finally:
        agent.kill()
        agent.wait()
        agent.stdout.close()  # type: ignore[union-attr]
    with pytest.raises(StateError, match="cannot be opened"):
        places.held()
    assert not list(tmp_path.iterdir())


# --- a run of two agents -------------------------------------------------------------------------------


@pytest.mark.timeout(600)
def test_elastic_run_grows_and_goes_on_from_memory_after_a_lost_rank_and_a_lost_host(tmp_path: Path) -> None:
    options = [*meeting("1:2"), "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    accidents = [[1, 0, "wait joined"], [3, 1, "kill"], [5, 0, "wait lost"], [5, 1, "wait never"]]
    words = [peer_train.__file__, tmp_path / "run", 7, json.dumps(accidents)]
    with agents(tmp_path) as started:
        started.append(first := Agent(tmp_path, "one", options, words))
        first.wait_for("trained 0 on 1")
        second = joined(tmp_path, started, options, words)
        first.wait_for("trained 4 on 2")
        first.wait_for("saved 4")
        second.process.kill()
        (tmp_path / "lost").touch()
        assert first.wait() == 0, first.text
    same_as_undisturbed(tmp_path, 7)
    # No step was lost, and none but the first is on disk.
    assert re.findall(r"trained \d on \d", first.text) == [
        f"trained {step} on {2 if step in (2, 3, 4) else 1}" for step in range(7)
    ]
    assert [path.name for path in (tmp_path / "run").iterdir() if path.is_dir()] == ["step-0"]
