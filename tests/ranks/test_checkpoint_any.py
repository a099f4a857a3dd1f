"""Saved anyhow, loaded anyhow: any ranks, strategy, precision and units; bit by bit the same."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ranks
import reference
import tables
from engines import build, my_rank
from painting import (
    IGNORE,
    KEYS,
    NO_STATE,
    WIDTH,
    Block,
    Plain,
    Remembering,
    Zoo,
    adamw,
    load,
    paint,
    painted,
    pattern,
    scramble,
    shard,
    tensors_of,
    trained,
    whole_state,
)  # fmt: skip

# --- any number of ranks -------------------------------------------------------------------------------

COUNTS = (1, 2, 3, 4, 5, 8)


def _save_and_load(root: Path, sources: list[str], files: str) -> dict[str, Any]:
    """Save as 'from-N' if it is not there, then load every source into a model that was something else."""
    import fullshard as fs

    model = shard(**IGNORE)
    optimizer = trained(model)
    count = int(os.environ["WORLD_SIZE"])
    target = root / f"from-{count}"
    if not target.exists():
        paint(model, optimizer)
        model.memory.seen = {"calls": 77, "last": (1, 2.5)}
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
        extra = {"step": 7, "scheduler": scheduler.state_dict(), "mine": {"rank": my_rank()}}
        fs.save(target, model, optimizer, extra=extra, files=files)
    found: dict[str, Any] = {}
    for source in sources:
        scramble(model, optimizer)
        model.memory.seen = None
        extra = load(root / source, model, optimizer)
        wrong = painted({n: v for n, v in whole_state(model, optimizer).items() if n != "scratch"})
        if not reference.bitwise(model.scratch, torch.zeros(2)):
            wrong.append("scratch, which is not persistent, has changed")
        found[source] = (wrong, dict(extra), extra.notes, model.memory.seen, len(optimizer.state))
    return found


def _check_pairs(counts: Iterable[int], root: Path, files: str) -> None:
    """All pairs: first from few ranks to many, then from many to few."""
    pairs, counts = 0, list(counts)
    for here, count in [*enumerate(counts), *reversed(list(enumerate(counts))[:-1])]:
        sources = counts[: here + 1] if not (root / f"from-{count}").exists() else counts[here + 1 :]
        results = ranks.run(_save_and_load, count, root, [f"from-{n}" for n in sources], files, timeout_s=120)
        for rank, found in enumerate(results):
            for source, saved in zip(found, sources, strict=True):
                _check_pair(found[source], saved == count, rank, f"{source} on {count} ranks, rank {rank}")
        pairs += len(sources)
    assert pairs == len(counts) ** 2


def _check_pair(found: Any, same: bool, rank: int, what: str) -> None:
    wrong, extra, notes, seen, states = found
    assert wrong == [], f"{what}: {wrong}"
    assert states == sum(1 for _ in Zoo().parameters()) - len(NO_STATE), what
    assert seen == {"calls": 77, "last": (1, 2.5)}, what
    assert extra.pop("step") == 7
    assert extra.pop("scheduler")["last_epoch"] == 0
    text = "; ".join(notes)
    if same:
        assert (extra, text) == ({"mine": {"rank": rank}}, ""), what
    else:
        assert extra in ({}, {"mine": {"rank": 0}}), what  # one rank alone: all ranks agree
        assert "random numbers were left as they are" in text, what


@pytest.mark.parametrize("files", ["shared", pytest.param("parts", marks=pytest.mark.long)])
def test_checkpoint_of_any_number_of_ranks_loads_on_any_other(tmp_path: Path, files: str) -> None:
    counts = (1, 2, 3) if files == "shared" else (1, 3, 5)  # all pairs of more: the plan below, and long
    _check_pairs(counts, tmp_path, files)
    for count in counts if files == "shared" else ():
        folder = tmp_path / f"from-{count}"
        model, state = tensors_of(folder, "model"), tensors_of(folder, "optimizer")
        assert set(model) == set(Zoo().state_dict()) - {"head.weight", "memory._extra_state"}
        assert painted(model) == []
        assert painted(state) == []
        names = {n for n, _ in Zoo().named_parameters()} - NO_STATE
        assert set(state) == {f"{n}.{key}" for n in names for key in ("step", *KEYS)}


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("files", ["shared", "parts"])
def test_all_thirty_six_pairs_of_rank_counts_load_bit_by_bit(tmp_path: Path, files: str) -> None:
    _check_pairs(COUNTS, tmp_path, files)


# --- all pairs, without a process ----------------------------------------------------------------------

# By unit, as a model's would be: (name, shape). Sizes that tear blocks and tensors between ranks.
UNITS: list[list[tuple[str, tuple[int, ...]]]] = [
    [("embed", (23, 17)), ("scale", ()), ("empty", (0, 4))],
    [("a.weight", (31, 13)), ("a.bias", (31,)), ("a.gate", (1,))],
    [("b.weight", (64, 64)), ("b.bias", (3,))],
]
PLAN_BLOCK = 512


def _held(ranks_: int, rank: int, replicas: int, replica: int, kind: str) -> list[Any]:
    """What a rank of a plan writes: its own part of every tensor, with the painted values."""
    from fullshard.checkpoint.format.headers import Tensor as Described
    from fullshard.checkpoint.saving.contents import LocalSlice
    from fullshard.plan.layout import lay_out

    found = []
    for unit in UNITS:
        layout = lay_out([(n, s, tuple(range(len(s)))) for n, s in unit], ranks_, 4)
        for piece in layout.pieces:
            name, dtype = f"{piece.name}{kind}", torch.bfloat16 if kind else torch.float32
            start, stop = layout.written(piece, rank, replica, replicas)
            values = pattern(name, piece.shape, dtype).reshape(-1)[start:stop]
            found.append(LocalSlice(Described(name, dtype, piece.shape), start, stop, values))
    return found


def _write_plan(folder: Path, ranks_: int, replicas: int, parts: bool) -> None:
    """As fs.save does, rank by rank in one process: writers, then a manifest from what they wrote."""
    from fullshard.checkpoint.format.checksums import join
    from fullshard.checkpoint.format.manifest import Count, FileRecord, Manifest, to_bytes
    from fullshard.checkpoint.saving.writing import RankWriter, plan_files

    folder.mkdir(parents=True)
    grid = [(rank, replica) for replica in range(replicas) for rank in range(ranks_)]
    kinds = {"model": "", "optimizer": ".exp_avg"}
    plans = {
        kind: plan_files(kind, [h.tensor for h in _held(1, 0, 1, 0, key)]) for kind, key in kinds.items()
    }
    writers = [RankWriter(folder, PLAN_BLOCK) for _ in grid]
    if not parts:
        writers[0].create(plan for found in plans.values() for plan in found)
    for index, (writer, (rank, replica)) in enumerate(zip(writers, grid, strict=True)):
        held = {kind: _held(ranks_, rank, replicas, replica, key) for kind, key in kinds.items()}
        if parts:
            writer.write_parts(f"part-{index:05}.safetensors", held)
        else:
            for kind in kinds:
                writer.write_shared(plans[kind], held[kind], kind)
    sizes = {name: size for writer in writers for name, size in writer.written.sizes.items()}
    if not parts:
        sizes |= {plan.name: plan.size_bytes for found in plans.values() for plan in found}
    records = {}
    for name, size in sizes.items():
        pieces = [writer.written.pieces[name] for writer in writers if name in writer.written.pieces]
        records[name] = FileRecord(size, tuple(join(name, pieces, size, PLAN_BLOCK)))
    elements = sum(math.prod(shape) for unit in UNITS for _, shape in unit)
    assert sum(writer.written.elements["model"] for writer in writers) == elements
    count = Count(sum(map(len, UNITS)), elements)
    own = {name: tuple(found) for writer in writers for name, found in writer.written.parts.items()}
    found = Manifest(
        id="plan", saved_at_ns=1, software={}, layout={}, block_bytes=PLAN_BLOCK, files=records,
        model=count, optimizer=count, parts=own,
    )  # fmt: skip
    (folder / "fullshard.json").write_bytes(to_bytes(found))


def _read_plan(folder: Path, ranks_: int) -> dict[str, Tensor]:
    """As fs.load does, rank by rank: each reads its own elements of every tensor, from checked blocks."""
    from fullshard.checkpoint.loading.opening import open_checkpoint
    from fullshard.plan.layout import lay_out

    whole: dict[str, Tensor] = {}
    for rank in range(ranks_):
        source = open_checkpoint(folder)
        jobs = []
        for key, stored in ((k, s) for k, s in (("", source.model), (".exp_avg", source.optimizer))):
            for unit in UNITS:
                layout = lay_out([(n, s, tuple(range(len(s)))) for n, s in unit], ranks_, 4)
                for piece in layout.pieces:
                    found = stored[f"{piece.name}{key}"]
                    start, stop = layout.kept(piece, rank)
                    source.want(found, start, stop)
                    jobs.append((found, start, stop))
        source.blocks.verify()
        for found, start, stop in jobs:
            name, tensor = found.tensor.name, found.tensor
            into = whole.setdefault(name, torch.zeros(tensor.shape, dtype=tensor.dtype))
            source.read(found, start, stop, into.view(-1)[start:stop])
        source.close()
    return whole


@pytest.mark.parametrize("parts", [False, True], ids=["shared", "parts"])
@pytest.mark.parametrize(("saved_on", "replicas"), [(n, 1) for n in COUNTS] + [(2, 2), (3, 2), (1, 4)])
def test_plan_of_every_pair_of_rank_counts_moves_every_bit(
    tmp_path: Path, saved_on: int, replicas: int, parts: bool
) -> None:
    folder = tmp_path / "saved"
    _write_plan(folder, saved_on, replicas, parts)
    for loaded_on in COUNTS:
        found = _read_plan(folder, loaded_on)
        assert painted(found) == [], f"{saved_on} x {replicas} ranks to {loaded_on}"
        assert len(found) == 2 * sum(map(len, UNITS))
    if not parts:
        assert painted(tensors_of(folder, "model") | tensors_of(folder, "optimizer")) == []


# --- any strategy, precision, units --------------------------------------------------------------------

VARIANTS: dict[str, dict[str, Any]] = {
    "zero3": {},
    "zero2": {"strategy": "zero2"},
    "zero1": {"strategy": "zero1"},
    "replicate": {"strategy": "replicate"},
    "hybrid": {"strategy": "hybrid", "mesh": (2, 2)},
    "zero3 on nodes": {"strategy": "zero3", "mesh": (2, 2)},
    "replicate on nodes": {"strategy": "replicate", "mesh": (2, 2)},
}


def _between(
    root: Path, variants: dict[str, dict[str, Any]], files: str = "auto", targets: int = 1
) -> dict[str, list[str]]:
    """Save with every variant, load each with the next ones; what was wrong, by pair."""
    import fullshard as fs
    from fullshard.checkpoint.saving import writing

    usual = writing.FILE_BYTES
    writing.FILE_BYTES, files = (900, "shared") if files == "several" else (usual, files)
    models = {name: shard(**(IGNORE | options)) for name, options in variants.items()}
    optimizers = {name: trained(model) for name, model in models.items()}
    for name, model in models.items():
        paint(model, optimizers[name])
        fs.save(root / name, model, optimizers[name], files=files)
    writing.FILE_BYTES = usual
    found, names = {}, list(variants)
    for place, source in enumerate(names):
        for name in (names[(place + step) % len(names)] for step in range(1, targets + 1)):
            model = models[name]
            scramble(model, optimizers[name])
            notes = load(root / source, model, optimizers[name]).notes
            state = whole_state(model, optimizers[name])
            del state["scratch"]
            found[f"{source} to {name}"] = [*painted(state), *notes]
    return found


@pytest.mark.parametrize(
    "targets", [1, pytest.param(len(VARIANTS), marks=pytest.mark.long)], ids=["next", "all"]
)
def test_checkpoint_of_each_strategy_loads_with_others(tmp_path: Path, targets: int) -> None:
    for found in ranks.run(_between, 4, tmp_path, VARIANTS, "auto", targets, timeout_s=240):
        assert len(found) == len(VARIANTS) * targets
        assert {pair: wrong for pair, wrong in found.items() if wrong} == {}
    for name in VARIANTS:
        assert painted(tensors_of(tmp_path / name, "model")) == []
        assert painted(tensors_of(tmp_path / name, "optimizer")) == []


def _is_block(module: nn.Module) -> bool:
    return isinstance(module, Block)


def _is_nothing(_: nn.Module) -> bool:
    return False


UNITS_CHOSEN: dict[str, dict[str, Any]] = {
    "found": {"units": None},
    "blocks": {"units": Block},
    "by a function": {"units": _is_block},
    "linears": {"units": nn.Linear},
    "one": {"units": _is_nothing},
    "replicated": {"units": Block, "strategy": "replicate"},
    "nothing ignored": {"ignore": ()},
}


@tables.some("files", ["shared", "parts", "several"], "several")
def test_checkpoint_of_any_units_loads_with_others(tmp_path: Path, files: str) -> None:
    for found in ranks.run(_between, 2, tmp_path, UNITS_CHOSEN, files, timeout_s=120):
        assert len(found) == len(UNITS_CHOSEN)
        assert {pair: wrong for pair, wrong in found.items() if wrong} == {}
    count = len(list((tmp_path / "blocks").glob("model-*.safetensors")))
    assert (count > 2) == (files == "several")


PRECISIONS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (torch.float32, {}),
    "bf16 over fp32": (torch.float32, {"precision": "bf16"}),
    "pure bf16": (torch.bfloat16, {}),
    "pure fp16": (torch.float16, {}),
    "fp64": (torch.float64, {}),
}


def _between_precisions(root: Path) -> dict[tuple[str, str], Any]:
    import fullshard as fs

    models = {name: shard(partial(Plain, dtype), **said) for name, (dtype, said) in PRECISIONS.items()}
    for name, model in models.items():
        optimizer = trained(model)
        paint(model, optimizer)
        fs.save(root / name, model, optimizer)
    found = {}
    for number, (source, (name, model)) in enumerate(itertools.product(PRECISIONS, models.items())):
        # With state of its own and without, in turn.
        optimizer = trained(model) if number % 2 else adamw(model.parameters())
        notes = load(root / source, model, optimizer).notes
        state = whole_state(model, optimizer)
        stored = PRECISIONS[source][0]
        wrong = [n for n, v in state.items() if not reference.bitwise(v, _cast(n, v, stored))]
        model(torch.randn(4, WIDTH)).backward()
        optimizer.step()  # and it can go on
        optimizer.zero_grad()
        found[source, name] = wrong, notes
    return found


def _cast(name: str, value: Tensor, stored: torch.dtype) -> Tensor:
    """The painted value as it was stored, in the dtype that it has here."""
    if name.endswith(".step"):
        return torch.tensor(3.0 + len(name) - 5)
    if not value.is_floating_point():
        return pattern(name, value.shape, value.dtype)
    return pattern(name, value.shape, stored).to(value.dtype)


def test_checkpoint_of_any_precision_loads_with_any_other_and_says_where_it_rounds(tmp_path: Path) -> None:
    for found in ranks.run(_between_precisions, 2, tmp_path, timeout_s=120):
        assert len(found) == len(PRECISIONS) ** 2
        for (source, name), (wrong, notes) in found.items():
            assert wrong == [], f"{source} to {name}"
            saved, here = PRECISIONS[source][0], PRECISIONS[name][0]
            exact = saved == here or (here.itemsize > saved.itemsize)
            rounded = f"values stored as {saved} were rounded to {here}"
            assert notes == (() if exact else (rounded,)), f"{source} to {name}"


# --- what is trained changes ---------------------------------------------------------------------------


def _frozen(
    root: Path, trainable: bool, save: bool, all_in: bool
) -> tuple[list[str], tuple[str, ...], list[str]]:
    """A run in which the first block is frozen or not; with the frozen ones in the optimizer or not."""
    import fullshard as fs

    model = build(Plain)
    for parameter in model.blocks[0].parameters():
        parameter.requires_grad_(trainable)
    model = fs.shard(model)
    chosen = [p for p in model.parameters() if all_in or p.requires_grad]
    optimizer = adamw(chosen)
    if save:
        trained_with(model, optimizer)
        paint(model, optimizer)
        fs.save(root, model, optimizer)
        return [], (), []
    loaded = load(root, model, optimizer)
    state = whole_state(model, optimizer)
    trained_with(model, optimizer)
    return painted(state), loaded.notes, sorted(n for n in state if n.endswith("exp_avg"))


def trained_with(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(4, WIDTH)).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("all_in", [False, True], ids=["only what trains", "all in the optimizer"])
@pytest.mark.parametrize("first", [False, True], ids=["frozen first", "trainable first"])
def test_state_follows_what_is_trained_now_and_the_notes_say_so(
    tmp_path: Path, first: bool, all_in: bool
) -> None:
    path = tmp_path / "saved"
    ranks.run(_frozen, 2, path, first, True, all_in, timeout_s=60)
    block = [f"blocks.0.{n}" for n, _ in Block().named_parameters()]
    others = [n for n, _ in Plain().named_parameters() if n not in block]
    for wrong, notes, state in ranks.run(_frozen, 2, path, not first, False, all_in, timeout_s=60):
        assert wrong == []
        loaded = [*others, *block] if first and all_in else others
        assert state == sorted(f"{n}.exp_avg" for n in loaded)
        if all_in:
            assert notes == ()  # in a group then and now; those that had no state have none
        elif first:
            assert len(notes) == 1
            assert "was left out: they are not in this optimizer" in notes[0]
            assert all(repr(n) in notes[0] for n in block)
        else:
            assert len(notes) == 1
            assert "were not in the saved optimizer: their state starts anew" in notes[0]
            assert all(repr(n) in notes[0] for n in block)


# --- what differs by rank ------------------------------------------------------------------------------


class Apart(Plain):
    """Statistics, an ignored parameter and a module's own state, that every rank has for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.lonely = nn.Parameter(torch.zeros(3, 2))
        self.memory = Remembering()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * (1 + my_rank())) + self.lonely.square().sum()


def _apart(root: Path, save: bool) -> Any:
    import fullshard as fs

    model = shard(Apart, ignore=["lonely"])
    optimizer = adamw(model.parameters())
    if save:
        model.memory.seen = {"rank": my_rank()}
        with torch.no_grad():
            model.lonely.fill_(my_rank() + 1.0)
        for _ in range(2):
            model(torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(my_rank()))).backward()
            optimizer.step()
            optimizer.zero_grad()
        fs.save(root, model, optimizer)
        notes = ()
    else:
        notes = load(root, model, optimizer).notes
    state = optimizer.state[model.lonely]
    values = {"lonely": model.lonely, "exp_avg": state["exp_avg"], "step": state["step"]}
    values["memory"] = torch.tensor(model.memory.seen["rank"])
    return {n: v.detach().clone() for n, v in (values | dict(model.named_buffers())).items()}, notes


def test_what_differs_by_rank_goes_back_to_each_or_the_first_ones_to_all(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    saved = [values for values, _ in ranks.run(_apart, 2, path, True, timeout_s=60)]
    differ = [n for n in saved[0] if not torch.equal(saved[0][n], saved[1][n])]
    assert sorted(differ) == ["exp_avg", "lonely", "memory", "norm.running_mean", "norm.running_var"]
    for (values, notes), own in zip(ranks.run(_apart, 2, path, False, timeout_s=60), saved, strict=True):
        assert notes == ()
        assert all(reference.bitwise(values[n], own[n]) for n in own)
    for values, notes in ranks.run(_apart, 3, path, False, timeout_s=60):
        assert all(reference.bitwise(values[n], saved[0][n]) for n in values)
        said = [note for note in notes if "the first rank's were loaded" in note]
        assert len(said) == 1
        assert all(name in said[0] for name in ("lonely", "memory", "norm.running_mean"))
    plain = tensors_of(path, "model")
    assert all(reference.bitwise(plain[n], saved[0][n]) for n in differ if n not in ("exp_avg", "memory"))


def _untied(root: Path) -> tuple[list[str], bool]:
    """A tied tensor is stored once; a model in which it is two gets it twice."""
    import fullshard as fs

    model = shard(Tied)
    paint(model)
    fs.save(root, model)
    other = shard(TwoHeads)
    notes = load(root, other).notes
    found = whole_state(other)
    same = reference.bitwise(found["one.weight"], pattern("one.weight", (3, WIDTH), torch.float32))
    return list(notes), same and reference.bitwise(found["one.weight"], found["other.weight"])


def test_tied_tensor_loads_into_a_model_that_has_two_of_it(tmp_path: Path) -> None:
    for notes, same in ranks.run(_untied, 2, tmp_path / "saved", timeout_s=60):
        assert notes == []
        assert same


# --- another model -------------------------------------------------------------------------------------


class Bigger(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks.append(Block())


class Wider(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].up = nn.Linear(WIDTH, 12)
        self.blocks[1].down = nn.Linear(12, WIDTH)


class Counted(Plain):
    """A buffer of another kind of dtype."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(3, dtype=dtype))


class WithMemory(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.memory = Remembering()


class TwoHeads(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(WIDTH, 3, bias=False)
        self.other = nn.Linear(WIDTH, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (self.one(x) + self.other(x)).square().mean()


class Tied(TwoHeads):
    def __init__(self) -> None:
        super().__init__()
        self.other.weight = self.one.weight


class InWholeNumbers(Counted):
    def __init__(self) -> None:
        super().__init__(torch.int64)


# Saved from, loaded into, what a strict load is refused with (nothing: it is not), what notes say (None: the
# other load is refused, too).
OTHERS: list[tuple[type[nn.Module], type[nn.Module], str, str | None]] = [
    (Plain, Bigger, "has no 'blocks.2.up.weight'", "left as they were: 'blocks.2.up.weight'"),
    (Bigger, Plain, "has 'blocks.2.down.bias'", "but not in the model: 'blocks.2.down.bias'"),
    (Plain, Counted, "has no 'count', which the model has", "left as they were: 'count'"),
    (Counted, Plain, "has 'count', which the model does not have", "but not in the model: 'count'"),
    (Plain, WithMemory, "", "extra state of 'memory' is not in the checkpoint: left as it was"),
    (WithMemory, Plain, "", "extra state of 'memory' belongs to no module here: left out"),
    (TwoHeads, Tied, "'one.weight', 'other.weight' are one tensor in the model", "'one.weight' was loaded"),
    (Plain, Wider, "'blocks.1.up.weight' has shape (11, 6)", None),
    (Wider, Plain, "'blocks.1.up.weight' has shape (12, 6)", None),
    (Counted, InWholeNumbers, "'count' is stored as torch.float32", None),
    (InWholeNumbers, Counted, "'count' is stored as torch.int64", None),
]


def _other_models(root: Path) -> list[tuple[list[str], list[str], list[str]]]:
    """What each load said, which tensors are still as before, and which are those of the checkpoint."""
    import fullshard as fs

    found = []
    for saved, here, _, _ in OTHERS:
        model = shard(saved)
        optimizer = trained(model)
        paint(model, optimizer)
        fs.save(root / saved.__name__, model, optimizer)
        model = shard(here)
        optimizer = trained(model)
        for strict in (True, False):
            paint(model, optimizer, "other ")
            try:
                said = list(load(root / saved.__name__, model, optimizer, strict=strict).notes)
            except RuntimeError as error:
                said = [f"{type(error).__name__}: {error}"]
            state = whole_state(model, optimizer)
            changed, wrong = painted(state, "other "), painted(state)
            found.append((said, [n for n in state if n not in changed], [n for n in state if n not in wrong]))
    return found


def test_checkpoint_of_another_model_is_refused_by_name_and_changes_nothing(tmp_path: Path) -> None:
    for found in ranks.run(_other_models, 2, tmp_path, timeout_s=120):
        answers = iter(found)
        for saved, here, message, note in OTHERS:
            for strict in (True, False):
                (said, unchanged, loaded), what = next(answers), f"{saved.__name__} into {here.__name__}"
                if (strict and message) or note is None:
                    assert said[0].startswith("CheckpointError: rank"), what
                    assert message in said[0], what
                    assert loaded == [], what
                    assert unchanged, what
                    continue
                assert note in "; ".join(said), what
                tensors = {n for n, _ in (*here().named_parameters(), *here().named_buffers())}
                theirs = tensors & set(saved().state_dict())
                assert set(loaded) & tensors == theirs, what
                assert set(unchanged) & tensors == tensors - theirs, what
