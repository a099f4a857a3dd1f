"""torch.distributed.checkpoint: fs.load reads what FSDP2 and plain processes save, and they what we save."""

from __future__ import annotations

import errno
import io
import random
import warnings
import zipfile
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as stock_state
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

import checkpoint_crashes as crashes
import engines
import ranks
import reference
import tables
from cases import refusal
from dcp_runs import Whole, adamw, our_whole, quietly
from engines import WIDTH, Net, batch, build, loss_of, my_rank

STEPS = 2
NESTINGS = ["nested", "app", "flattened", "any prefix", "model alone", "many files"]
EXTRA = {"step": 10, "sampler": {"epoch": 3, "seen": [1, 2, 3]}, "noise": torch.arange(5.0)}


class Image(Net):
    """Blocks, a convolution, a norm with buffers: what FSDP2 takes, in sizes that no rank count divides."""

    memory_format = torch.contiguous_format

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3, padding=1).to(memory_format=self.memory_format)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        image = x[:, :6].reshape(-1, 3, 2, 1)
        return super().forward(x) + self.conv(image).mean((2, 3))


class ChannelsLast(Image):
    """The same with a weight whose elements lie in memory in another order."""

    memory_format = torch.channels_last


class Odd(ChannelsLast):
    """What FSDP2 does not take: a scalar, an empty parameter; and a tie, bfloat16, an extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.none = nn.Parameter(torch.empty(0, 3))
        self.low = nn.Parameter(torch.linspace(0, 1, WIDTH).bfloat16())
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.second(self.first(x)) * self.scale + self.low.float() + self.none.sum()
        return super().forward(x)

    def get_extra_state(self) -> Any:
        return {"calls": self.calls, "names": ["a", "b"]}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]
        assert state["names"] == ["a", "b"]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = loss_of(model, batch(step, my_rank()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def their_whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> Whole:
    """Everything of FSDP2's, or of a plain model's, by its own full state dict; the same on every rank."""
    options = stock_state.StateDictOptions(full_state_dict=True, broadcast_from_rank0=False)
    values, state = stock_state.get_state_dict(model, optimizer, options=options)
    states = {n: {k: v.clone() for k, v in by.items()} for n, by in state["state"].items()}
    return {n: v.detach().clone() for n, v in values.items() if isinstance(v, Tensor)}, states


def assert_same(found: Whole, expected: Whole) -> None:
    for what, ours, theirs in zip(("model", "optimizer"), found, expected, strict=True):
        assert ours.keys() == theirs.keys(), f"{what}: {sorted(ours.keys() ^ theirs.keys())}"
    for name, value in expected[0].items():
        assert reference.bitwise(found[0][name], value), name
    for name, by in expected[1].items():
        assert found[1][name].keys() == by.keys(), name
        for key, value in by.items():
            assert reference.bitwise(found[1][name][key], value), f"{name}.{key}"


def options_of(optimizer: torch.optim.Optimizer) -> list[tuple[Any, ...]]:
    return [(g["lr"], g["weight_decay"], g["betas"], g["amsgrad"]) for g in optimizer.param_groups]


# --- FSDP2 saves, we load ------------------------------------------------------------------------------


def _fsdp2_saves(folder: str, names: list[str]) -> dict[str, Any]:
    model = engines.shard("fsdp2", build(Image))
    optimizer = adamw(model)
    train(model, optimizer, range(STEPS))
    values, state = stock_state.get_state_dict(model, optimizer)
    flat = stock_state.get_optimizer_state_dict(
        model, optimizer, options=stock_state.StateDictOptions(flatten_optimizer_state_dict=True)
    )
    trees = {
        "nested": {"model": values, "optim": state, **EXTRA},
        "many files": {"model": values, "optim": state, **EXTRA},
        "app": {"app": {"model": values, "optim": state}, "step": 10},
        "flattened": {"model": values, "optimizer": flat},
        "any prefix": {"a": {"b": values}, "c": {"d": state}},
        "model alone": values,
    }
    for name in names:
        writer = stock.FileSystemWriter(f"{folder}/{name}", single_file_per_rank=name != "many files")
        stock.save(dict(trees[name]), storage_writer=writer)
    found = {"whole": their_whole(model, optimizer), "options": options_of(optimizer)}
    found["losses"] = train(model, optimizer, range(STEPS, STEPS + 2))
    return found


@pytest.fixture(scope="module")
def fsdp2(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("fsdp2")
    found = ranks.run(_fsdp2_saves, 2, str(folder), NESTINGS, timeout_s=120)
    # A norm's statistics differ by rank there; what counts is whose were written.
    state = {"model": {n: b for n, b in build(Image).state_dict().items() if n.startswith("norm.")}}
    quietly(stock.load, state, checkpoint_id=str(folder / "nested"), no_dist=True)
    for rank in found:
        rank["whole"][0].update(state["model"])
    return folder, found


def _we_load(folder: str, names: list[str], make: type[nn.Module]) -> dict[str, Any]:
    import fullshard as fs

    found: dict[str, Any] = {}
    for name in names:
        model = fs.shard(build(make, seed=7))
        optimizer = None if name == "model alone" else adamw(build(make))
        if optimizer is not None:
            optimizer = adamw(model)
            for group in optimizer.param_groups:
                group["lr"] = group["weight_decay"] = 0.5
        loaded = fs.load(f"{folder}/{name}", model, optimizer)
        found[name] = {"whole": our_whole(model, optimizer), "extra": dict(loaded), "notes": loaded.notes}
        if optimizer is not None:
            found[name]["options"] = options_of(optimizer)
        if name == "nested" and optimizer is not None:
            found["losses"] = train(model, optimizer, range(STEPS, STEPS + 2))
    return found


@tables.some("num_ranks", [1, 2, 3], 1, 3)
def test_what_fsdp2_saved_on_two_ranks_is_loaded_bit_for_bit(
    num_ranks: int, fsdp2: tuple[Path, list[dict[str, Any]]]
) -> None:
    folder, theirs = fsdp2
    values, states = theirs[0]["whole"]
    make = ChannelsLast if num_ranks == 3 else Image
    for found in ranks.run(_we_load, num_ranks, str(folder), NESTINGS, make, timeout_s=120):
        for name in NESTINGS:
            assert_same(found[name]["whole"], (values, states if name != "model alone" else {}))
            assert found[name]["notes"] == ()
            if name != "model alone":
                assert found[name]["options"] == theirs[0]["options"], name
        for name in ("nested", "many files"):
            extra = found[name]["extra"]
            assert torch.equal(extra.pop("noise"), EXTRA["noise"])
            assert extra == {k: v for k, v in EXTRA.items() if k != "noise"}
        assert found["app"]["extra"] == {"step": 10}
        assert found["model alone"]["extra"] == {}


@tables.some("num_ranks", [1, 3], 3)
def test_what_fsdp2_saved_on_another_number_of_ranks_is_loaded_on_two(num_ranks: int, tmp_path: Path) -> None:
    values, states = ranks.run(_fsdp2_saves, num_ranks, str(tmp_path), ["flattened"])[0]["whole"]
    for found in ranks.run(_we_load, 2, str(tmp_path), ["flattened"], ChannelsLast):
        found["flattened"]["whole"][0].update({n: v for n, v in values.items() if n.startswith("norm.")})
        assert_same(found["flattened"]["whole"], (values, states))


def test_training_goes_on_from_what_fsdp2_saved_as_it_does_there(
    fsdp2: tuple[Path, list[dict[str, Any]]],
) -> None:
    folder, theirs = fsdp2
    ours = ranks.run(_we_load, 2, str(folder), ["nested"], Image)
    for rank in range(2):
        assert ours[rank]["losses"] == pytest.approx(theirs[rank]["losses"], rel=1e-5)


def _stock_loads_into_ours(folder: str) -> Whole:
    import fullshard as fs

    model = fs.shard(build(ChannelsLast, seed=7))
    state = {"model": model.state_dict()}
    stock.load(state, checkpoint_id=f"{folder}/nested")
    model.load_state_dict(state["model"])
    return our_whole(model, None)


def test_stock_load_fills_the_state_dict_of_a_sharded_model(
    fsdp2: tuple[Path, list[dict[str, Any]]],
) -> None:
    folder, theirs = fsdp2
    for found in ranks.run(_stock_loads_into_ours, 3, str(folder)):
        assert_same(found, (theirs[0]["whole"][0], {}))


# --- we save, the stock reader loads -------------------------------------------------------------------


def _we_save(folder: str, make: type[nn.Module], options: dict[str, Any]) -> dict[str, Any]:
    from fullshard.checkpoint import dcp

    if options.get("strategy") in ("hybrid", "zero3"):
        from torch.distributed.device_mesh import init_device_mesh

        torch.distributed.init_process_group("gloo")
        names = ("replicate" if options["strategy"] == "hybrid" else "node", "shard")
        options = options | {"mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=names)}
    model = engines.shard_blocks(build(make), **options)
    optimizer = adamw(model)
    train(model, optimizer, range(STEPS))
    assert dcp.save(folder, model, optimizer, extra=EXTRA) == Path(folder)
    found = {"whole": our_whole(model, optimizer), "options": options_of(optimizer)}
    if my_rank() == 0:
        found["calls"] = getattr(model, "calls", None)
    found["losses"] = train(model, optimizer, range(STEPS, STEPS + 2))
    return found


def plain_reads(folder: str | Path, make: type[nn.Module]) -> dict[str, Any]:
    """A plain model in this process, by the stock reader and set_state_dict; torch only."""
    model = build(make, seed=7)
    optimizer = adamw(model)
    values, state = stock_state.get_state_dict(model, optimizer)
    tree = {
        "model": values,
        "optim": state,
        "step": 0,
        "sampler": {"epoch": 0, "seen": []},
        "noise": torch.zeros(5),
    }
    quietly(stock.load, tree, checkpoint_id=str(folder), no_dist=True)
    stock_state.set_state_dict(
        model, optimizer, model_state_dict=tree["model"], optim_state_dict=tree["optim"]
    )
    extra = {k: tree[k] for k in EXTRA}
    return {
        "whole": their_whole(model, optimizer),
        "options": options_of(optimizer),
        "extra": extra,
        "model": model,
    }


def found_names(folder: Path) -> set[str]:
    return set(stock.FileSystemReader(folder).read_metadata().state_dict_metadata)


def assert_read_as_saved(read: dict[str, Any], saved: dict[str, Any]) -> None:
    values, states = read["whole"]
    found = {n: v for n, v in values.items() if n in saved["whole"][0]}
    assert_same((found, states), saved["whole"])
    assert read["options"] == saved["options"]
    assert torch.equal(read["extra"].pop("noise"), EXTRA["noise"])
    assert read["extra"] == {k: v for k, v in EXTRA.items() if k != "noise"}


@pytest.mark.parametrize(
    ("num_ranks", "options"),
    [
        (1, {}),
        pytest.param(2, {}, marks=pytest.mark.long),
        (3, {}),
        (2, {"strategy": "zero2"}),
        pytest.param(3, {"strategy": "replicate"}, marks=pytest.mark.long),
        (4, {"strategy": "hybrid"}),
        pytest.param(4, {"strategy": "zero3"}, marks=pytest.mark.long),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else "-".join(value.values()) or "one_node",
)
def test_stock_reader_in_one_plain_process_reads_what_we_save(
    num_ranks: int, options: dict[str, Any], tmp_path: Path
) -> None:
    folder = tmp_path / "saved"
    saved = ranks.run(_we_save, num_ranks, str(folder), Odd, options, timeout_s=120)
    read = plain_reads(folder, Odd)
    assert_read_as_saved(read, saved[0])
    assert read["model"].calls == saved[0]["calls"] > 0
    assert read["model"].first.weight is read["model"].second.weight
    files = {p.name for p in folder.iterdir()}
    assert files == {".metadata", *(f"__{rank}_0.distcp" for rank in range(num_ranks))}
    assert {"model.first.weight", "model.second.weight"} < found_names(folder)
    # No rank, and no replica, writes what another has written: an item has some 1.1 KiB beside its numbers.
    found = stock.FileSystemReader(folder).read_metadata()
    numbers = sum(
        chunk.sizes.numel() * kind.properties.dtype.itemsize
        for name, kind in found.state_dict_metadata.items()
        if name != "model.second.weight"  # tied: written once, named twice
        for chunk in getattr(kind, "chunks", ())
    )
    whole = [
        *saved[0]["whole"][0].values(),
        *(v for by in saved[0]["whole"][1].values() for v in by.values()),
    ]
    assert numbers == sum(v.nbytes for v in [*whole, EXTRA["noise"]])
    for index, info in found.storage_data.items():
        if index.offset is not None:  # a tensor: torch.save would write the whole memory that it is a view of
            with (folder / info.relative_path).open("rb") as file:
                file.seek(info.offset)
                archive = zipfile.ZipFile(io.BytesIO(file.read(info.length)))
            kind = found.state_dict_metadata[index.fqn]
            chunk = next(c for c in kind.chunks if c.offsets == index.offset)
            size = chunk.sizes.numel() * kind.properties.dtype.itemsize
            assert archive.getinfo("archive/data/0").file_size == size, index
    places = {(info.relative_path, info.offset): info.length for info in found.storage_data.values()}
    assert sum(places.values()) == sum(p.stat().st_size for p in folder.glob("*.distcp"))


def _fsdp2_loads(folder: str) -> dict[str, Any]:
    model = engines.shard("fsdp2", build(Image, seed=7))
    optimizer = adamw(model)
    values, state = stock_state.get_state_dict(model, optimizer)
    tree = {"model": values, "optim": state}
    stock.load(tree, checkpoint_id=folder)
    stock_state.set_state_dict(
        model, optimizer, model_state_dict=tree["model"], optim_state_dict=tree["optim"]
    )
    found = {"whole": their_whole(model, optimizer), "options": options_of(optimizer)}
    found["losses"] = train(model, optimizer, range(STEPS, STEPS + 2))
    return found


def test_fsdp2_reads_what_we_save_and_trains_on_alike(tmp_path: Path) -> None:
    saved = ranks.run(_we_save, 2, str(tmp_path / "saved"), ChannelsLast, {})
    for rank, found in enumerate(ranks.run(_fsdp2_loads, 2, str(tmp_path / "saved"))):
        buffers = {n: v for n, v in saved[0]["whole"][0].items() if "running" in n or "tracked" in n}
        assert_same(found["whole"], (saved[rank]["whole"][0] | buffers, saved[rank]["whole"][1]))
        assert found["options"] == saved[rank]["options"]
        assert found["losses"] == pytest.approx(saved[rank]["losses"], rel=1e-5)


def _save_and_load_elsewhere(folder: str, strategy: str) -> dict[str, Any]:
    import fullshard as fs

    model = engines.shard_blocks(build(Odd, seed=7), strategy=strategy)
    optimizer = adamw(model)
    loaded = fs.load(folder, model, optimizer)
    return {
        "whole": our_whole(model, optimizer),
        "options": options_of(optimizer),
        "extra": dict(loaded),
        "notes": loaded.notes,
        "calls": model.calls,
    }


@pytest.mark.parametrize(("num_ranks", "strategy"), [(1, "zero3"), (3, "zero3"), (2, "replicate")])
def test_what_we_save_so_is_loaded_on_other_ranks(num_ranks: int, strategy: str, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    saved = ranks.run(_we_save, 2, str(folder), Odd, {})
    for found in ranks.run(_save_and_load_elsewhere, num_ranks, str(folder), strategy):
        assert found["notes"] == ()
        assert found["calls"] == saved[0]["calls"]
        assert_read_as_saved(found, saved[0])


# --- one plain process saves ---------------------------------------------------------------------------


def _plain() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build(Odd)
    optimizer = adamw(model)
    for step in range(STEPS):
        loss_of(model, batch(step, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def _save_numbered(folder: Path, values: Any, optimizer: torch.optim.Optimizer, state: Any) -> None:
    """What optimizer.state_dict() says: parameters by number, group by group. And DDP's prefix."""
    values = {f"module.{n}": v for n, v in values.items()}
    stock.save({"model": values, "optim": optimizer.state_dict()}, checkpoint_id=folder)


def _save_as_before_2_4(folder: Path, values: Any, optimizer: torch.optim.Optimizer, state: Any) -> None:
    from torch.distributed.checkpoint import _version

    _version._derived_version = "2_3"
    try:
        stock.save({"model": values, "optim": state}, checkpoint_id=folder)
    finally:
        _version._derived_version = None
    assert "optim.param_groups" in found_names(folder)


def _save_in_safetensors(folder: Path, values: Any, optimizer: torch.optim.Optimizer, state: Any) -> None:
    from torch.distributed.checkpoint.filesystem import SerializationFormat

    values = {n: v.clone().contiguous() if isinstance(v, Tensor) else v for n, v in values.items()}
    for by in state["state"].values():
        by |= {k: v.contiguous() for k, v in by.items()}  # safetensors takes no other order, and no ties
    writer = stock.FileSystemWriter(folder, serialization_format=SerializationFormat.SAFETENSORS)
    stock.save({"model": values, "optim": state}, storage_writer=writer)


def _save_without_checksums(folder: Path, values: Any, optimizer: torch.optim.Optimizer, state: Any) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        stock.save({"model": values, "optim": state}, checkpoint_id=folder)
    finally:
        torch.serialization.set_crc32_options(True)


def _save_with_two_threads(folder: Path, values: Any, optimizer: torch.optim.Optimizer, state: Any) -> None:
    stock.save(
        {"model": values, "optim": state}, storage_writer=stock.FileSystemWriter(folder, thread_count=2)
    )


def _save_with_an_average(folder: Path, values: Any, optimizer: torch.optim.Optimizer, state: Any) -> None:
    averaged = {n: v * 0 if isinstance(v, Tensor) else v for n, v in values.items()}
    tree = {"averaged": averaged, "model": values, "optim": state, "other": {"state": {}, "param_groups": []}}
    stock.save(tree, checkpoint_id=folder)


SAVERS = [
    _save_numbered,
    _save_as_before_2_4,
    _save_in_safetensors,
    _save_without_checksums,
    _save_with_two_threads,
    _save_with_an_average,
]


def _load_each(folders: list[str]) -> list[tuple[Whole, list[Any], int]]:
    import fullshard as fs

    found = []
    for folder in folders:
        model = fs.shard(build(Odd, seed=7))
        optimizer = adamw(model)
        fs.load(folder, model, optimizer)
        found.append((our_whole(model, optimizer), options_of(optimizer), model.calls))
    return found


def test_every_way_in_which_one_process_saves_is_read(tmp_path: Path) -> None:
    model, optimizer = _plain()
    values, state = stock_state.get_state_dict(model, optimizer)
    for saver in SAVERS:
        quietly(saver, tmp_path / saver.__name__, values, optimizer, state)
    expected, states = their_whole(model, optimizer)
    expected.pop("second.weight")  # the other name of a tie
    for found in ranks.run(_load_each, 2, [str(tmp_path / saver.__name__) for saver in SAVERS]):
        for saver, (whole, options, calls) in zip(SAVERS, found, strict=True):
            try:
                assert_same(whole, (expected, states))
                assert options == options_of(optimizer)
                assert calls == STEPS
            except AssertionError as error:
                raise AssertionError(f"{saver.__name__}: {error}") from error


class Cut:
    """A tensor that one process writes in rectangles, by the hooks that the stock writer asks."""

    def __init__(self, whole: Tensor, chance: random.Random) -> None:
        self.whole, self._chance = whole, chance
        edges = []
        for size in whole.shape:
            inner = chance.sample(range(1, size), chance.randrange(min(size, 4))) if size > 1 else []
            edges.append(list(pairwise([0, *sorted(inner), size])))
        self.boxes = list(product(*edges))
        chance.shuffle(self.boxes)

    def tensor(self) -> Tensor:
        tensor: Any = self.whole.clone()
        tensor.__create_write_items__, tensor.__get_tensor_shard__ = self.items, self.part
        return tensor  # type: ignore[no-any-return]

    def _chunk(self, box: Any) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(a for a, _ in box), torch.Size(b - a for a, b in box))

    def items(self, fqn: str, value: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.whole.dtype)
        return [
            WriteItem(
                MetadataIndex(fqn, self._chunk(box).offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(self._chunk(box), properties, self.whole.shape),
            )
            for box in self.boxes
        ]

    def part(self, index: MetadataIndex) -> Tensor:
        box = next(box for box in self.boxes if self._chunk(box).offsets == index.offset)
        part = self.whole[tuple(slice(a, b) for a, b in box)]
        order = self._chance.sample(range(part.dim()), part.dim())  # its memory in any order
        return part.permute(order).contiguous().permute([order.index(d) for d in range(part.dim())])


def test_any_rectangles_in_any_memory_order_are_read_in_any_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fullshard.checkpoint import dcp

    chance = random.Random(0)
    dtypes = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint16)
    values = {}
    for index in range(40):
        shape = [chance.randrange(1, 9) for _ in range(chance.randrange(5))]
        values[f"t{index}"] = (torch.randn(shape) * 9).to(dtypes[index % len(dtypes)])
    cut = {name: Cut(value, chance) for name, value in values.items()}
    quietly(
        stock.save,
        {name: c.tensor() for name, c in cut.items()},
        checkpoint_id=str(tmp_path / "x"),
        no_dist=True,
    )
    assert sum(len(c.boxes) for c in cut.values()) > 300
    monkeypatch.setattr("fullshard.checkpoint.dcp.archives.CHUNK_BYTES", 64)
    source: Any = dcp.open_dcp(tmp_path / "x")
    for name, value in values.items():
        stored = source._index.tensors[name]
        for _ in range(5):
            start, stop = sorted(chance.choices(range(value.numel() + 1), k=2))
            source.want(stored, start, stop)
            source.blocks.verify()
            out = torch.empty(stop - start, dtype=value.dtype)
            source.read(stored, start, stop, out)
            assert reference.bitwise(out, value.flatten()[start:stop]), (name, start, stop)
    source.close()


def _load_odd_ones(folder: str) -> dict[str, Any]:
    import fullshard as fs

    found: dict[str, Any] = {}
    model = fs.shard(build(Image))
    optimizer = adamw(model)
    before = our_whole(model, None)
    for name in ("two models", "two optimizers", "numbered otherwise", "pickled option", "nested state"):
        found[name] = refusal(lambda name=name: fs.load(f"{folder}/{name}", model, optimizer))
    found["other optimizer"] = refusal(
        lambda: fs.load(f"{folder}/large", model, torch.optim.SGD(model.parameters(), lr=1.0))
    )
    found["no optimizer"] = refusal(lambda: fs.load(f"{folder}/no optimizer", model, optimizer))
    after = our_whole(model, None)
    found["unchanged"] = all(reference.bitwise(before[0][n], after[0][n]) for n in before[0])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loaded = fs.load(f"{folder}/large", model, optimizer)
    found["notes"], found["extra"] = loaded.notes, dict(loaded)
    # Python's own may come at any time, of a file that an earlier run left open.
    found["warned"] = [str(w.message) for w in caught if w.category is UserWarning]
    return found


class Pickled:
    """Something that only code can make."""


def test_what_cannot_be_told_apart_or_read_is_refused_or_left_out_and_said(tmp_path: Path) -> None:
    model = build(Image)
    optimizer = adamw(model)
    values, state = stock_state.get_state_dict(model, optimizer)
    one_group = torch.optim.AdamW(model.parameters())
    stock_state.get_optimizer_state_dict(model, one_group)  # makes its state
    name, counts = next(iter(state["state"])), [len(g["params"]) for g in state["param_groups"]]
    bad_group = [state["param_groups"][0] | {"lr": Pickled()}, *state["param_groups"][1:]]
    deeper = {
        n: by | ({"inner": {"a": torch.ones(1)}} if n == name else {}) for n, by in state["state"].items()
    }
    trees: dict[str, Any] = {
        "two models": {"student": values, "teacher": values},
        "two optimizers": {"model": values, "a": state, "b": state},
        "numbered otherwise": {"model": values, "optim": one_group.state_dict()},
        "pickled option": {"model": values, "optim": {"state": state["state"], "param_groups": bad_group}},
        "nested state": {"model": values, "optim": {"state": deeper, "param_groups": state["param_groups"]}},
        "no optimizer": {"model": values, "step": 3},
        "large": {"model": values, "optim": state, "big": torch.ones(2**19), "object": Pickled(), "step": 3},
    }
    for folder, tree in trees.items():
        quietly(stock.save, tree, checkpoint_id=str(tmp_path / folder), no_dist=True)
    for rank, found in enumerate(ranks.run(_load_odd_ones, 2, str(tmp_path))):
        for what, words in {
            "two models": ("'student.'", "'teacher.'"),
            "two optimizers": ("several optimizers", "'a.'", "'b.'"),
            "numbered otherwise": (f"groups of [{sum(counts)}]", f"groups of {counts}"),
            "pickled option": ("optim.param_groups.0.lr", "without running code"),
            "nested state": (f"optim.state.{name}.inner.a",),
            "no optimizer": ("holds no optimizer state",),
            "other optimizer": ("another optimizer than SGD", "'betas'", "'momentum'"),
        }.items():
            kind, message, _ = found[what]
            assert kind == "CheckpointError", what
            for word in words:
                assert word in message, (what, message)
        assert found["unchanged"]
        assert found["extra"] == {"step": 3}
        assert found["notes"] == ("large tensors or pickled objects that were not read: 'object', 'big'",)
        assert found["warned"] == (list(found["notes"]) if rank == 0 else [])


# --- folders, disks, ranks -----------------------------------------------------------------------------


def _save_twice(folder: str) -> dict[str, Any]:
    import fullshard as fs
    from fullshard.checkpoint import dcp, files

    model = fs.shard(build(Net))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    target, found = Path(folder) / "saved", {}
    dcp.save(target, model, optimizer)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(2.0)
    dcp.save(target, model, optimizer)
    found["other things"] = refusal(lambda: dcp.save(Path(folder) / "precious", model))
    found["names"] = refusal(lambda: dcp.save(target, model, extra={"model": 1}))
    found["objects"] = refusal(lambda: dcp.save(target, model, extra={"f": build}))
    found["paths"] = refusal(lambda: dcp.save(f"{target}-{my_rank()}", model))
    found["foreign"] = refusal(
        lambda: dcp.save(target, model, torch.optim.SGD(build(Net).parameters(), lr=1))
    )

    class Full(files.Disk):
        def open(self, path: Path) -> Any:
            raise OSError(errno.ENOSPC, "No space left on device")

    if my_rank() == 1:
        files.disk = Full()
    try:
        found["full disk on one rank"] = refusal(lambda: dcp.save(target, model, optimizer))
    finally:
        files.disk = files.Disk()
    with crashes.using(crashes.HookedDisk(lambda *_: None, can_exchange=False)):
        found["cannot exchange"] = refusal(lambda: dcp.save(target, model, optimizer))
    with crashes.using(crashes.failing("remove", errno.EACCES)):  # of the folder that was replaced
        dcp.save(target, model, optimizer)
    return found


def test_folder_is_replaced_whole_or_left_as_it_is(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.tex").write_text("years of work")
    (precious / ".metadata").write_text("of something else")
    for found in ranks.run(_save_twice, 2, str(tmp_path)):
        for what, (kind, word) in {
            "other things": ("CheckpointError", "precious"),
            "names": ("CheckpointError", "'model'"),
            "objects": ("CheckpointError", "extra['f']"),
            "paths": ("RankMismatch", "saved-0"),
            "foreign": ("CheckpointError", "does not own"),
            "cannot exchange": ("CheckpointError", "in one step"),
            "full disk on one rank": ("CheckpointError", "No space left on device"),
        }.items():
            assert found[what][0] == kind, (what, found[what])
            assert word in found[what][1], (what, found[what])
        assert "__1_0.distcp" in found["full disk on one rank"][1]
    left, *others = sorted(p.name for p in tmp_path.iterdir())
    assert others == ["precious", "saved"]
    assert left.startswith(".saved.saving-")  # what could not be removed, for a later save
    assert (precious / "thesis.tex").read_text() == "years of work"
    state = {"model": build(Net).state_dict()}
    quietly(stock.load, state, checkpoint_id=str(tmp_path / "saved"), no_dist=True)
    assert all(bool((v == 2.0).all()) for v in state["model"].values())


def _save_ours(folder: str) -> Whole:
    import fullshard as fs

    model = fs.shard(build(Odd))
    optimizer = adamw(model)
    train(model, optimizer, range(STEPS))
    fs.save(folder, model, optimizer, extra=EXTRA | {"own": my_rank()})
    return our_whole(model, optimizer)


def test_checkpoint_of_ours_becomes_one_of_torchs_in_small_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fullshard.checkpoint import dcp
    from fullshard.checkpoint.loading import opening

    saved = ranks.run(_save_ours, 2, str(tmp_path / "ours"))[0]
    monkeypatch.setattr(
        "fullshard.checkpoint.dcp.writing._ITEM_BYTES", 100
    )  # rows of 32 and 52 bytes: most tensors in parts
    sizes = []
    save = torch.save
    monkeypatch.setattr(torch, "save", lambda value, file: (sizes.append(value), save(value, file))[1])
    source = opening.open_checkpoint(tmp_path / "ours")
    dcp.write_folder(source, tmp_path / "theirs")
    source.close()
    assert max(v.nbytes for v in sizes if isinstance(v, Tensor)) <= 100
    read = plain_reads(tmp_path / "theirs", Odd)
    values, states = read["whole"]
    assert_same(({n: v for n, v in values.items() if n in saved[0]}, states), saved)
    assert read["model"].calls == STEPS
    assert torch.equal(read["extra"]["noise"], EXTRA["noise"])
    assert read["extra"]["sampler"] == EXTRA["sampler"]
    assert "own" not in found_names(tmp_path / "theirs")


def test_damaged_checkpoint_of_ours_becomes_none_of_torchs(tmp_path: Path) -> None:
    from fullshard.checkpoint import dcp
    from fullshard.checkpoint.loading import opening
    from fullshard.errors import CheckpointError

    ranks.run(_save_ours, 2, str(tmp_path / "ours"))
    file = tmp_path / "ours" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match="checksum differs"):
        dcp.write_folder(opening.open_checkpoint(tmp_path / "ours"), tmp_path / "theirs")
    assert [p.name for p in tmp_path.iterdir()] == ["ours"]


# --- on a GPU ------------------------------------------------------------------------------------------


def _on_the_gpu(folder: str) -> None:
    import fullshard as fs
    from fullshard.checkpoint import dcp

    def made(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = fs.shard(build(ChannelsLast, seed=seed).cuda())
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        x, y = batch(number, my_rank())
        loss_of(model, (x.cuda(), y.cuda())).backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = made(0)
    step(model, optimizer, 0)
    saved = our_whole(model, optimizer)
    dcp.save(folder, model, optimizer)
    other, its_optimizer = made(7)
    fs.load(folder, other, its_optimizer)
    loaded = our_whole(other, its_optimizer)
    statistics = {n: v for n, v in saved[0].items() if n.startswith("norm.")}  # of the first rank
    assert_same((loaded[0] | statistics, loaded[1]), saved)
    assert all(value.is_cuda for by in its_optimizer.state.values() for value in by.values())
    for each in ((model, optimizer), (other, its_optimizer)):
        step(*each, 1)
    assert_same((our_whole(other, None)[0] | statistics, {}), (our_whole(model, None)[0] | statistics, {}))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_model_on_the_gpu_is_saved_so_and_loaded_bit_for_bit(tmp_path: Path) -> None:
    ranks.run(_on_the_gpu, 2, str(tmp_path / "saved"), init=True, timeout_s=120)
    state = {"model": build(ChannelsLast).state_dict()}
    quietly(stock.load, state, checkpoint_id=str(tmp_path / "saved"), no_dist=True)


# --- crashes -------------------------------------------------------------------------------------------


def _save_recorded(root: str) -> tuple[list[crashes.Step], list[crashes.Step]]:
    import torch.distributed as dist

    from fullshard.checkpoint import dcp

    model, optimizer = crashes.made()
    logs = []
    for number in (1, 2):
        recorder = crashes.Recorder(Path(root))
        crashes.fill(model, optimizer, number)
        with crashes.using(recorder):
            dcp.save(f"{root}/last", model, optimizer)
        dist.barrier()
        if number == 1 and my_rank() == 0:
            crashes.Tree.read(Path(root)).write(Path(f"{root}.before"))
        dist.barrier()
        logs.append(recorder.log)
    return logs[0], logs[1]


def _number_of(folder: Path) -> int:
    """Which of the two saves a folder holds, by the stock reader; anything between them fails."""
    state = {"model": crashes.Stack().state_dict()}
    quietly(stock.load, state, checkpoint_id=str(folder), no_dist=True)
    value = state["model"]["head.weight"]
    number = next(n for n in (1, 2) if reference.bitwise(value, crashes.known("head.weight", value.shape, n)))
    for name, value in state["model"].items():
        assert reference.bitwise(value, crashes.known(name, value.shape, number)), f"{name}, save {number}"
    return number


def test_crash_during_a_save_leaves_the_folder_before_or_after_it_whole(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    recorded = ranks.run(_save_recorded, 2, str(root))
    seen: set[int] = set()
    for number in (0, 1):
        before = crashes.Tree.read(tmp_path / "root.before") if number else crashes.Tree()
        log = crashes.merged([rank[number] for rank in recorded])
        states = {}
        for count in range(len(log) + 1):
            for tree in (
                crashes.after_crash(before, log[:count]),
                *(crashes.after_power_cut(before, log[:count], seed) for seed in range(4)),
            ):
                states[dict(tree.digest()).get("last")] = tree  # what is hidden beside it counts for nothing
        for index, tree in enumerate(states.values()):
            found = tmp_path / f"crash-{number}-{index}"
            tree.write(found)
            seen.add(_number_of(found / "last") if (found / "last").exists() else 0)
            assert not number or (found / "last").exists()
    assert seen == {0, 1, 2}
