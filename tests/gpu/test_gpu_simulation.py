"""The simulated links of a GPU: a message takes its turn on each link that it uses, by the device's clock."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from fullshard.engine.wire import PlainWire
from fullshard.planning.network import Load
from fullshard.tools.simulation.wire import Intervals, Message

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
INSIDE = Load(inside_bytes=1, inside_s=4e-3, latency_s=1e-3)
ACROSS = Load(across_bytes=1, across_s=20e-3)
BOTH = Load(1, 1, 2e-3, 6e-3)


def _carried(loads: list[tuple[Load, str]], multiprocessors: int = 0) -> list[Intervals]:
    from fullshard.tools.simulation.cuda_wire import CudaWire

    wire = CudaWire(torch.device("cuda"), multiprocessors)
    nothing = torch.zeros(0, device="cuda")
    wire.now()
    wire.traffic.log = []
    messages = [Message("gather", load, group) for load, group in loads]
    for message in messages:
        wire.carry(message, nothing, nothing, None)
    torch.cuda.synchronize()
    return [wire.intervals(message) for message in messages]


@pytest.mark.parametrize("multiprocessors", [0, 8])
def test_messages_take_turns_on_the_links_that_they_use(multiprocessors: int) -> None:
    across, again, inside, both = _carried(
        [(ACROSS, "a"), (ACROSS, "b"), (INSIDE, "c"), (BOTH, "d")], multiprocessors
    )
    for found, load in ((across, ACROSS), (again, ACROSS), (inside, INSIDE), (both, BOTH)):
        seconds = {"inside": load.inside_s, "across": load.across_s}
        assert set(found) == {link for link, held in seconds.items() if held}
        for link, (start, stop) in found.items():
            assert stop - start == pytest.approx(seconds[link], abs=2e-6)
    # On one link one after the other, in the order in which the streams come to the device.
    for link, users in (("across", (across, again, both)), ("inside", (inside, both))):
        held = sorted(found[link] for found in users)
        assert all(later[0] >= earlier[1] - 1e-6 for earlier, later in pairwise(held))
    assert inside["inside"][0] < across["across"][1]  # another link: at the same time


def test_messages_of_one_group_begin_when_the_one_before_has_arrived() -> None:
    first, second = _carried([(INSIDE, "a"), (INSIDE, "a")])
    assert second["inside"][0] >= first["inside"][1] + INSIDE.latency_s - 1e-6


@pytest.mark.parametrize("rank", [0, 2])
def test_a_gather_in_place_fills_the_rows_of_the_other_ranks(rank: int) -> None:
    from fullshard.tools.simulation.cuda_wire import CudaWire

    wire = CudaWire(torch.device("cuda"))
    full = torch.zeros(4, 4096, device="cuda")
    full[rank] = torch.randn(4096, device="cuda")
    ticket = wire.carry(Message("gather", Load(0.0, 0.0, 0.0), "group"), full, full[rank], rank)
    wire.wait(ticket, None)
    assert torch.equal(full, full[rank].expand(4, -1))


def test_sums_in_the_dtype_of_the_wire_are_fp32_sums_rounded_once() -> None:
    wire = PlainWire(torch.bfloat16)
    for num_rows in (2, 4, 8):
        for dtype in (torch.bfloat16, torch.float16):
            rows = torch.randn(num_rows, 1_000_003, device="cuda", dtype=torch.float32).to(dtype)
            assert wire.rounds_once(rows, num_rows)
            narrow = wire.mean(rows, num_rows, torch.empty_like(rows[0]))
            wide = wire.mean(rows, num_rows, torch.empty_like(rows[0], dtype=torch.float32))
            assert torch.equal(narrow, wide.to(dtype))
