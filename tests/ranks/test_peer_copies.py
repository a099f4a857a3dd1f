"""fs.save(..., peers=1): copies in the memory of agents load as checkpoints on disk do, on any ranks."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch

import fullshard as fs
import ranks
import tables
from engines import my_rank
from fullshard.errors import CheckpointError, FullshardError
from painting import IGNORE, WIDTH, adamw, load, paint, painted, scramble, shard, trained, whole_state
from peer_hosts import Spots, arrive, hosts, places_held


def _saved(spots: Spots, root: Path, peers: int, options: dict[str, Any], on_disk: bool) -> list[str]:
    """A painted model, saved in memory as step-7; what was warned about."""
    arrive(spots)
    model = shard(**IGNORE, **options)
    optimizer = trained(model)
    paint(model, optimizer)
    model.memory.seen = {"calls": 77, "last": (1, 2.5)}
    torch.manual_seed(my_rank())
    extra = {"step": 7, "large": torch.arange(99_999), "mine": {"rank": my_rank()}}
    if on_disk:
        fs.save(root / "disk" / "step-7", model, optimizer, extra=extra)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        saving = fs.save(root / "step-7", model, optimizer, extra=extra, peers=peers)
        scramble(model, optimizer)  # what was saved is what was there
        assert saving.wait() == root / "step-7"
    return [str(warning.message) for warning in caught]


def _loaded(spots: Spots, root: Path, options: dict[str, Any], sources: list[str]) -> list[Any]:
    arrive(spots)
    found: list[Any] = []
    for source in sources:
        model = shard(**IGNORE, **options)
        optimizer = trained(model)
        scramble(model, optimizer)
        torch.manual_seed(5)
        newest = fs.latest(root / source)
        assert newest == root / source / "step-7"
        extra = load(newest, model, optimizer)
        wrong = painted({n: v for n, v in whole_state(model, optimizer).items() if n != "scratch"})
        large = torch.equal(extra.pop("large"), torch.arange(99_999))
        found.append((wrong, dict(extra), large, extra.notes, model.memory.seen, torch.rand(2).tolist()))
    return found


# Four ranks save; then some hosts are lost, others come, and ranks of these names load.
ROUNDS = [
    ("aabb:abba", "zero3"),
    ("aabb-b:a", "zero2"),
    ("abcc-c:ab", "hybrid"),
    ("aabb-b:aca", "replicate"),
    ("aabc-a:bec", "zero3"),
]


@tables.some("case", ROUNDS, ROUNDS[1], ROUNDS[2], ROUNDS[4])
def test_copies_load_bit_by_bit_on_the_hosts_that_are_left(case: tuple[str, str], tmp_path: Path) -> None:
    names, strategy = case
    on_disk = case in ROUNDS[:2]
    before, after = names.split(":")
    saving, _, lost = before.partition("-")
    options = {"strategy": strategy} if strategy != "hybrid" else {"strategy": strategy, "mesh": (2, 2)}
    with hosts() as up:
        said = ranks.run(_saved, 4, up.spots(saving), tmp_path, 1, options, on_disk)
        assert said == [[]] * 4
        assert not (tmp_path / "step-7").exists()
        for name in lost:
            up.lose(name)
        options, sources = {"strategy": "zero3"}, ["", "disk"] if on_disk else [""]
        for rank, found in enumerate(
            ranks.run(_loaded, len(after), up.spots(after), tmp_path, options, sources)
        ):
            for of_source in found:
                wrong, extra, large, _, seen, _ = of_source
                assert (wrong, large, seen) == ([], True, {"calls": 77, "last": (1, 2.5)})
                assert extra.pop("mine", {"rank": rank}) == {"rank": rank}
                assert extra == {"step": 7}
            if on_disk:
                assert repr(found[0]) == repr(found[1]), "memory and disk differ"


def _cases(spots: Spots, root: Path) -> dict[str, Any]:
    """Several saves of one run, on two hosts."""
    arrive(spots)
    found: dict[str, Any] = {}
    model = shard(**IGNORE)
    optimizer = trained(model)

    def save(name: str, salt: str, **options: Any) -> None:
        paint(model, optimizer, salt)
        fs.save(root / name, model, optimizer, extra={"salt": salt}, **options).wait()

    def newest(**options: Any) -> tuple[str, list[str]]:
        scramble(model, optimizer)
        path = fs.latest(root, **options)
        salt = load(path, model, optimizer)["salt"]
        return f"{path.name} {salt}", painted(
            {n: v for n, v in whole_state(model, optimizer).items() if n != "scratch"}, salt
        )

    found["nothing"] = fs.latest(root)
    save("step-1", "a", peers=1)
    found["first"] = newest()
    save("step-2", "b", peers=1)
    save("step-3", "c", peers=1)
    found["third"] = newest(verify=True)
    save("step-4", "d")
    found["disk"] = newest()
    save("step-4", "e", peers=1)  # of the same name: the newer one
    found["again"] = newest()
    save("step-5", "f", peers=5)
    found["many"] = newest(verify=True)
    try:
        fs.load(root / "step-3", model, optimizer)
    except CheckpointError as error:
        found["replaced"] = str(error)
    for name, options in {
        "negative": {"peers": -1},
        "bool": {"peers": True},
        "keep_last": {"peers": 1, "keep_last": 2},
        "differs": {"peers": 1 + my_rank()},
        "name": {"copies": 1},
    }.items():
        try:
            save("step-6", "g", **options)
        except (FullshardError, TypeError) as error:
            found[name] = f"{type(error).__name__}: {error}"
    small = torch.nn.Linear(4, 4)
    plan = fs.plan(small, ranks=1, peers=2)
    found["plan"] = plan.peer_copy_bytes, plan.saved_bytes, str(plan).splitlines()[-1]
    return found


def test_newest_of_memory_and_disk_is_loaded_and_older_copies_are_replaced(tmp_path: Path) -> None:
    with hosts() as up:
        for found in ranks.run(_cases, 2, up.spots("ab"), tmp_path):
            assert found["nothing"] is None
            assert found["first"] == ("step-1 a", [])
            assert found["third"] == ("step-3 c", [])
            assert found["disk"] == ("step-4 d", [])
            assert found["again"] == ("step-4 e", [])
            assert found["many"] == ("step-5 f", [])
            assert "step-3" in found["replaced"]
            assert found["negative"].startswith("OptionError: ")
            assert "peers is -1" in found["negative"]
            assert "peers is True" in found["bool"]
            assert "keep_last and files are about checkpoints on disk" in found["keep_last"]
            assert found["differs"].startswith("RankMismatch: ")
            assert "peers=2 on rank 1" in found["differs"]
            assert "peers=1" in found["name"]
            copied, saved, line = found["plan"]
            assert copied == 7 * saved
            assert saved >= 20 * 4 * 3
            assert line.startswith("copies in memory with peers=2: ")
        assert places_held(up, "a") == places_held(up, "b") == [("step-5", 0), ("step-5", 1)]
        assert not [path for path in tmp_path.rglob("*") if "step-5" in path.name]


def _alone(root: Path, variables: dict[str, str]) -> list[Any]:
    """Ranks of one agent: the second time with its memory."""
    model = shard(**IGNORE)
    optimizer = trained(model)
    said: list[Any] = []
    try:
        fs.save(root / "step-1", model, optimizer, peers=1)
    except FullshardError as error:
        said.append(f"{type(error).__name__}: {error}")
    arrive([("one", variables)] * 4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in (1, 2):
            fs.save(root / f"step-{step}", model, optimizer, peers=1).wait()
    return [*said, [str(warning.message) for warning in caught], str(fs.latest(root))]


def test_ranks_of_one_agent_share_its_memory_and_it_is_said_once_what_that_does_not_protect_from(
    tmp_path: Path,
) -> None:
    with hosts() as up:
        [(_, variables)] = up.spots("a")
        for rank, (error, said, newest) in enumerate(ranks.run(_alone, 2, tmp_path, variables)):
            assert error.startswith("StateError: ")
            assert "fullshard launch --elastic" in error
            assert ["not from a lost host" in text for text in said] == [True] * (rank == 0)
            assert newest == str(tmp_path / "step-2")
        assert places_held(up, "a") == [("step-2", 0), ("step-2", 1)]


def _muon(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon([p for p in parameters if p.dim() == 2], lr=0.01)


# Options of fs.shard and an optimizer: states of all kinds, at home anywhere.
KINDS: dict[str, tuple[dict[str, Any], Any]] = {
    "8-bit state": ({"state": "8bit"}, adamw),
    "offload": ({"offload": "host"}, adamw),
    "bf16": ({"precision": "bf16"}, adamw),
    "owned": ({"optimizer_step": "owned"}, partial(torch.optim.Adafactor, lr=0.01)),
    "Muon": ({}, _muon),
}


def _goes_on(spots: Spots, root: Path) -> dict[str, bool]:
    """Whether a run that goes on from memory has the bits of one that was not disturbed."""
    arrive(spots)
    found = {}
    for kind, (options, make) in KINDS.items():
        model = shard(partial(_layers, kind), **options)
        optimizer, batches = make(model.parameters()), fs.Batches(24, 4)

        def train(
            steps: range,
            model: Any = model,
            optimizer: Any = optimizer,
            batches: fs.Batches = batches,
        ) -> None:
            for step in steps:
                at = torch.tensor(batches.indices(step), dtype=torch.float32)
                model(at[:, None] * torch.ones(WIDTH) / 24 + torch.rand(1)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()

        train(range(2))
        fs.save(root / kind / "step-2", model, optimizer, extra={"rank": my_rank()}, peers=1)
        train(range(2, 4))
        undisturbed = whole_state(model)
        drawn = torch.rand(3)
        assert load(fs.latest(root / kind), model, optimizer) == {"rank": my_rank()}
        train(range(2, 4))
        again = whole_state(model)
        same = [torch.equal(undisturbed[name], again[name]) for name in undisturbed]
        found[kind] = all(same) and torch.equal(drawn, torch.rand(3))
    return found


def _layers(kind: str) -> torch.nn.Module:
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=kind != "Muon") for _ in range(3)))


def test_run_goes_on_from_memory_with_the_bits_of_an_undisturbed_one(tmp_path: Path) -> None:
    with hosts() as up:
        for found in ranks.run(_goes_on, 2, up.spots("ab"), tmp_path, timeout_s=120):
            assert found == dict.fromkeys(KINDS, True)
