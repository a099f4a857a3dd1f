"""Predicted step times: against what one H200 measured on simulated clusters, and what they depend on."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fullshard.errors import OptionError
from fullshard.link_speeds import recall_rates, recall_speeds, remember_rates, remember_speeds, speeds_file
from fullshard.planning import choosing, rates
from fullshard.planning.answers import Question, need_of, step_of
from fullshard.planning.machines import CARDS, Machine, as_values, described, from_values
from fullshard.planning.needs import Step
from fullshard.planning.network import Link
from fullshard.planning.rates import machine_here, measured
from fullshard.planning.settings import Settings, seconds
from fullshard.planning.subjects import Batch, Subject, decoder
from fullshard.planning.times import Times
from fullshard.planning.work import Work
from fullshard.tools.simulation.presets import PRESETS

H200 = described("h200")
# ms/step, as fullshard simulate measured them on one H200: model and layers, ranks, GB/s of the link, ranks
# per node (400 GB/s inside), strategy.
MEASURED: dict[tuple[str, int, int, float, int | None, str], float] = {
    ("llama-8b", 8, 64, 300, None, "zero3"): 98.4,
    ("llama-8b", 8, 64, 50, None, "zero3"): 231.3,
    ("llama-8b", 8, 64, 6, None, "zero3"): 1831.2,
    ("llama-8b", 8, 64, 6, None, "zero2"): 1335.3,
    ("llama-8b", 8, 64, 50, 8, "zero3"): 99.6,
    ("llama-8b", 8, 64, 12, 8, "zero3"): 112.9,
    ("llama-8b", 8, 64, 6, 8, "zero3"): 159.5,
    ("llama-8b", 8, 64, 1, 8, "zero3"): 887.6,
    ("llama-8b", 8, 64, 50, 8, "zero2"): 98.0,
    ("llama-8b", 8, 64, 12, 8, "zero2"): 110.6,
    ("llama-8b", 8, 64, 6, 8, "zero2"): 159.2,
    ("llama-8b", 8, 64, 50, 4, "zero3"): 104.4,
    ("llama-8b", 8, 64, 6, 4, "zero3"): 324.2,
    ("llama-8b", 8, 64, 1, 4, "zero3"): 1892.5,
    ("llama-8b", 8, 16, 12, 8, "zero3"): 105.4,
    ("llama-8b", 8, 1024, 12, 8, "zero3"): 133.6,
    ("llama-1b", 16, 64, 300, None, "zero3"): 71.3,
    ("llama-1b", 16, 64, 300, None, "zero2"): 66.4,
    ("llama-70b", 4, 256, 50, None, "zero3"): 447.8,
}


@cache
def traced(name: str, layers: int) -> Step:
    subject = decoder(name, replace(PRESETS[name], layers=layers), Batch(1, 4096))
    return step_of(subject, Question(memory_bytes=2**40, optimizer="fused-adamw"))[0]


def predicted(
    step: Step,
    ranks: int,
    link: float,
    inner: int | None,
    strategy: str,
    launch_s: float = H200.device.launch_s,
    **more: Any,
) -> Times:
    across = Link(link * 1e9)
    machine = replace(
        H200,
        device=replace(H200.device, launch_s=launch_s),
        inside=across if inner is None else Link(400e9, 3.4e-6),
        across=across,
    )
    question = Question(
        **{"memory_bytes": 2**40, "machine": machine, "optimizer": "fused-adamw"} | more,
        ranks=ranks,
        node_ranks=inner,
        strategies=(strategy,),
    )
    times = need_of(step, question, strategy).times
    assert times is not None
    return times


def test_predicted_steps_are_within_a_tenth_of_measured_ones() -> None:
    wrong = {}
    for (name, layers, ranks, link, inner, strategy), ms in MEASURED.items():
        ratio = predicted(traced(name, layers), ranks, link, inner, strategy).step_s * 1e3 / ms
        if not 0.9 < ratio < 1.1:
            wrong[name, ranks, link, inner, strategy] = ratio
    assert not wrong


def test_a_faster_link_more_memory_and_fewer_gathers_never_take_longer() -> None:
    step = traced("llama-8b", 8)
    for inner in (None, 8):
        by_link = [predicted(step, 64, link, inner, "zero3").step_s for link in (1, 6, 12, 50, 300)]
        assert by_link == sorted(by_link, reverse=True)
    assert predicted(step, 64, 6, None, "zero2").step_s < predicted(step, 64, 6, None, "zero3").step_s
    alone = predicted(step, 1, 1, None, "zero3")
    assert alone.inside_s == alone.across_s == 0
    assert alone.step_s == pytest.approx(alone.compute_s)


def test_the_slow_link_is_what_a_step_is_bound_by() -> None:
    step = traced("llama-8b", 8)
    assert predicted(step, 64, 1, 8, "zero3").bound == "the link between nodes"
    assert predicted(step, 64, 1, None, "zero3").bound == "the link inside a node"  # the only one
    assert predicted(step, 64, 300, 8, "zero3").bound == "computing"


def test_where_the_host_is_the_limit_fewer_gathers_are_faster() -> None:
    """On an H200's host, at 41 us per launch: 56 ms for zero3, 6 ms less where units are gathered once."""
    step = traced("llama-1b", 16)
    zero3, zero2 = (predicted(step, 64, 300, None, s, launch_s=41e-6) for s in ("zero3", "zero2"))
    assert zero3.host_s == pytest.approx(0.056, rel=0.1)
    assert zero3.host_s - zero2.host_s == pytest.approx(0.006, rel=0.3)
    slow = [predicted(step, 64, 300, None, s, launch_s=1e-3) for s in ("zero3", "zero2")]
    assert [times.bound for times in slow] == ["launching kernels"] * 2
    assert [times.step_s for times in slow] == [times.host_s for times in slow]


def test_offloaded_masters_and_moments_take_the_time_of_their_link() -> None:
    """16 layers of 3.75 billion parameters, 8,192 tokens, on one H200: 1,280 ms; with split masters 1,150;
    without offload 323."""
    from fullshard.planning.offloading import Request

    subject = decoder("llama-8b", replace(PRESETS["llama-8b"], layers=16), Batch(2, 4096))
    step = step_of(subject, Question(memory_bytes=2**40, optimizer="fused-adamw"))[0]
    plain = predicted(step, 1, 1, None, "zero3")
    offloaded = predicted(step, 1, 1, None, "zero3", offload=Request("optimizer"))
    assert offloaded.step_s == pytest.approx(1.28, rel=0.1)
    split = predicted(step, 1, 1, None, "zero3", offload=Request("optimizer", split_masters=True))
    assert split.step_s == pytest.approx(1.15, rel=0.1)
    assert plain.step_s == pytest.approx(0.323, rel=0.15)
    assert offloaded.bound == "the link to host memory"


# --- work -------------------------------------------------------------------------------------------------


def own(model: nn.Module, batch: Any) -> Subject:
    def run(on_meta: nn.Module) -> tuple[torch.Tensor, Any]:
        out = on_meta(batch.to("meta"))
        return out.float().mean(), out

    return Subject("own", lambda: model.to("meta"), run, "its own batch", "the model")


def work_of(model: nn.Module, batch: torch.Tensor, recompute: bool = False) -> list[Work]:
    question = Question(memory_bytes=2**40, precision="fp32", recompute=recompute)
    step = step_of(own(model, batch), question)[0]
    return [work for moment in step.trace.moments for work in moment.work]


def test_products_are_counted_forward_and_backward() -> None:
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)) for _ in range(3)]
    found = work_of(nn.Sequential(*blocks), torch.zeros(32, 64))
    flop = sum(work.flop for work in found)
    forward = 3 * 2 * (2 * 32 * 64 * 256)
    assert flop == 3 * forward - 2 * 32 * 64 * 256  # the first block's input needs no gradient
    again = sum(work.flop for work in work_of(nn.Sequential(*blocks), torch.zeros(32, 64), True))
    assert again == flop + 3 * forward // 6  # a block's last product need not be computed again


def test_a_large_linear_whose_gradient_is_written_in_place_is_counted_too() -> None:
    blocks = [nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.ReLU()) for _ in range(2)]
    found = work_of(nn.Sequential(*blocks), torch.zeros(16, 1024))
    assert sum(work.flop for work in found) == 5 * 2 * 16 * 1024**2


def test_convolutions_and_attention_are_products() -> None:
    conv = work_of(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), torch.zeros(2, 3, 10, 10))
    forward = 2 * (2 * 8 * 8) * 8 * 27
    assert sum(work.flop for work in conv) == pytest.approx(2 * forward)  # of the weight alone in backward

    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x * self.scale
            return nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)

    attends = [work for work in work_of(Attends(), torch.zeros(1, 4, 64, 16)) if work.flop]
    assert [work.kind for work in attends] == ["attention", "attention backward"]
    assert attends[0].flop == 4 * 64 * 64 * 2 * 16 * 2 / 2


# --- machines ---------------------------------------------------------------------------------------------


def test_cards_are_known_by_the_names_that_people_write() -> None:
    for name in (
        "H100",
        "nvidia h100",
        "NVIDIA A100-80",
        "a100",
        "RTX 4090",
        "rtx-3090",
        "4090",
        "AMD MI300X",
    ):
        assert described(name).device.memory_bytes > 1e9, name
    with pytest.raises(OptionError, match="Did you mean h100"):
        described("h101")
    for name in CARDS:
        machine = described(name)
        assert from_values(json.loads(json.dumps(as_values(machine)))) == machine
        large = Work("product", (4096.0, 4096.0, 4096.0, 1.0))
        small = Work("product", (128.0, 128.0, 128.0, 1.0))
        assert large.flop / machine.device.seconds(large) > 5 * small.flop / machine.device.seconds(small)


@pytest.fixture
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("FULLSHARD_CLUSTER", "alps-17")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


@pytest.mark.usefixtures("_own_folder")
def test_rates_are_measured_once_and_kept_beside_the_speeds_of_links() -> None:
    from fullshard.link_speeds import ClusterSpeeds, LinkSpeed

    cpu = torch.device("cpu")
    assert machine_here(cpu, measures=False) is None
    first = machine_here(cpu)
    assert first is not None
    assert machine_here(cpu) == first  # a second measurement would differ
    speeds = ClusterSpeeds("gloo", "CPU", 4, LinkSpeed(2, 3e9, 1e-5), LinkSpeed(2, 1e9, 2e-5), "2030-01-01")
    remember_speeds(speeds)
    assert recall_speeds() == speeds
    then = machine_here(cpu)
    assert then is not None
    assert then.device == first.device
    assert (then.inside, then.across) == (Link(3e9, 1e-5), Link(1e9, 2e-5))
    remember_rates(as_values(first))
    assert recall_speeds() == speeds


@pytest.mark.usefixtures("_own_folder")
@pytest.mark.parametrize("damage", ["", "[]", '{"version": 1, "clusters": {}, "rates": 3}', "{}"])
def test_a_damaged_file_of_rates_is_measured_again(damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def fake(device: torch.device) -> Machine:
        calls.append(device)
        return H200

    monkeypatch.setattr("fullshard.planning.rates.measured", fake)
    speeds_file().parent.mkdir(parents=True)
    speeds_file().write_text(damage)
    assert machine_here(torch.device("cpu")) is not None
    assert len(calls) == 1
    assert recall_rates() == json.loads(json.dumps(as_values(H200)))
    remember_rates({"device": {"products": [[1, 1, 1, -5.0]]}})
    assert machine_here(torch.device("cpu")) is not None
    assert len(calls) == 2


def test_rates_of_this_processor_are_positive_and_survive_a_file() -> None:
    before = torch.get_rng_state()
    machine = measured(torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), before)  # else a run that measures would train to other values
    assert not machine.device.is_gpu
    assert from_values(json.loads(json.dumps(as_values(machine)))) == machine


def test_a_launch_is_timed_by_a_training_that_the_host_bounds() -> None:
    assert 0 < rates._launch(torch.device("cpu")) < 1


def test_times_are_printed_in_their_unit() -> None:
    assert (seconds(0.0123), seconds(1.5)) == ("12.3 ms", "1.50 s")


@pytest.mark.parametrize("strategy", ["replicate", "zero2", "zero3", "hybrid"])
@pytest.mark.parametrize("inner", [None, 8])
def test_a_faster_link_never_makes_a_step_longer(strategy: str, inner: int | None) -> None:
    if strategy == "hybrid" and inner is None:
        return
    step = traced("llama-1b", 4)
    for ranks in (16, 64):
        spent = [predicted(step, ranks, 0.5 * 1.5**k, inner, strategy).step_s for k in range(16)]
        assert all(later <= earlier * 1.0001 for earlier, later in pairwise(spent)), (ranks, spent)


@pytest.mark.parametrize("strategy", ["replicate", "zero2", "zero3", "hybrid"])
def test_more_nodes_never_expose_less(strategy: str) -> None:
    """A step may become shorter: each rank's part of the optimizer's does."""
    step = traced("llama-1b", 4)
    found = [predicted(step, 8 * nodes, 5, 8, strategy) for nodes in (1, 2, 3, 4, 8, 16, 32)]
    exposed = [times.step_s - times.compute_s for times in found]
    assert all(later >= 0.999 * earlier for earlier, later in pairwise(exposed)), exposed


def test_recomputation_is_followed_to_large_micro_batches_where_it_is_slower_on_small_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with experts, whose weights are read once per micro-batch: without recomputation 4 sequences fit."""

    def candidates(_scope: Any, traced: choosing.Traced, _names: Any) -> list[Any]:
        count = traced.sequences or 1
        found = []
        for again, fits, step_s in ((False, count <= 4, 4 + count), (True, count <= 64, 6 + 1.3 * count)):
            need = SimpleNamespace(times=SimpleNamespace(bound="computing"), transfers=None)
            need.peak, need.moment = count * 2**30, ""
            one = SimpleNamespace(need=need, fits=fits, tokens=count, step_s=step_s)
            one.per_token_s, one.question = step_s / count, SimpleNamespace(room_bytes=2**20, offload=None)
            one.settings = Settings("zero3", checkpoint_activations=again, micro_batch=count)
            found.append(one)
        return found

    tried: list[int] = []

    def traces() -> Any:
        for power in range(12):
            tried.append(2**power)
            yield choosing.Traced({}, 2**power, 2**power)

    monkeypatch.setattr(choosing, "_candidates", candidates)
    found = choosing.search(choosing.Scope("model", 8, None, H200, 2**40), traces(), until_worse=True)
    assert isinstance(found, choosing.Choice)
    assert found.settings == Settings("zero3", checkpoint_activations=True, micro_batch=64)
    assert tried[-1] == 128  # nothing fits
