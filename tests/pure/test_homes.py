"""Where values rest under a budget: the device first, then the host, then the disk."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fullshard import api
from fullshard.byte_sizes import parse_size, size_option
from fullshard.errors import OffloadError, OptionError
from fullshard.offload import Offload, parse
from fullshard.plan.homes import (
    Budget,
    Free,
    LaneBytes,
    LaneHomes,
    Resting,
    budget_of,
    choose,
    chunk_of,
    slab_bytes,
    slab_sets,
    usage,
)
from fullshard.planning.request import Planning

CAST, PLAIN = LaneBytes(20, 40, 40, 80, 10), LaneBytes(40, 0, 40, 80, 10)
EVERYTHING = LaneHomes("host", "host", "host", "host")


@pytest.mark.parametrize("request_of", [Offload, Planning])
@pytest.mark.parametrize("disk", ["", "scratch\0", b"scratch", 3])
def test_a_disk_without_a_usable_name_is_refused(disk: Any, request_of: Any) -> None:
    with pytest.raises(OptionError, match="path of a folder"):
        request_of(disk=disk)


@pytest.mark.parametrize("request_of", [Offload, Planning])
def test_a_tilde_is_the_home_of_the_user(monkeypatch: pytest.MonkeyPatch, request_of: Any) -> None:
    monkeypatch.setenv("HOME", "/home/of/a/user")
    assert request_of(disk="~/run").disk == request_of(disk=Path("~/run")).disk == "/home/of/a/user/run"
    assert request_of(disk="a~b").disk == "a~b"


@pytest.mark.parametrize("kinds", [(), "state", ["state"], ("states",), (["state"],), None])
def test_kinds_that_there_are_not_are_refused_by_name(kinds: Any) -> None:
    with pytest.raises(OptionError, match="Give a tuple of compute, master, gradients, state"):
        Offload(kinds=kinds)


def test_without_a_limit_everything_stays_on_the_device() -> None:
    assert choose([CAST, PLAIN], Budget(None, None, False)) == [LaneHomes(), LaneHomes()]


def test_without_room_on_the_device_everything_rests_on_the_host() -> None:
    assert choose([CAST, PLAIN], Budget(0, None, False)) == [EVERYTHING, EVERYTHING]


def test_optimizer_state_leaves_the_device_first_and_the_shards_that_gathers_send_last() -> None:
    lanes = [CAST, CAST]
    assert choose(lanes, Budget(40, None, False)) == 2 * [LaneHomes("device", "host", "host", "host")]
    half = choose(lanes, Budget(40 + 80 + 20, None, False))
    assert half == [LaneHomes(state="host"), LaneHomes("device", "host", "device", "host")]
    assert choose(lanes, Budget(40 + 160, None, False)) == 2 * [LaneHomes(state="host")]


def test_kinds_that_may_not_move_stay() -> None:
    kinds = ("master", "state")
    assert choose([CAST, PLAIN], Budget(0, None, False, kinds)) == [
        LaneHomes("device", "host", "device", "host"),
        LaneHomes(state="host"),
    ]


def test_a_lane_that_is_not_offloaded_stays_and_takes_its_room() -> None:
    stays = replace(CAST, stays=True)
    assert choose([stays, CAST], Budget(0, None, False)) == [LaneHomes(), EVERYTHING]
    assert choose([CAST, stays], Budget(stays.total - stays.compute, None, False)) == [
        EVERYTHING,
        LaneHomes(),
    ]
    assert choose([CAST, stays], Budget(2 * stays.total, None, False)) == 2 * [LaneHomes()]
    assert choose([CAST, stays], Budget(0, 60, True))[1] == LaneHomes()


def test_what_the_host_cannot_hold_goes_to_disk_with_its_state_and_the_rest_does_not() -> None:
    one, other = choose([CAST, CAST], Budget(0, 180 + 60, True))
    assert one == EVERYTHING
    assert other == LaneHomes("host", "disk", "host", "disk")
    assert choose([PLAIN], Budget(0, 40, True)) == [LaneHomes("disk", "disk", "host", "disk")]


def test_what_is_on_the_device_alone_does_not_go_to_disk() -> None:
    """Its gradients would come to the host, and need more of it."""
    small = LaneBytes(2, 0, 2, 4, 1)
    homes = choose([CAST, CAST, small], Budget(8, 180 + 60, True))
    assert homes == [EVERYTHING, LaneHomes("host", "disk", "host", "disk"), LaneHomes()]


def test_kinds_that_may_not_move_count_in_the_budget_of_the_device() -> None:
    assert choose([CAST], Budget(80, None, False, ("state",))) == [LaneHomes(state="host")]
    assert choose([CAST], Budget(160, None, False, ("state",))) == [LaneHomes()]


def test_a_budget_that_cannot_be_met_is_an_error_that_says_by_how_much() -> None:
    with pytest.raises(OffloadError, match=r"a rank needs 180 B .*, 10 B more than the 170 B that it may"):
        choose([CAST], Budget(0, 170, False))
    with pytest.raises(OffloadError, match=r"the 4 ranks of a host need 240 B .*, 80 B more than the 160 B"):
        choose([CAST], Budget(0, 40, True, node_ranks=4))


@settings(deadline=None)
@given(
    st.lists(st.sampled_from([CAST, PLAIN, LaneBytes(10, 20, 0, 0, 5)]), min_size=1, max_size=9),
    st.integers(0, 1000),
    st.integers(0, 1000),
    st.booleans(),
    st.integers(1, 4),
)
def test_each_change_that_the_error_proposes_is_enough(
    lanes: list[LaneBytes], device: int, host: int, has_disk: bool, ranks: int
) -> None:
    budget = Budget(device, host, has_disk, node_ranks=ranks)
    try:
        choose(lanes, budget)
        return
    except OffloadError as error:
        text = str(error)
    written = re.findall(r"(host|device)='([\w.]+)'", text)
    proposed = {name: parse_size(value, name, "") for name, value in written}
    choose(lanes, replace(budget, host=proposed["host"] // ranks))
    if proposed["host"] < 1024:  # not rounded
        with pytest.raises(OffloadError):
            choose(lanes, replace(budget, host=proposed["host"] // ranks - 1))
    if "device" in proposed:
        choose(lanes, replace(budget, device=proposed["device"]))
    if "disk=FOLDER" in text:
        homes = choose(lanes, replace(budget, has_disk=True))
        assert f"with {size_option(2 * ranks * usage(lanes, homes)['disk'])} free" in text
    assert "as many hosts" not in text


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize(("host", "device"), [(7000, 0), (4000, 900), (1500, 3), (12_000, 0)])
def test_the_number_of_hosts_that_is_proposed_is_enough_and_one_less_is_not(
    strategy: str, precision: str, host: int, device: int
) -> None:
    """Also where parameters are small, and more ranks have more padding."""
    widths = (7, 31, 5, 64, 3)
    layers = [nn.Sequential(nn.Linear(a, b), nn.LayerNorm(b)) for a, b in pairwise(widths)]
    model = nn.Sequential(*layers)

    def planned(hosts: int) -> None:
        offload = Offload(host=host, device=device)
        api.plan(
            model, ranks=3 * hosts, node_ranks=3, strategy=strategy, precision=precision, offload=offload
        )

    with pytest.raises(OffloadError, match="times as many hosts, of as many ranks") as raised:
        planned(1)
    proposed = re.search(r"(\d+) times", str(raised.value))
    assert proposed is not None
    planned(int(proposed[1]))
    with pytest.raises(OffloadError):
        planned(int(proposed[1]) - 1)


@pytest.mark.parametrize(
    ("strategy", "one_backward"), [("replicate", False), ("hybrid", False), ("zero3", True)]
)
def test_more_hosts_are_not_proposed_where_a_rank_has_as_much_on_them_or_must_be_alone(
    strategy: str, one_backward: bool
) -> None:
    ranks = 1 if one_backward else 2
    offload = Offload(host=500, one_backward=one_backward)
    with pytest.raises(OffloadError, match="Any one of these is enough") as raised:
        api.plan(nn.Linear(8, 8), ranks=ranks, strategy=strategy, precision="bf16", offload=offload)
    assert "as many hosts" not in str(raised.value)


@given(
    st.lists(st.sampled_from([CAST, PLAIN, LaneBytes(10, 20, 0, 0, 5)]), min_size=1, max_size=9),
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
        assert (home.state == "disk") <= (home.master == "disk")


def test_sizes_are_taken_as_people_write_them() -> None:
    assert Offload(device="22GiB", host="90GB").device == 22 * 2**30
    assert Offload(host="90GB").host == 90 * 10**9
    assert parse(None) is None
    assert parse("auto") == Offload(device="auto", host="auto")


@pytest.mark.parametrize(
    "wrong",
    [
        {"device": -1},
        {"device": "much"},
        {"host": True},
        {"disk": 3},
        {"kinds": ("weights",)},
        {"chunk": 0},
        {"step": "cpu"},
        {"slabs": "auto", "overlap": True},
        {"slabs": "1GiB"},
    ],
    ids=str,
)
def test_a_wrong_value_is_refused_by_name(wrong: dict[str, object]) -> None:
    with pytest.raises(OptionError, match=next(iter(wrong))):
        Offload(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "ours"),
    [("cpu", "'host'"), (True, "'host'"), (False, "None"), ("none", "None"), ("nvme", "fs.Offload(disk=")],
)
def test_a_word_of_another_library_is_answered_with_ours(value: Any, ours: str) -> None:
    with pytest.raises(OptionError, match=re.escape(f"Did you mean {ours}")):
        parse(value)
    if isinstance(value, str):
        with pytest.raises(OptionError, match=re.escape(f"write fs.shard(offload={ours}")):
            Offload(device=value)


@pytest.mark.parametrize("wrong", [True, "gpu", 3])
def test_a_wrong_offload_is_refused(wrong: object) -> None:
    with pytest.raises(OptionError, match=r"Give None, one of 'host', 'optimizer', 'auto'"):
        parse(wrong)


@given(st.integers(0, 2**45))
def test_a_size_that_is_proposed_as_an_option_is_large_enough(num_bytes: int) -> None:
    proposed = parse_size(size_option(num_bytes), "host", "")
    assert num_bytes <= proposed <= num_bytes * 1.1
    assert num_bytes * 0.9 <= parse_size(size_option(num_bytes, at_most=True), "device", "") <= num_bytes


def test_ranks_of_one_host_share_its_budget_and_auto_leaves_room() -> None:
    free = Free(device=100 * 2**30, host=1000, node_ranks=4)
    assert budget_of(Offload(host=400), [CAST], 0, free) == Budget(0, 100, False, node_ranks=4)
    auto = budget_of(Offload(device="auto", host="auto", chunk=5), [CAST], 2**30, free)
    assert auto.host == 600
    slabs = slab_bytes([CAST], [EVERYTHING], 5, 2)
    assert slabs == 2 * 90, "there are two chunks"
    assert auto.device == int((99 * 2**30 - slabs) * 0.6)


def test_slabs_hold_a_chunk_of_the_largest_lane_that_is_streamed() -> None:
    frozen = LaneBytes(100, 200, 0, 0, 50)
    assert slab_bytes([CAST, PLAIN], [EVERYTHING, EVERYTHING], 1000, 4) == 4 * 180
    assert slab_bytes([CAST, PLAIN], [LaneHomes(), EVERYTHING], 1000, 4) == 4 * 160
    assert slab_bytes([CAST, frozen], [LaneHomes(), EVERYTHING], 1000, 4) == 0
    # A step on the host has there what does not rest there.
    assert slab_bytes([CAST], [EVERYTHING], 1000, 4, "host") == 0
    assert slab_bytes([CAST], [LaneHomes("device", "host", "device", "host")], 1000, 4, "host") == 4 * 60


def test_state_in_blocks_that_comes_from_elsewhere_takes_a_chunk_of_blocks_beside_its_slabs() -> None:
    lane = LaneBytes(1024, 2048, 2048, 2 * 520, 512, in_blocks=True)
    plain = Resting((lane,), (EVERYTHING,), Budget(0, None, False), 256)
    slabs = slab_bytes([lane], [EVERYTHING], 256, plain.slab_sets)
    assert plain.slab_bytes == slabs + 3 * 260, "one that is decoded, and two that were encoded"
    on_host = replace(plain, step="host")
    assert on_host.slab_bytes == slab_bytes([lane], [EVERYTHING], 256, on_host.slab_sets, "host")
    here = replace(plain, homes=(replace(EVERYTHING, state="device"),))
    assert here.slab_bytes == slab_bytes([lane], here.homes, 256, here.slab_sets)


def test_gradients_that_rest_as_computed_have_a_slab_in_the_dtype_of_the_step_wherever_they_rest() -> None:
    lane = LaneBytes(20, 40, 20, 80, 10)
    assert slab_bytes([lane], [EVERYTHING], 1000, 4) == 4 * (160 + 40)
    assert slab_bytes([lane], [LaneHomes(state="host")], 1000, 4) == 4 * (80 + 40)
    assert slab_bytes([lane], [LaneHomes()], 1000, 4) == 40


@pytest.mark.parametrize(
    ("num_elements", "chunk"),
    [(0, 4), (10**6, 4), (10**9, 4), (3_750_000_000, 8), (8 * 10**9, 16), (13 * 10**9, 32), (10**12, 32)],
)
def test_chunks_grow_with_what_steps_up_to_a_limit(num_elements: int, chunk: int) -> None:
    """A host that issues thousands of small chunks keeps a forward from beginning."""
    assert chunk_of(Offload(overlap=True), num_elements) == chunk * 2**20
    assert chunk_of(Offload(), num_elements) == min(8, chunk) * 2**20
    assert chunk_of(Offload(chunk=7), num_elements) == 7


def test_chunks_are_as_large_as_leaves_room_for_some_in_slabs() -> None:
    def chunk(slabs: str) -> int:
        return chunk_of(Offload(overlap=True, slabs=slabs), 10**9) // 2**20

    assert [chunk(slabs) for slabs in ("1MiB", "1GiB", "2GiB", "4GiB", "8GiB", "80GiB")] == [
        4,
        4,
        8,
        16,
        32,
        32,
    ]


def test_a_step_beside_backward_has_as_many_chunks_as_its_slabs_hold() -> None:
    chunk = 8 * 2**20
    one = slab_bytes([CAST], [EVERYTHING], chunk, 1)
    assert [slab_sets(chunk, one, n * one + 1, 50) for n in (0, 4, 5, 100)] == [4, 4, 5, 51]
    resting = Resting((CAST,) * 12, (EVERYTHING,) * 12, Budget(0, None, False), chunk, slabs=7 * one)
    assert resting.slab_bytes == 7 * one
    assert resting.share_ahead == 0.5
    assert replace(resting, slabs=100 * one).slab_bytes == 13 * one, "there are twelve chunks"
    assert replace(resting, slabs=None).share_ahead == 0
    assert slab_sets(chunk, 0, one) == slab_sets(chunk), "everything is on the device"
    free = Free(device=100 * 2**30, host=1000, node_ranks=1)
    given = Offload(device="auto", overlap=True, slabs="1GiB")
    assert budget_of(given, [CAST], 0, free).device == int((100 * 2**30 - 2 * 180) * 0.6)


def test_there_are_no_more_slabs_than_chunks() -> None:
    chunk = 8 * 2**20
    assert [slab_sets(chunk, num_chunks=count) for count in (0, 1, 2, 3, 4, 50)] == [2, 2, 2, 3, 4, 4]
    assert [slab_sets(chunk, 1, 8, count) for count in (0, 1, 2, 3, 7, 50)] == [2, 2, 3, 4, 8, 8]


def test_chunks_of_a_step_that_is_complete_take_the_same_memory_whatever_their_size() -> None:
    assert slab_sets(8 * 2**20) * 8 == slab_sets(4 * 2**20) * 4


def test_a_model_that_is_offloaded_and_computes_on_the_host_beside_a_gpu_is_warned_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    warn = api._warn_of_computing_on_the_host
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    warn(torch.device("cpu"))  # nothing else could be meant
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    warn(torch.device("cuda", 0))
    with pytest.warns(UserWarning, match="device='cuda'"):
        warn(torch.device("cpu"))
