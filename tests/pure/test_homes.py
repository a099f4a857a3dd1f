"""Where values rest under a budget: the device first, then the host, then the disk."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullshard.errors import OffloadError, OptionError
from fullshard.offload import Offload, parse
from fullshard.plan.homes import Budget, LaneBytes, LaneHomes, choose, usage

CAST, PLAIN = LaneBytes(20, 40, 40, 80), LaneBytes(40, 0, 40, 80)
EVERYTHING = LaneHomes("host", "host", "host", "host")


def test_without_a_limit_everything_stays_on_the_device() -> None:
    assert choose([CAST, PLAIN], Budget(None, None, False)) == [LaneHomes(), LaneHomes()]


def test_without_room_on_the_device_everything_rests_on_the_host() -> None:
    assert choose([CAST, PLAIN], Budget(0, None, False)) == [EVERYTHING, EVERYTHING]


def test_optimizer_state_leaves_the_device_first_and_the_shards_that_gathers_send_last() -> None:
    lanes = [CAST, CAST]
    assert choose(lanes, Budget(40, None, False)) == 2 * [LaneHomes("device", "host", "host", "host")]
    half = choose(lanes, Budget(40 + 80, None, False))
    assert half == [LaneHomes(state="host"), LaneHomes("device", "host", "host", "host")]
    assert choose(lanes, Budget(40 + 160, None, False)) == 2 * [LaneHomes(state="host")]


def test_kinds_that_may_not_move_stay() -> None:
    kinds = ("master", "gradients", "state")
    assert choose([CAST, PLAIN], Budget(0, None, False, kinds)) == [
        LaneHomes("device", "host", "host", "host"),
        LaneHomes(state="host"),
    ]


def test_a_lane_that_is_not_offloaded_stays_and_takes_its_room() -> None:
    stays = dataclasses.replace(CAST, stays=True)
    assert choose([stays, CAST], Budget(0, None, False)) == [LaneHomes(), EVERYTHING]
    assert choose([CAST, stays], Budget(stays.total, None, False)) == [EVERYTHING, LaneHomes()]
    assert choose([CAST, stays], Budget(2 * stays.total, None, False)) == 2 * [LaneHomes()]
    assert choose([CAST, stays], Budget(0, 60, True))[1] == LaneHomes()


def test_what_the_host_cannot_hold_goes_to_disk_with_its_state_and_the_rest_does_not() -> None:
    one, other = choose([CAST, CAST], Budget(0, 180 + 60, True))
    assert one == EVERYTHING
    assert other == LaneHomes("host", "disk", "host", "disk")
    assert choose([PLAIN], Budget(0, 40, True)) == [LaneHomes("disk", "disk", "host", "disk")]


def test_a_budget_that_cannot_be_met_is_an_error_that_says_by_how_much() -> None:
    with pytest.raises(OffloadError, match=r"need 10 B more host memory than the 170 B of a rank"):
        choose([CAST], Budget(0, 170, False))
    with pytest.raises(OffloadError, match=r"need 20 B more"):
        choose([CAST], Budget(0, 40, True))


@given(
    st.lists(st.sampled_from([CAST, PLAIN, LaneBytes(10, 20, 0, 0)]), min_size=1, max_size=9),
    st.integers(0, 2000),
    st.integers(0, 2000),
    st.booleans(),
)
def test_no_home_gets_more_than_its_budget(
    lanes: list[LaneBytes], device: int, host: int, has_disk: bool
) -> None:
    try:
        homes = choose(lanes, Budget(device, host, has_disk))
    except OffloadError:
        return
    used = usage(lanes, homes)
    assert used["device"] <= device
    assert used["host"] <= host
    assert has_disk or not used["disk"]
    for home in homes:
        assert home.gradients != "disk"
        assert (home.gradients == "device") == (home.master == "device")
        assert (home.state == "disk") <= (home.master == "disk")


def test_sizes_are_taken_as_people_write_them() -> None:
    assert Offload(device="22GiB", host="90GB").device == 22 * 2**30
    assert Offload(host="90GB").host == 90 * 10**9
    assert parse(None) is None
    assert parse("auto") == Offload(device="auto", host="auto")


@pytest.mark.parametrize(
    "wrong",
    [{"device": -1}, {"device": "much"}, {"host": True}, {"disk": 3}, {"kinds": ("weights",)}, {"chunk": 0}],
    ids=str,
)
def test_a_wrong_value_is_refused_by_name(wrong: dict[str, object]) -> None:
    with pytest.raises(OptionError, match=next(iter(wrong))):
        Offload(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [True, "gpu", 3])
def test_a_wrong_offload_is_refused(wrong: object) -> None:
    with pytest.raises(OptionError, match=r"Give None, one of 'host', 'optimizer', 'auto'"):
        parse(wrong)
