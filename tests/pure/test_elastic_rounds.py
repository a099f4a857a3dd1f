"""What follows from how a round of an elastic run ended, and which messages agents accept."""

from __future__ import annotations

import socket

import pytest

from fullshard.elastic.links import Link, Message, Refused, key_of
from fullshard.elastic.rounds import STRIKES, Ending, History, Limits, cause, shares
from fullshard.errors import OptionError


def ended(rank: int, code: int, error: str = "", **more: object) -> Ending:
    return Ending(rank, "here", code, error, place=rank, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text", ["", ":", "2:", ":4", "4:2", "0:2", "0", "-1:2", "1:2:3", "a:b", "1.5:2", "²:4"]
)
def test_limits_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(OptionError, match="--elastic"):
        Limits.parse(text)


def test_limits_are_two_numbers_or_one() -> None:
    assert Limits.parse("2:8") == Limits(2, 8)
    assert Limits.parse("4") == Limits(4, 4)


def test_hosts_get_ranks_in_the_order_in_which_they_came_up_to_max() -> None:
    assert shares([4, 4], Limits(2, 6)) == [4, 2]
    assert shares([4, 4, 4], Limits(2, 8)) == [4, 4, 0]
    assert shares([1], Limits(2, 8)) is None


def test_the_cause_is_who_was_killed_or_the_first_error_of_its_own() -> None:
    stalled = ended(0, 1, "Stalled: rank 0: rank 1 has exited", at_s=1.0)
    assert cause([stalled, ended(1, -9, at_s=2.0)]) == ended(1, -9, at_s=2.0)
    assert cause([stalled, ended(1, 1, "ValueError: no", at_s=2.0)]) == ended(
        1, 1, "ValueError: no", at_s=2.0
    )
    assert cause([ended(0, 0), ended(1, -15, stopped=True)]) is None
    assert cause([ended(0, 0, left=True), ended(1, 1, left=True)]) is None


def test_the_same_error_twice_in_a_step_ends_the_run_whatever_its_numbers_are() -> None:
    history = History()
    assert history.after(1, ended(1, 1, "ValueError: at 0x7f01, rank 1", step=5), True).exit_code is None
    assert history.after(2, ended(1, 1, "KeyError: 3", step=5), False).exit_code is None
    assert history.after(3, ended(1, 1, "ValueError: at 0x7f01, rank 1", step=6), True).exit_code is None
    verdict = history.after(4, ended(0, 1, "ValueError: at 0x9a77, rank 0", step=5), False)
    assert verdict.exit_code == 1
    assert "step 5 failed twice with the same error (rounds 1 and 4)" in verdict.text


def test_a_segmentation_fault_is_an_error_and_a_kill_is_none() -> None:
    history = History()
    assert history.after(1, ended(0, -11, step=3), True).exit_code is None
    assert history.after(2, ended(0, -11, step=3), False).exit_code == 128 + 11
    history = History()
    for number in range(20):
        assert history.after(number, ended(0, -9, step=3), True).exit_code is None


def test_a_place_is_left_empty_after_losses_without_a_new_step_and_fruitless_rounds_end() -> None:
    history = History(max_fruitless=4)
    verdicts = [history.after(number, ended(1, -9), False) for number in range(1, 6)]
    assert [verdict.without for verdict in verdicts[:STRIKES]] == [None, None, ("here", 1)]
    assert [verdict.exit_code for verdict in verdicts] == [None, None, None, None, 128 + 9]
    assert "5 rounds in a row ended without a new step" in verdicts[-1].text


def pair(first: str, second: str) -> tuple[Link, Link]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        return Link(client, key_of(first)), Link(listener.accept()[0], key_of(second))


def arrived(link: Link) -> list[Message]:
    found: list[Message] = []
    for _ in range(3):  # the challenge comes first
        link._socket.settimeout(10)
        if not found:
            link._socket.recv(1, socket.MSG_PEEK)
            found += link.receive()
    return found


def test_agents_accept_messages_of_their_own_run_and_no_others() -> None:
    for names in (("run", "run"), ("run", "another")):
        one, other = pair(*names)
        try:
            one.send(kind="hello", numbers=[1, 2])
            assert one.receive() is not None  # the challenge of the other, upon which the message is sent
            while one._held:
                one.receive()
            if names[0] == names[1]:
                assert arrived(other) == [{"kind": "hello", "numbers": [1, 2]}]
            else:
                with pytest.raises(Refused):
                    arrived(other)
        finally:
            one.close()
            other.close()
