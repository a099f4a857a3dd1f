"""`fullshard plan` with offload: what rests where, what a step moves, and what would fit if it does not."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from test_plan_command import GIB, asked, main
from torch import nn

import fullshard as fs
from fullshard.byte_sizes import parse_size
from fullshard.plan.homes import SMALLEST_CHUNK, slab_sets
from fullshard.planning.subjects import Batch, find

SMALL = ("gpt2-medium", "--sequence", "64", "--ranks", "2", "--strategy", "zero3")
PARAMETERS = 354_823_168


def homes(found: dict[str, Any], strategy: str = "zero3") -> dict[str, dict[str, int]]:
    value: dict[str, dict[str, int]] = found["strategies"][strategy]["homes"]
    return value


def test_the_command_plans_the_homes_that_fs_plan_has() -> None:
    model = find("gpt2-medium", Batch(1, 64)).build()
    for how in ("host", "optimizer"):
        code, found = asked(*SMALL, "--offload", how)
        assert code == 0
        plan = fs.plan(model.to(torch.float32), ranks=2, precision="bf16", offload=how)
        assert plan.resting is not None
        for place, kinds in homes(found).items():
            for kind, num_bytes in kinds.items():  # on a GPU other units are merged, and padded
                planned = plan.resting.bytes_at(place, kind)  # type: ignore[arg-type]
                assert num_bytes == pytest.approx(planned, rel=0.001), (how, place, kind)


@pytest.mark.parametrize(
    ("forms", "each", "in_slabs"),
    [((), 18, 18), (("--split-masters",), 16.125, 20.125)],  # and where masters are joined
    ids=["plain", "split"],
)
def test_values_take_18_bytes_per_parameter_and_slabs_a_chunk_of_them(
    forms: tuple[str, ...], each: float, in_slabs: float
) -> None:
    _, found = asked(*SMALL, "--offload", "host", *forms)
    one, count = found["strategies"]["zero3"], found["parameters"]
    assert one["host_bytes"] == pytest.approx(each * count, rel=0.001)
    assert one["rest_bytes"] == 0
    _, alone = asked(*SMALL, "--offload", "host", "--ranks", "1", *forms)
    assert alone["strategies"]["zero3"]["slab_bytes"] == slab_sets(SMALLEST_CHUNK) * in_slabs * SMALLEST_CHUNK
    parts = ("rest_bytes", "slab_bytes", "full_bytes", "sending_bytes", "activation_bytes")
    assert one["peak_bytes"] == sum(one[part] for part in parts)


def test_a_step_moves_every_value_at_the_rate_of_its_link() -> None:
    _, found = asked(*SMALL, "--offload", "host", "--host-link", "10GB/s")
    one = found["strategies"]["zero3"]
    moved, each = one["moved_bytes_per_step"], PARAMETERS / 2
    assert moved["pass_down"] == pytest.approx(4 * each, rel=0.001)
    assert 2 * each * 0.999 < moved["pass_up"] < 4 * each * 1.001  # some units are gathered once
    assert moved["step_up"] == pytest.approx(16 * each, rel=0.001)
    assert moved["step_down"] == pytest.approx(14 * each, rel=0.001)
    assert one["step_transfer_s"] == pytest.approx(each * (14 * 5.5 / 5 + 2) / 10e9, rel=0.001)
    _, faster = asked(*SMALL, "--offload", "host", "--host-link", "20GB/s")
    assert faster["strategies"]["zero3"]["step_transfer_s"] == pytest.approx(one["step_transfer_s"] / 2)
    _, optimizer = asked(*SMALL, "--offload", "optimizer")
    moved = optimizer["strategies"]["zero3"]["moved_bytes_per_step"]
    assert moved["pass_up"] == moved["pass_down"] == 0
    assert moved["step_up"] == pytest.approx(12 * each, rel=0.001)
    assert moved["step_down"] == pytest.approx(12 * each, rel=0.001)
    _, split = asked(*SMALL, "--offload", "host", "--split-masters")
    moved = split["strategies"]["zero3"]["moved_bytes_per_step"]
    assert moved["step_up"] == pytest.approx(16.125 * each, rel=0.001)
    assert moved["step_down"] == pytest.approx(12.125 * each, rel=0.001)
    _, split = asked(*SMALL, "--offload", "optimizer", "--split-masters")
    moved = split["strategies"]["zero3"]["moved_bytes_per_step"]
    assert moved["step_up"] == moved["step_down"] == pytest.approx(10.125 * each, rel=0.001)
    _, plain = asked(*SMALL, "--offload", "host", "--optimizer", "sgd")
    moved = plain["strategies"]["zero3"]["moved_bytes_per_step"]
    assert moved["step_up"] == pytest.approx(8 * each, rel=0.001)


def test_the_smallest_memory_of_a_host_that_is_named_is_enough_and_less_is_not() -> None:
    said = (*SMALL, "--offload", "host")
    code, found = asked(*said, "--host-memory", "1.5GiB")
    assert code == 1
    advice = " ".join(found["advice"])
    host = re.search(r"the 2 ranks of a host would need --host-memory ([\w.]+)\.", advice)
    disk = re.search(r"With --disk ([\d.]+[GM]iB)", advice)
    ranks = re.search(r"zero3 fits on (\d+) ranks or more", advice)
    assert host
    assert ranks
    assert disk is None  # gradients and compute shards alone take more
    less = f"{parse_size(host[1], '', '') * 0.95 / 1e9:.3f}GB"
    assert [asked(*said, "--host-memory", size)[0] for size in (host[1], less)] == [0, 1]
    more = [*said, "--host-memory", "1.5GiB", "--node-ranks", "2"]
    fewest = int(ranks[1])
    more[more.index("--ranks") + 1] = str(fewest)
    assert asked(*more)[0] == 0
    more[more.index("--ranks") + 1] = str(fewest - 2)
    assert asked(*more)[0] == 1


def test_what_the_host_cannot_hold_goes_to_a_disk_of_the_named_size() -> None:
    said = (*SMALL, "--offload", "host", "--host-memory", "4GiB")
    code, found = asked(*said)
    assert code == 1
    (disk,) = re.findall(r"With --disk ([\d.]+[GM]iB)", " ".join(found["advice"]))
    code, found = asked(*said, "--disk", disk)
    assert code == 0
    one = found["strategies"]["zero3"]
    assert one["host_bytes"] <= 4 * GIB * 0.92
    on_disk = sum(homes(found)["disk"].values())
    assert on_disk > 0
    assert one["disk_bytes"] == 2 * 2 * on_disk
    read = on_disk * 2 / 3.7e9 + on_disk * 2 / 1.8e9
    assert one["step_transfer_s"] == pytest.approx(read, rel=0.001)
    code, found = asked(*said, "--disk", "1MiB")
    assert code == 1
    assert f"would need --disk {disk}" in found["advice"][0]


def test_a_host_and_a_disk_that_are_both_too_small_are_told_of_sizes_that_are_enough_together() -> None:
    said = (*SMALL, "--offload", "host")
    code, found = asked(*said, "--host-memory", "2GiB", "--disk", "1MiB")
    assert code == 1
    ((host, disk),) = re.findall(r"would need --host-memory (\S+) and --disk (\S+)\.", found["advice"][0])
    assert asked(*said, "--host-memory", host, "--disk", disk)[0] == 0
    assert asked(*said, "--host-memory", host, "--disk", "1MiB")[0] == 1


def test_buffers_of_a_disk_are_planned_within_the_memory_of_the_host() -> None:
    """16 for reading and 16 for writing, of a chunk of fp32 values each."""
    _, found = asked(*SMALL, "--offload", "host", "--host-memory", "4GiB", "--disk", "1TiB")
    one = found["strategies"]["zero3"]
    assert one["disk_buffer_bytes"] == pytest.approx(32 * 4 * SMALLEST_CHUNK, rel=0.001)
    together = one["host_bytes"] + 2 * one["disk_buffer_bytes"]
    assert 0.9 * 4 * GIB * 0.92 < together <= 4 * GIB * 0.92
    code, out, _ = main(*SMALL, "--offload", "host", "--host-memory", "4GiB", "--disk", "1TiB")
    assert code == 0
    assert "Buffers between disk and device take 0.500 of host memory per rank." in out
    code, found = asked(*SMALL, "--offload", "host", "--host-memory", "2GiB", "--disk", "1TiB")
    assert code == 1
    (enough,) = re.findall(r"would need --host-memory ([\d.]+[GM]iB)", " ".join(found["advice"]))
    code, found = asked(*SMALL, "--offload", "host", "--host-memory", enough, "--disk", "1TiB")
    assert code == 0
    _, enough = asked(*SMALL, "--offload", "host", "--host-memory", "64GiB", "--disk", "1TiB")
    assert enough["strategies"]["zero3"]["disk_buffer_bytes"] == 0


@pytest.mark.parametrize(
    "more", [("--offload", "optimizer", "--disk", "1TiB"), ("--offload-activations", "--batch", "16")]
)
def test_a_host_without_room_for_buffers_or_inputs_of_blocks_is_too_small_though_nothing_rests_there(
    more: tuple[str, ...],
) -> None:
    code, found = asked(*SMALL, *more, "--host-memory", "2MiB")
    assert code == 1
    (enough,) = re.findall(r"would need --host-memory ([\d.]+[GM]iB)", " ".join(found["advice"]))
    assert asked(*SMALL, *more, "--host-memory", enough)[0] == 0


def test_auto_fills_the_device_and_not_more() -> None:
    said = (*SMALL, "--memory", "3.3GiB")
    assert asked(*said)[0] == 1
    code, found = asked(*said, "--host-memory", "64GiB")
    assert code == 0
    one, room = found["strategies"]["zero3"], found["room_bytes"]
    assert 0.9 * room < one["peak_bytes"] <= room
    assert sum(homes(found)["host"].values()) > 0
    _, everything = asked(*said, "--host-memory", "64GiB", "--offload", "host")
    assert one["step_transfer_s"] < 0.9 * everything["strategies"]["zero3"]["step_transfer_s"]
    _, enough = asked(*SMALL, "--memory", "80GiB", "--host-memory", "64GiB")
    assert not any(homes(enough)["host"].values())


def test_without_offload_a_model_that_does_not_fit_is_told_what_offload_needs() -> None:
    code, out, _ = main(*SMALL, "--memory", "3GiB")
    assert code == 1
    (line,) = [line for line in out.splitlines() if line.startswith("With --offload host zero3 fits")]
    host = re.search(r"and ([\d.]+) GiB of host memory for the 2 ranks of a host", line)
    assert host
    code, out, _ = main(*SMALL, "--memory", "3GiB", "--offload", "host", "--host-memory", f"{host[1]}GiB")
    assert code == 0
    assert "slabs" in out
    assert "In a script: fs.shard(model, strategy='zero3', precision='bf16', offload=fs.Offload(host=" in out
    code, found = asked(*SMALL)
    assert code == 0
    assert found["offload"] is None
    assert "homes" not in found["strategies"]["zero3"]


def test_a_rate_of_computing_gives_a_time_per_step_and_tokens_that_hide_transfers() -> None:
    _, out, _ = main(*SMALL, "--offload", "host", "--flops", "1TFLOP/s")
    assert "Computing takes" in out
    assert "a step takes at least" in out
    assert "At 1 TFLOP/s per rank, forward and backward compute for longer than they move" in out
    _, out, _ = main(*SMALL, "--offload", "host")
    assert "a step takes at least" not in out
    assert "At 100 TFLOP/s per rank" in out


def least_s(*arguments: str) -> float:
    _, out, _ = main(*SMALL, "--offload", "optimizer", "--flops", "1TFLOP/s", *arguments)
    found = re.search(r"a step takes at least ([\d.]+) s", out)
    assert found
    return float(found[1])


def test_a_step_beside_the_forward_and_with_slabs_beside_backward_takes_less() -> None:
    link = ("--host-link", "10GB/s")
    complete, overlap = least_s(*link), least_s(*link, "--overlap")
    slabs = [least_s(*link, "--overlap", "--slabs", size) for size in ("64MiB", "1GiB", "2GiB", "20GiB")]
    assert complete > overlap > slabs[0] > slabs[1] == slabs[2] == slabs[3]
    moving = least_s("--host-link", "10GB/s", "--overlap", "--slabs", "20GiB", "--flops", "1000TFLOP/s")
    assert slabs[3] == moving, "the link is busy all the time"


def test_slabs_that_were_requested_are_planned_and_written_down() -> None:
    said = (*SMALL, "--offload", "optimizer", "--overlap")
    _, least = asked(*said)
    _, found = asked(*said, "--slabs", "3GiB")
    slabs = [each["strategies"]["zero3"]["slab_bytes"] for each in (least, found)]
    assert slabs[0] < 0.5 * GIB
    assert 2.5 * GIB < slabs[1] <= 3 * GIB
    peaks = [each["strategies"]["zero3"]["peak_bytes"] for each in (least, found)]
    assert peaks[1] - peaks[0] == slabs[1] - slabs[0]
    _, out, _ = main(*said, "--slabs", "3GiB", "--host-memory", "64GiB")
    assert 'overlap=True, slabs="3.0GiB"' in out
    code, out, _ = main(*said, "--slabs", "3GiB", "--memory", "3GiB", "--checkpoint-activations")
    assert code == 1
    assert "Without --slabs zero3 fits here" in out


def test_the_line_for_a_script_shards_a_model_as_it_was_planned() -> None:
    forms = ("--one-backward", "--split-masters", "--overlap", "--slabs", "1GiB", "--checkpoint-activations")
    said = ("gpt2", "--sequence", "64", "--ranks", "1", "--strategy", "zero3", "--host-memory", "64GiB")
    code, out, _ = main(*said, *forms)
    assert code == 0
    (line,) = [line for line in out.splitlines() if line.startswith("In a script: ")]
    given = re.fullmatch(r"In a script: fs\.shard\(model, (.*)\)", line)
    assert given
    options = eval(f"dict({given[1]})", {"fs": fs})
    model = fs.shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), **options)
    model(torch.ones(2, 8)).sum().backward()
    assert options["checkpoint_activations"] is True
    assert options["offload"].one_backward
    code, _, err = main(*said, "--one-backward", "--accumulate")
    assert code == 2
    assert "Give --strategy zero1 or replicate" in err


def test_the_line_for_a_script_gives_a_host_beside_a_disk_no_more_than_was_planned() -> None:
    said = (*SMALL, "--ranks", "1", "--spare", "0", "--disk", "9GiB")
    code, out, _ = main(*said, "--memory", "8GiB", "--offload", "optimizer", "--host-memory", "2.56GiB")
    assert code == 0
    (line,) = (line for line in out.splitlines() if line.startswith("In a script: "))
    options = eval(f"dict({line.removeprefix('In a script: fs.shard(model, ')}", {"fs": fs, "FOLDER": "run"})
    assert 2.0 * GIB <= options["offload"].host <= 2.06 * GIB  # beside buffers
    model = find("gpt2-medium", Batch(1, 64)).build()
    resting = fs.plan(model.to(torch.float32), ranks=1, **options).resting
    assert resting is not None
    assert 1.9 * GIB < resting.host_bytes <= 2.06 * GIB
    assert resting.disk_bytes


def test_one_backward_that_does_not_fit_is_told_of_several_ranks() -> None:
    said = (*SMALL, "--ranks", "1", "--offload", "optimizer", "--one-backward")
    code, out, _ = main(*said, "--memory", "2GiB")
    assert code == 1
    assert "Without --one-backward, which is for one rank, zero3 fits on" in out


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (("--disk", "2TiB"), "--disk is for --offload"),
        (("--host-link", "25GB/s"), "--host-link is for --offload"),
        (("--offload", "host", "--disk", "2TiB"), "Give --host-memory."),
        (("--offload", "cpu"), "Choose one of host, optimizer, auto"),
        (("--host-memory", "512"), "Write it as 512GiB or 2TB."),
        (("--offload", "host", "--host-link", "fast"), "is not a bandwidth"),
        (("--offload", "host", "--host-link", "0GB/s"), "Give a bandwidth above 0"),
        (("--offload", "host", "--disk-link", "0GB/s"), "Give a bandwidth above 0"),
        (("--offload", "host", "--flops", "fast"), "Write it as 400TFLOP/s."),
        (("--overlap",), "--overlap is for --offload"),
        (("--slabs", "2GiB"), "--slabs is for --offload"),
        (("--offload", "host", "--slabs", "2GiB"), "Give --overlap as well."),
        (("--offload", "host", "--overlap", "--slabs", "2"), "Write it as 8GiB."),
        (("--offload", "host", "--overlap", "--choose"), "Leave it out here"),
    ],
)
def test_a_wrong_request_for_offload_is_refused(arguments: tuple[str, ...], answer: str) -> None:
    code, _, err = main(*SMALL, *arguments)
    assert code == 2
    assert answer in err


def test_one_rank_chooses_to_gather_units_from_the_host_and_a_disk_takes_the_rest() -> None:
    said = ("gpt2-medium", "--sequence", "64", "--ranks", "1", "--gpu", "rtx4090", "--choose")
    code, plenty = asked(*said, "--memory", "20GiB", "--host-memory", "64GiB", "--batch", "1")
    assert code == 0
    assert (plenty["settings"]["strategy"], plenty["settings"]["offload"]) == ("zero2", None)
    few = (*said, "--memory", "2.1GiB", "--batch", "1")
    code, on_host = asked(*few, "--host-memory", "64GiB")
    assert code == 0
    assert on_host["settings"]["strategy"] == "zero3"  # full values of all units would not fit
    assert "disk" not in on_host["settings"]["offload"]
    code, out, err = main(*few, "--host-memory", "3GiB")
    assert (code, err) == (1, "")
    assert "of host memory on each host.\nUse more hosts, hosts with more memory, or a disk" in out
    code, on_disk = asked(*few, "--host-memory", "3GiB", "--disk", "64GiB")
    assert code == 0
    assert on_disk["settings"]["offload"]["disk"] == "fullshard-offload"
    assert "bound by the disk" in on_disk["why"]
    assert on_disk["step_s"] > on_host["step_s"]
