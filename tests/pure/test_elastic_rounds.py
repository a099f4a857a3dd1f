"""What follows from how a round of an elastic run ended, which messages agents accept, and who leads."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest

from fullshard.elastic.groups import Answer, Asked, Group, Place, Role, Step, gives_way, next_step
from fullshard.elastic.links import Link, Message, Refused, key_of
from fullshard.elastic.lookout import ask, question
from fullshard.elastic.rounds import STRIKES, Ending, History, Limits, cause, offers_now, shares
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


def group(name: str, **more: object) -> Group:
    fields: dict[str, Any] = {"has_least": True, "number": 3, "ranks": 2, "at_endpoint": False}
    return Group(**{**fields, "limits": "2:3", **more, "name": name})


def test_of_two_groups_exactly_one_gives_way_and_never_the_one_that_trains_to_one_that_does_not() -> None:
    groups = [
        group("a"),
        group("b", number=4),
        group("c", number=9, ranks=1, has_least=False),
        group("d", ranks=3),
        group("e", at_endpoint=True),
        group("f", has_least=False, ranks=0),
    ]
    for one in groups:
        assert not gives_way(one, one)
        for other in groups:
            assert one is other or gives_way(one, other) != gives_way(other, one)
            assert one.has_least <= other.has_least or not gives_way(one, other)
    assert [one.name for one in sorted(groups)] == ["f", "c", "a", "e", "d", "b"]


def test_a_newcomer_with_other_limits_gives_way_to_the_run_however_many_ranks_it_has() -> None:
    run, newcomer = group("a", has_least=False), group("b", number=0, ranks=8, limits="2:4")
    assert gives_way(newcomer, run)
    assert not gives_way(run, newcomer)


A, B, C, D = (("192.0.2.1", 1), ("192.0.2.2", 2), ("192.0.2.3", 3), ("192.0.2.4", 4))


def leads(place: Place, name: str = "", **more: object) -> Asked:
    return Asked(place, Answer(Role.LEADS, name, group(name, **more)))


def follows(place: Place, leader: Place) -> Asked:
    return Asked(place, Answer(Role.FOLLOWS, "", None, "leader", leader))


def seeks(place: Place) -> Asked:
    return Asked(place, Answer(Role.SEEKS, ""))


def test_an_agent_that_was_cut_off_comes_back_to_a_leader_that_is_still_there() -> None:
    assert next_step([leads(A), follows(B, A)], [], {A}, patient=True) == A
    assert next_step([Asked(A), Asked(B)], [leads(D)], {A}, patient=True) == D  # at the endpoint, anew
    assert next_step([Asked(A), follows(B, D)], [], {A}, patient=True) == D  # whom it has never met
    both = [leads(A, "a", has_least=False, number=9), leads(B, "b")]
    assert next_step(both, [], {A}, patient=True) == B


def test_an_agent_leads_only_if_no_older_one_can_and_nobody_follows_a_leader_that_it_cannot_reach() -> None:
    gone, stands_still = Asked(A), Asked(A, silent=True)
    for lost in (gone, stands_still):
        assert next_step([lost], [seeks(C)], {A}, patient=True) is Step.TAKE_OVER
        assert next_step([lost, Asked(B)], [], {A}, patient=True) is Step.TAKE_OVER
        assert next_step([lost, seeks(B)], [], {A}, patient=False) is Step.WAIT
        assert next_step([lost], [follows(C, A)], {A}, patient=False) is Step.WAIT


def test_an_older_agent_that_stands_still_is_waited_for_but_not_for_ever() -> None:
    older = [Asked(A), Asked(B, silent=True)]
    assert next_step(older, [], {A}, patient=True) is Step.WAIT
    assert next_step(older, [], {A}, patient=False) is Step.TAKE_OVER


def test_answers_arrive_as_they_were_sent() -> None:
    for asked in (leads(A, "a"), follows(B, A), seeks(C)):
        assert asked.answer is not None
        assert Answer.of(json.loads(json.dumps(asked.answer.message()))) == asked.answer


def test_a_connection_that_the_system_accepts_for_a_process_that_stands_still_is_no_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:  # nobody accepts
        place = ("127.0.0.1", listener.getsockname()[1])
        assert ask(place, key_of("run"), question(), limit_s=0.2) == Asked(place, silent=True)
    assert ask(place, key_of("run"), question(), limit_s=0.2) == Asked(place)


def test_hosts_that_still_import_have_no_ranks_yet_unless_min_is_not_reached_without_them() -> None:
    assert offers_now([1, 1, 1], [True, True, False], Limits(2, 3)) == [1, 1, 0]
    assert offers_now([1, 1, 1], [True, False, False], Limits(2, 3)) == [1, 1, 1]
    assert offers_now([1, 1, 1], [True, True, False], Limits(2, 3), is_first=True) == [1, 1, 1]


def test_a_rank_that_could_not_say_why_it_ended_is_named_with_its_last_operation() -> None:
    doing = "gather of unit 'blocks.3' (forward, step 6, operation 41)"
    killed, lost = ended(1, -9, step=6, doing=doing), ended(1, -9, step=6, doing=doing, with_host=True)
    assert str(killed) == f"rank 1 on here was ended by SIGKILL in step 6, last in {doing}"
    assert str(lost) == f"rank 1 on here is lost, with its host in step 6, last in {doing}"
    raised = ended(1, 1, "ValueError: no", step=6, doing=doing)
    assert str(raised) == "rank 1 on here failed: ValueError: no in step 6"
    assert str(ended(1, -9, step=6)) == "rank 1 on here was ended by SIGKILL in step 6"
