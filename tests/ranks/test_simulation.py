"""One process as one rank of a simulated cluster: its network, its data, its time, its figures."""

from __future__ import annotations

import math
import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed, nn

import engines
import ranks
import warm
from fullshard import api
from fullshard.errors import OptionError
from fullshard.planning.network import Link, Network, bandwidth, duration
from fullshard.tools.simulation.group import Cluster, joined
from fullshard.tools.simulation.measure import measure
from fullshard.tools.simulation.models import decoder
from fullshard.tools.simulation.presets import PRESETS, describe, gpt
from fullshard.tools.simulation.run import Scenario, build
from fullshard.tools.simulation.wire import HostWire, Message

CPU = torch.device("cpu")
LATENCY = 20e-6
FLAT = Network(8, Link(1e9, 10e-6), collective_s=0.0)
NODES = Network(16, Link(1e9, 20e-6), 4, Link(1e10, 5e-6), collective_s=0.0)
SLOW_INSIDE = Network(16, Link(1e10, 20e-6), 4, Link(1e9, 5e-6), collective_s=0.0)
EVERYBODY, ONE_NODE, ACROSS = range(16), (4, 5, 6, 7), (1, 5, 9, 13)
TINY = gpt(3, 32, 2, 64, context=16)
BLOCK = 4 * 32 * 33 + 2 * 32 * 2 + 2 * 4 * 32 * 32 + 5 * 32  # attention, two norms, feed-forward
ROOT = 64 * 32 + 16 * 32 + 2 * 32  # tied embedding, positions, last norm


# --- the network -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("network", "kind", "size_bytes", "members", "milliseconds"),
    [
        (FLAT, "gather", 8e6, range(8), 7 * 0.01 + 7.0),  # seven eighths come from the others, by seven hops
        (FLAT, "reduce-scatter", 8e6, range(8), 7 * 0.01 + 7.0),
        (FLAT, "all-to-all", 8e6, range(8), 0.01 + 7 * 0.002 + 7.0),  # one hop, and a fifth of one per peer
        (FLAT, "all-reduce", 8e6, range(8), 2 * (7 * 0.01 + 7.0)),
        (FLAT, "gather", 8e6, (3,), 0.0),
        (FLAT, "gather", 8e6, (2, 6), 0.01 + 4.0),
        # Small messages go by doubling, or up and down a tree.
        (FLAT, "gather", 8e3, range(8), (3 / 3.5 + 8 / 5) * 0.01 + 0.007 / 0.75),
        (FLAT, "all-reduce", 8e3, range(8), 2 * 3 * 0.01 + 2 * 0.007 / 0.92),
        (NODES, "all-reduce", 16e3, EVERYBODY, 2 * (3 * 0.005 + 2 * 0.02) + 2 * 0.003 / 0.92),
        (NODES, "gather", 16e3, EVERYBODY, 12 * 0.005 + 3 * 0.02 + 0.003),  # a ring, whatever its size
        # 12 of 16 MB are elsewhere; the four ranks of a node fetch 3 MB each and pass it on inside.
        (NODES, "gather", 16e6, EVERYBODY, 12 * 0.005 + 3 * 0.02 + 3.0),
        (NODES, "reduce-scatter", 16e6, EVERYBODY, 12 * 0.005 + 3 * 0.02 + 3.0),
        (NODES, "all-reduce", 16e6, EVERYBODY, 2 * (12 * 0.005 + 3 * 0.02 + 3.0)),
        # Nothing can be passed on.
        (NODES, "all-to-all", 16e6, EVERYBODY, 0.02 + (3 * 0.005 + 12 * 0.02) / 5 + 12.0),
        (NODES, "gather", 4e6, ONE_NODE, 3 * 0.005 + 0.3),
        (NODES, "all-to-all", 4e6, ONE_NODE, 0.005 + 3 * 0.001 + 0.3),
        (NODES, "gather", 4e6, ACROSS, 3 * 0.02 + 3.0),
        (NODES, "all-reduce", 4e6, ACROSS, 2 * (3 * 0.02 + 3.0)),
        # 15 MB less the 3 that came over its own link; 3 MB inside, 12 MB across
        (SLOW_INSIDE, "gather", 16e6, EVERYBODY, 12 * 0.005 + 3 * 0.02 + 12.0),
        (SLOW_INSIDE, "all-to-all", 16e6, EVERYBODY, 0.02 + (3 * 0.005 + 12 * 0.02) / 5 + 3.0),
        (replace(FLAT, collective_s=1e-3), "gather", 8e6, range(8), 1.0 + 7 * 0.01 + 7.0),
        # Rings of NCCL pass fifteen sixteenths along every edge, over four links at once.
        (replace(NODES, rings=True), "gather", 16e6, EVERYBODY, 12 * 0.005 + 3 * 0.02 + 15 / 4),
        (replace(NODES, rings=True), "gather", 4e6, ONE_NODE, 3 * 0.005 + 0.3),
    ],
)
def test_collective_takes_hand_computed_time(
    network: Network, kind: str, size_bytes: float, members: Any, milliseconds: float
) -> None:
    load = network.load(kind, size_bytes, network.placement(members))
    assert load.seconds * 1e3 == pytest.approx(milliseconds, rel=1e-12)


@pytest.mark.parametrize(
    ("kind", "members", "inside", "across"),
    [
        ("gather", ONE_NODE, 12.0, 0.0),  # of 16 MB
        ("all-to-all", ONE_NODE, 12.0, 0.0),
        ("gather", ACROSS, 0.0, 12.0),
        ("all-to-all", ACROSS, 0.0, 12.0),
        ("gather", EVERYBODY, 12.0, 3.0),  # what a gather across of a quarter and then one inside send
        ("reduce-scatter", EVERYBODY, 12.0, 3.0),
        ("all-reduce", EVERYBODY, 24.0, 6.0),
        ("all-to-all", EVERYBODY, 3.0, 12.0),
        ("gather", (4, 5, 8, 9), 8.0, 4.0),  # two each of two nodes
    ],
)
def test_each_level_carries_its_own_bytes(kind: str, members: Any, inside: float, across: float) -> None:
    load = NODES.load(kind, 16e6, NODES.placement(members))
    assert (load.inside_bytes / 1e6, load.across_bytes / 1e6) == pytest.approx((inside, across))
    assert (load.inside_s, load.across_s) == pytest.approx((inside * 1e-4, across * 1e-3))


def _stop(wire: HostWire, kind: str, members: Any, group: str, size_bytes: float = 16e6) -> float:
    load = NODES.load(kind, size_bytes, NODES.placement(members))
    nothing = torch.zeros(0)
    return float(wire.carry(Message(kind, load, group), nothing, nothing, None))


@pytest.mark.parametrize("count", [64, 256, 1024])
def test_latency_grows_with_ranks_as_rings_and_doubling_do(count: int) -> None:
    network = Network(count, Link(1e12), 8, Link(1e12, 3.4e-6))
    everybody, across = range(count), range(3, count, 8)
    ring = network.load("gather", 8e6, network.placement(everybody))
    assert ring.latency_s >= (count - count // 8) * 3.4e-6  # every rank of the ring
    doubling = network.load("gather", 1e6, network.placement(across))
    assert doubling.latency_s < ring.latency_s / 4
    assert network.load("gather", 8e6, network.placement(range(8))).latency_s == pytest.approx(
        8.4e-6 + 23.8e-6
    )


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> float:
    """When all messages are sent: on a busy machine there might be more between them than they take."""
    monkeypatch.setattr("fullshard.tools.simulation.wire.time", SimpleNamespace(perf_counter=lambda: 1.0))
    return 1.0


def test_message_inside_does_not_wait_for_one_across(begun: float) -> None:
    wire = HostWire()
    across = _stop(wire, "gather", ACROSS, "across")
    inside = _stop(wire, "gather", ONE_NODE, "inside")
    more_inside = _stop(wire, "gather", ONE_NODE, "another group inside")
    flat = _stop(wire, "gather", EVERYBODY, "flat")
    assert across - begun == pytest.approx(12.06e-3, abs=1e-9)
    assert inside < across
    assert more_inside - inside == pytest.approx(1.2e-3, abs=1e-6)  # the latency of the second has passed
    assert flat - across == pytest.approx(3.06e-3, abs=1e-6)  # the link across is the later one


@pytest.mark.usefixtures("begun")
def test_messages_of_one_group_pass_one_after_the_other() -> None:
    wire = HostWire()
    first, second = (_stop(wire, "gather", ACROSS, "one group") for _ in range(2))
    assert second - first == pytest.approx(12.06e-3, abs=1e-9)  # its latency begins when the first is over
    inside = _stop(wire, "gather", ONE_NODE, "one group")
    assert inside - second == pytest.approx(1.215e-3, abs=1e-9)


@pytest.mark.parametrize(
    ("text", "bytes_a_second"),
    [
        ("50GB/s", 50e9), ("400Gb/s", 50e9), ("400 Gbit/s", 50e9), ("400Gbps", 50e9), ("1.5TB/s", 1.5e12),
        (".5MB/s", 5e5), ("8kb/s", 1e3), (" 7B/s ", 7.0),
    ],
)  # fmt: skip
def test_bandwidth_is_read(text: str, bytes_a_second: float) -> None:
    assert bandwidth(text) == pytest.approx(bytes_a_second)


@pytest.mark.parametrize(
    "text", ["50", "50GB", "GB/s", "1.2.3GB/s", "-1GB/s", "50XB/s", "50GB/ps", "", "nan"]
)
def test_bad_bandwidth_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(OptionError, match="50GB/s"):
        bandwidth(text)


@pytest.mark.parametrize(("text", "seconds"), [("20us", 2e-5), ("5 µs", 5e-6), ("0.5ms", 5e-4), ("1s", 1.0)])
def test_duration_is_read(text: str, seconds: float) -> None:
    assert duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "bad",
    [
        lambda: duration("20"),
        lambda: Link(0.0),
        lambda: Link(math.nan),
        lambda: Link(1e9, -1.0),
        lambda: Network(0, Link(1e9)),
        lambda: Network(8, Link(1e9), 4),
        lambda: Network(8, Link(1e9), None, Link(1e9)),
        lambda: Network(8, Link(1e9), 3, Link(1e9)),
        lambda: Cluster(FLAT, CPU, 8),
    ],
)
def test_impossible_cluster_is_refused(bad: Callable[[], object]) -> None:
    with pytest.raises(OptionError):
        bad()


@pytest.mark.parametrize(
    ("name", "count"), [("gpt-8m", "8.5 M"), ("gpt-124m", "124.5 M"), ("llama-70b", "68.98 B")]
)
def test_preset_has_the_size_of_its_name(name: str, count: str) -> None:
    assert describe(PRESETS[name]).startswith(f"{count} parameters")


# --- what arrives ----------------------------------------------------------------------------------------


def _delivered(rank: int) -> dict[str, Any]:
    dice = torch.Generator().manual_seed(1)
    sent, shard = torch.randn(4, 6, generator=dice), torch.randn(6, generator=dice)
    with joined(Cluster(Network(4, Link(1e12)), CPU, rank)):
        full = torch.zeros(4, 6)
        full[rank] = shard
        distributed.all_gather_into_tensor(full.view(-1), full[rank])
        apart = torch.zeros(4, 6)
        distributed.all_gather_into_tensor(apart.view(-1), shard)
        received = torch.zeros(4, 6)
        distributed.all_to_all_single(received.view(-1), sent.view(-1))
        summed, mean = torch.zeros(6), torch.zeros(6)
        distributed.reduce_scatter_tensor(summed, sent.view(-1))
        distributed.reduce_scatter_tensor(mean, sent.view(-1), op=distributed.ReduceOp.AVG)
        total, largest = sent.clone(), sent.clone()
        work = distributed.all_reduce(total, async_op=True)
        assert torch.equal(total, sent)
        work.wait()
        distributed.all_reduce(largest, op=distributed.ReduceOp.MAX)
        words: list[Any] = [None] * 4
        distributed.all_gather_object(words, "word")
        named = ["mine"]
        distributed.broadcast_object_list(named, src=0)
    assert not distributed.is_initialized()
    own = sent[rank]
    return {
        "gather": bool((full == shard).all()),
        "gather from elsewhere": bool((apart == shard).all()),
        "all-to-all": bool((received == own).all()),
        "reduce-scatter": torch.equal(summed, 4 * own) and torch.equal(mean, own),
        "all-reduce": torch.equal(total, 4 * sent) and torch.equal(largest, sent),
        "objects": words == ["word"] * 4 and named == ["mine"],
        "no zeros": bool(full.all() and apart.all() and received.all() and summed.all()),
    }


@pytest.mark.parametrize("rank", [0, 2, 3])
def test_other_ranks_send_what_this_rank_sends(rank: int) -> None:
    (found,) = ranks.run(_delivered, 1, rank)
    assert all(found.values()), found


def _join_in_a_group() -> None:
    with joined(Cluster(FLAT, CPU)):
        pass


def test_simulation_inside_a_group_of_ranks_is_refused() -> None:
    errors = ranks.run(_join_in_a_group, 1, init=True, expect_error=True)
    assert errors[0].type_name == "StateError"
    assert "without torchrun" in errors[0].message


# --- one step --------------------------------------------------------------------------------------------


def _scenario(network: Network, **said: Any) -> Scenario:
    said = {"precision": "fp32", "warmup": 2, "steps": 3, "keep_full": 0, "merge_units": 0, **said}
    return Scenario(decoder("tiny", TINY, 16), network, CPU, **said)


def _step(scenario: Scenario, name: str, steps: int = 4) -> dict[str, Any]:
    """Losses of some steps, then the messages of one more and how long it took."""
    with joined(Cluster(scenario.network, CPU, scenario.rank)) as cluster:
        training = build(scenario, name)
        losses = [float(training()) for _ in range(steps)]
        traffic = cluster.wire.traffic
        traffic.clear()
        traffic.log = log = []
        begun = time.perf_counter()
        training()
        took_s = time.perf_counter() - begun
        runtime = vars(training.model).get("_fullshard")
        found = {
            "losses": losses,
            "messages": [(m.kind, m.load.sent_bytes, m.load.seconds) for m in log],
            "spans": {
                link: sorted(m.times[link] for m in log if link in m.times) for link in ("inside", "across")
            },
            "seconds": traffic.across_s,
            "sent": traffic.inside_bytes + traffic.across_bytes,
            "took_s": took_s,
            "grid": None if runtime is None else (runtime.comm.ranks, runtime.comm.replicas),
            "planned": None if runtime is None else api.plan(training.model).wire_bytes_per_step,
        }
        del training, runtime
    return found


def _step_of(name: str, network: Network, said: dict[str, Any]) -> dict[str, Any]:
    return _step(_scenario(network, **said), name)


def _run(name: str, network: Network, **said: Any) -> dict[str, Any]:
    (found,) = ranks.run(_step_of, 1, name, network, said)
    return found  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["fullshard", "fsdp2"])
def test_step_takes_the_time_of_its_wire(name: str) -> None:
    found = _run(name, Network(8, Link(2e6, 0.0), collective_s=0.0))
    by_hand = sum(sent / 2e6 for _, sent, _ in found["messages"])
    assert found["seconds"] == pytest.approx(by_hand, rel=1e-9)
    assert found["took_s"] >= found["seconds"]  # one link, and everything is waited for
    assert found["seconds"] > 0.1
    assert not found["spans"]["inside"]
    for (_, stop), (start, _) in pairwise(found["spans"]["across"]):
        assert start >= stop


def test_fullshard_sends_what_its_plan_says() -> None:
    found = _run("fullshard", Network(8, Link(1e9)))
    *large, agreement = found["messages"]
    assert agreement[0] == "all-reduce"  # which parameters anybody used: a byte each
    assert sum(sent for _, sent, _ in large) == pytest.approx(found["planned"], rel=1e-6)
    assert sum(kind != "gather" for kind, _, _ in large) == 4  # one reduce a unit


def test_fsdp2_sends_what_it_should() -> None:
    found = _run("fsdp2", Network(8, Link(1e9)))
    gathers = [sent for kind, sent, _ in found["messages"] if kind == "gather"]
    reduces = [sent for kind, sent, _ in found["messages"] if kind == "reduce-scatter"]
    share = 7 / 8 * 4
    # Forward gathers everything, backward all blocks but the last, which was kept.
    assert sorted(gathers) == pytest.approx(sorted([ROOT * share] + [BLOCK * share] * 5))
    assert sorted(reduces) == pytest.approx(sorted([ROOT * share] + [BLOCK * share] * 3))


def test_eight_bit_wire_sends_about_half_of_bf16() -> None:
    network = Network(2, Link(1e9))
    narrow, wide = (_run("fullshard", network, precision=p)["sent"] for p in ("int8", "bf16"))
    assert 0.45 < narrow / wide < 0.65


@pytest.mark.parametrize(("name", "count", "rank"), [
    ("fullshard", 8, 0), ("fullshard", 8, 5), ("fullshard", 256, 3), ("fsdp2", 8, 5), ("fsdp2", 32, 0),
])  # fmt: skip
def test_loss_stays_what_it_is_at_first(name: str, count: int, rank: int) -> None:
    losses = _run(name, Network(count, Link(1e12)), rank=rank)["losses"]
    assert all(map(math.isfinite, losses))
    assert 3 < losses[-1] < 6  # near that of guessing, log 64


def test_hybrid_shards_inside_a_node_and_sums_across() -> None:
    network = Network(16, Link(1e8, 0.0), 4, Link(1e9, 0.0), collective_s=0.0)
    found = _run("fullshard", network, strategy="hybrid", rank=6)
    assert found["grid"] == (4, 4)
    messages = [m for m in found["messages"] if m[0] != "all-reduce"]
    across = [kind for kind, sent, seconds in messages if seconds == pytest.approx(sent / 1e8)]
    inside = [kind for kind, sent, seconds in messages if seconds == pytest.approx(sent / 1e9)]
    assert len(across) + len(inside) == len(messages)
    assert sorted(across) == ["all-to-all"] * 4 + ["gather"] * 4  # per unit: sums, and back from their owners
    assert all(map(math.isfinite, found["losses"]))


@pytest.mark.parametrize("name", ["fullshard", "fsdp2"])
def test_shards_over_all_nodes_can_be_simulated(name: str) -> None:
    network = Network(16, Link(1e8, 50e-6), 4, Link(1e9, 5e-6))
    found = _run(name, network, strategy="zero3", rank=6)
    assert found["grid"] == ((16, 1) if name == "fullshard" else None)
    assert all(map(math.isfinite, found["losses"]))


def test_hybrid_fsdp2_runs_on_the_same_network() -> None:
    network = Network(16, Link(1e8, 50e-6), 4, Link(1e9, 5e-6))
    found = _run("fsdp2", network, strategy="hybrid")
    kinds = [kind for kind, _, _ in found["messages"]]
    assert kinds.count("all-reduce") == kinds.count("reduce-scatter") == 4
    assert all(map(math.isfinite, found["losses"]))


@pytest.mark.parametrize("said", [
    {"strategy": "zero2"}, {"strategy": "replicate"}, {"checkpoint_activations": True}, {"keep_full": "all"},
])  # fmt: skip
def test_every_way_to_shard_can_be_simulated(said: dict[str, Any]) -> None:
    assert all(map(math.isfinite, _run("fullshard", Network(8, Link(1e12)), **said)["losses"]))


def _figures() -> dict[str, float]:
    scenario = _scenario(Network(8, Link(2e6, LATENCY)))
    with joined(Cluster(scenario.network, CPU)) as cluster:
        figures = measure(build(scenario, "fullshard"), cluster, 2, 3)
    return {**vars(figures), "exposed_s": figures.exposed_s}


def test_figures_say_what_the_wire_cost() -> None:
    (found,) = ranks.run(_figures, 1)
    assert found["step_s"] >= found["across_s"] > found["inside_s"] == 0
    assert found["exposed_s"] <= found["step_s"]
    assert found["exposed_s"] == pytest.approx(found["step_s"] - found["without_wire_s"])
    assert found["messages"] == 12  # four gathers, three again in backward, four reduces, one agreement
    assert found["peak_bytes"] == found["reserved_bytes"] == 0  # nothing is known of a CPU's


# --- many ranks ------------------------------------------------------------------------------------------


MANY = """
import sys, time
import torch
from fullshard.tools.simulation.group import Cluster, joined
from fullshard.tools.simulation.models import decoder
from fullshard.tools.simulation.presets import gpt
from fullshard.planning.network import Link, Network
from fullshard.tools.simulation.run import Scenario, build
from fullshard.tools.simulation.wire import HostWire, Message
imported = time.process_time()
count = int(sys.argv[1])
what = decoder("tiny", gpt(3, 32, 2, 64, context=16), 16)
scenario = Scenario(what, Network(count, Link(1e12)), torch.device("cpu"), rank=count - 1)
with joined(Cluster(scenario.network, scenario.device, scenario.rank)):
    training = build(scenario, "fullshard")
    losses = [training() for _ in range(2)]
    assert all(torch.isfinite(loss) for loss in losses)
    records = vars(training.model)["_fullshard"].comm.recorder
print(records.folder.path, time.process_time() - imported)
"""


@pytest.mark.parametrize("count", [256, 4096])
def test_thousands_of_ranks_start_at_once_and_leave_nothing_behind(count: int) -> None:
    command = [f"{warm.commands()}/python", "-c", MANY, str(count)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    found = subprocess.run(command, env=environment, check=True, timeout=500, capture_output=True, text=True)
    folder, seconds = found.stdout.split()
    assert float(seconds) < 20  # of the processor: about one
    assert not Path(folder).exists()


def _sent_and_planned(said: dict[str, Any]) -> tuple[float, int]:
    from torch.distributed.device_mesh import init_device_mesh

    import fullshard as fs
    from fullshard.planning.decoder import Decoder
    from fullshard.planning.sizes import Shape
    from fullshard.tools.simulation.group import Cluster, joined

    torch.manual_seed(0)
    model = Decoder(Shape(6, 32, 2, 1, 64, 64, 16, fused=True))
    options = {**said}
    if isinstance(options.get("precision"), dict):
        options["precision"] = fs.Precision(**options["precision"])
    nodes_of = options.pop("nodes_of", None)
    levels = () if nodes_of is None else (nodes_of, Link(1e12, 0.0))
    with joined(Cluster(Network(4, Link(1e12, 0.0), *levels), torch.device("cpu"))) as cluster:
        if options.get("strategy") == "hybrid":
            options["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        fs.shard(model, **(engines.BLOCKS | options))
        tokens = torch.randint(0, 64, (2, 9))
        for _ in range(3):
            cluster.wire.traffic.clear()
            model(tokens).backward()
            model.zero_grad()
        traffic = cluster.wire.traffic
        return traffic.inside_bytes + traffic.across_bytes, fs.plan(model).wire_bytes_per_step


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"merge_units": None, "keep_full": None},
        {"keep_full": 0},
        {"keep_full": "all"},
        {"keep_full": 30_000},
        {"strategy": "zero2"},
        {"precision": "bf16"},
        {"reduce": "scatter", "precision": "bf16"},
        {"precision": {"compute": torch.bfloat16, "gather": torch.int8, "wire": torch.int8}},
        {"nodes_of": 2, "keep_full": 0},
        {"nodes_of": 2, "keep_full": 0, "keep_node": 0, "precision": "bf16"},
        {"nodes_of": 2, "strategy": "hybrid", "precision": "bf16"},
        {"nodes_of": 2, "strategy": "replicate"},
        {"nodes_of": 2, "keep_full": 0, "precision": {"compute": torch.bfloat16, "across": torch.int8}},
    ],
    ids=str,
)
def test_a_step_sends_the_bytes_that_the_plan_says(said: dict[str, Any]) -> None:
    sent, planned = ranks.run(_sent_and_planned, 1, said, timeout_s=60)[0]
    small = sent - planned  # the report of a step
    assert 0 <= small < 600, (sent, planned)


def _nodes(nodes_of: int | None, said: dict[str, Any]) -> tuple[int, str]:
    import fullshard as fs
    from fullshard.tools.simulation.group import Cluster, joined

    levels = () if nodes_of is None else (nodes_of, Link(1e12))
    with joined(Cluster(Network(16, Link(1e12), *levels), torch.device("cpu"))):
        model = fs.shard(nn.Linear(64, 64), **said)
        return fs.plan(model).nodes, model._fullshard.options.reduce


@pytest.mark.parametrize(
    ("nodes_of", "said", "expected"),
    [
        (None, {}, (1, "exchange")),
        (16, {}, (1, "exchange")),
        (8, {"precision": "bf16"}, (2, "exchange")),
        (2, {"strategy": "zero2"}, (8, "exchange")),
        (1, {}, (1, "exchange")),
        (8, {"reduce": "scatter"}, (2, "scatter")),
    ],
    ids=str,
)
def test_ranks_of_several_nodes_send_over_two_levels(
    nodes_of: int | None, said: dict[str, Any], expected: tuple[int, str]
) -> None:
    assert ranks.run(_nodes, 1, nodes_of, said, timeout_s=60)[0] == expected


def _under_a_fake_group() -> tuple[int, int, bool]:
    """Torch's own process group in which nobody else is there; people estimate memory with it."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import fullshard as fs

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    whole = sum(p.numel() for p in model.parameters())
    fs.shard(model)
    model(torch.ones(2, 8)).sum().backward()
    grads = all(p.grad is not None for p in model.parameters() if p.numel())
    return whole, sum(p.numel() for p in model.parameters()), grads


def test_one_rank_under_torchs_fake_process_group_holds_its_part() -> None:
    ((whole, part, grads),) = ranks.run(_under_a_fake_group, 1, fresh=True)
    assert whole / 4 <= part <= whole / 3
    assert grads
