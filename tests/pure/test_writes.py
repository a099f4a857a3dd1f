"""Which writes into parameters are noticed."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from fullshard.engine.writes import Writes, watch_data

watch_data()


def _watched() -> tuple[nn.Parameter, Writes]:
    parameter = nn.Parameter(torch.zeros(4))
    return parameter, Writes([parameter])


def test_a_write_through_data_is_noticed_though_nobody_holds_what_was_written() -> None:
    parameter, writes = _watched()
    assert not writes.seen()
    parameter.data.add_(1)
    gc.collect()
    assert writes.seen()
    writes.forget()
    assert not writes.seen()


def test_a_late_write_through_data_that_was_kept_is_noticed() -> None:
    parameter, writes = _watched()
    kept = parameter.data
    assert not writes.seen()
    kept.add_(1)
    assert writes.seen()
    writes.forget()
    assert not writes.seen()
    kept.add_(1)
    assert writes.seen()


@pytest.mark.parametrize(
    "view", [lambda data: data, lambda data: data.view(-1)], ids=["data", "a view of it"]
)
def test_a_write_through_data_that_was_kept_counts_though_it_is_let_go_at_once(view: Any) -> None:
    parameter, writes = _watched()
    kept = view(parameter.data)
    assert not writes.seen()
    kept.add_(1)
    del kept
    gc.collect()
    assert writes.seen()
    writes.forget()
    assert not writes.seen()


def test_reading_data_again_and_again_holds_no_memory() -> None:
    parameter, writes = _watched()
    alive = []
    for _ in range(3):
        alive.append(weakref.ref(parameter.data))
        assert not writes.seen()
    gc.collect()
    assert all(reference() is None for reference in alive)
    assert not writes.handed_out
