"""What all tests share: the test modules find each other, and a failing test leaves no rank behind."""

from __future__ import annotations

import gc
import importlib.util
import itertools
import os
import posix
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

HERE = Path(__file__).resolve().parent
# Tests are in folders by what they need; some take a model or a check from another folder's file.
for folder in (*sorted(HERE.glob("[a-z]*")), HERE.parent / "src"):
    if folder.is_dir() and str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

# For every connection to a store torch asks the name server for this host's name, and a lost packet costs the
# resolver's five seconds: here that was every hundredth start of ranks.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:2")

import ranks  # noqa: E402 (found by the paths above)
import warm  # noqa: E402

gc.disable()  # until the tests are collected: imports leave little garbage
gc.set_threshold(10_000)
warm.session()  # before pytest-xdist starts its workers, which share this one's servers

if "PYTEST_XDIST_WORKER" in os.environ:  # forked, see below: its own processes are to be real ones
    sys.executable = sys.orig_argv[0]
    os.getppid = posix.getppid


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs: list[Any]) -> None:
    """Workers are forked from a process that has imported what tests import, ten seconds of it."""
    library = "lightning" if importlib.util.find_spec("lightning") else ""
    for spec in specs:
        spec.python = f"{warm.commands(library)}/python"


# Nothing depends on the speed of the machine, nor on chance: the examples are the same in every run.
settings.register_profile(
    "any machine", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")

# The ranks share the machine's cores with this process; small tensors gain nothing from more threads.
torch.set_num_threads(1)

# Files by what they take, the longest first: of those begun last, one would run on alone (`--dist loadfile`).
LONGEST_FIRST = """
    hangs documents plan_command hangs_across_hosts numbers nodes tensor_parallel_use small_models
    low_bit_state owned_step checkpoint_hugging_face optimizers checkpoint_any train_command
    checkpoint_failures checkpoint_crash activation_offload doctor_zoo doctor plan_offload cli_launch
    onnx inference_generate examples resume offload flight_recorder checkpoint_command blocks
    checkpoint_dcp checkpoint_optimizers behaviours tensor_parallel zoo hf_options train hf_trainer
    inference penalties memory checkpoint_fuzz writes_in_forward wire offload_use hostile_files
    operations_under_way torch_fsdp2 torch_fsdp2_modules offload_torch_fsdp lightning_checkpoints
    blocks_calls doctor_command
"""


def pytest_collection_finish() -> None:
    gc.freeze()  # a million objects of modules and tests, which a collection need not walk every time
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {f"test_{name}": number for number, name in enumerate(LONGEST_FIRST.split())}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))


# What is remembered of links and devices is not this user's, nor another test's.
CACHES = itertools.count()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    os.environ["XDG_CACHE_HOME"] = f"{warm.session()}/cache-{os.getpid()}-{next(CACHES)}"
    ranks.seed()


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    """A test that shards in this very process, say, would leave the next one a world of one."""
    before = ranks.Settings()
    yield
    before.restore()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
