"""Which units stay full inside fs.inference, and how much memory a rank may take for them."""

from __future__ import annotations

import os

import pytest
import torch

from fullshard import environment
from fullshard.engine.inference import chosen


@pytest.mark.parametrize(
    ("budget", "free", "want"),
    [
        (100, set(), {0, 1, 2, 3}),
        (39, set(), {0, 3}),
        (40, set(), {0, 1, 2, 3}),
        (20, set(), {0}),
        (20, {2}, {0, 2}),
        (9, set(), set()),
        (0, {0, 1, 2, 3}, {0, 1, 2, 3}),
    ],
)
def test_root_and_last_units_stay_and_room_is_left_for_one_that_comes_and_goes(
    budget: int, free: set[int], want: set[int]
) -> None:
    assert chosen([5, 15, 10, 10], {0, 1, 2, 3}, free, budget) == want


def test_units_outside_the_module_do_not_stay() -> None:
    assert chosen([5, 15, 10, 10], {1, 3}, set(), 100) == {1, 3}
    assert chosen([5, 15, 10, 10], {1, 3}, {0}, 24) == {0}


def test_ranks_of_a_host_share_what_is_free_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    monkeypatch.setattr(environment, "_host_free", lambda: 1000)
    monkeypatch.setattr(environment, "_container_free", lambda: [2000])
    monkeypatch.setattr(environment, "launch", lambda: environment.Launch(local_ranks=4))
    assert environment.free_bytes(device) == 250
    monkeypatch.setattr(environment, "_container_free", lambda: [2000, -8])
    assert environment.free_bytes(device) == 0


def test_what_is_free_here_is_less_than_there_is() -> None:
    most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < environment.free_bytes(torch.device("cpu")) < most
