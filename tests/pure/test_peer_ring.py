"""Which hosts hold whose copies, and what is chosen from what is left of them."""

from __future__ import annotations

import itertools

import pytest

from fullshard.checkpoint.newest import choose
from fullshard.checkpoint.peer_reports import Described
from fullshard.elastic.peer_ring import ring


def _spots(names: str) -> list[tuple[str, str]]:
    return [(name, f"keeper of {name}") for name in names]


@pytest.mark.parametrize("names", ["ab", "aabb", "abab", "aaab", "abc", "aabbcc", "abcabc", "aaabbc", "abcd"])
@pytest.mark.parametrize("peers", [1, 2])
def test_any_so_many_hosts_may_be_lost(names: str, peers: int) -> None:
    arranged = ring(_spots(names), peers)
    hosts = sorted(set(names))
    for lost in itertools.combinations(hosts, min(peers, len(hosts) - 1)):
        for rank, name in enumerate(names):
            holding = {name, *(names[target] for target in arranged.targets[rank])}
            assert holding - set(lost), f"rank {rank} of {names} without {lost}"
    held = [target for targets in arranged.targets for target in targets]
    per_host = {name: names.count(name) for name in hosts}
    if len(set(per_host.values())) == 1:  # as many on each: all hold as many
        assert {held.count(rank) for rank in range(len(names))} == {min(peers, len(hosts) - 1)}


def test_one_agent_holds_one_copy_and_two_agents_of_a_host_hold_each_others() -> None:
    alone = ring([("a", "x")] * 3, 1)
    assert alone.pairs() == []
    assert "not from a lost host" in alone.note
    two = ring([("a", "x"), ("a", "y")], 1)
    assert two.pairs() == [(0, 1), (1, 0)]
    assert "not from a lost host" in two.note
    assert ring(_spots("ab"), 1).note == ""
    assert "there are 2 hosts" in ring(_spots("ab"), 2).note


def _copy(step: int, rank: int, confirmed: bool = True, ranks: int = 2) -> Described:
    return Described(f"/run/step-{step}", f"id{step}", step, rank, ranks, {}, (0, 0), 0, confirmed)


def test_newest_that_is_complete_is_chosen_and_a_loss_is_named() -> None:
    complete = [[_copy(3, 0), _copy(3, 1)], [_copy(3, 1)]]
    assert choose(complete, ("step-2", 2)).name == "step-3"
    assert choose(complete, ("step-4", 4)).name == "step-4"
    assert choose([[], []], None).name is None
    # The save of step 5 was interrupted: nothing is lost. Of step 3, which was complete, rank 1 is.
    left = [[_copy(5, 0, confirmed=False), _copy(3, 0)], []]
    chosen = choose(left, ("step-2", 2))
    assert (chosen.name, chosen.in_memory) == ("step-2", False)
    [loss] = chosen.losses
    assert "all copies of rank 1 (of 2) are lost" in loss
    assert "Training goes on from 'step-2', which is on disk." in loss
    assert "training begins anew" in choose(left, None).losses[0]
