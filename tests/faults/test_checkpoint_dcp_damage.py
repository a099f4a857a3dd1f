"""Folders of torch.distributed.checkpoint that are damaged, malicious, or large."""

from __future__ import annotations

import io
import os
import pickle
import random
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from torch.distributed.checkpoint import state_dict as stock_state
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

import ranks
import reference
from cases import refusal
from dcp_runs import adamw, our_whole, quietly
from engines import Net, build

ITEM = "model.blocks.1.0.weight"  # of shape (13, 8), in rows of 32 bytes


def _saved(folder: Path) -> Path:
    model = build(Net)
    optimizer = adamw(model)
    values, state = stock_state.get_state_dict(model, optimizer)
    quietly(stock.save, {"model": values, "optim": state, "step": 3}, checkpoint_id=str(folder))
    return folder


class Runs:
    """A pickle of it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch '{self.path}'",)


def _edit(folder: Path, change: Callable[[Any], None]) -> None:
    file = folder / ".metadata"
    found = pickle.loads(file.read_bytes())
    change(found)
    file.write_bytes(pickle.dumps(found))


def _info(found: Any, name: str = ITEM) -> Any:
    return next(info for index, info in found.storage_data.items() if index.fqn == name)


def _cut(folder: Path, file: str, count: int) -> None:
    data = (folder / file).read_bytes()
    (folder / file).write_bytes(data[: len(data) - count])


def _item(folder: Path, change: Callable[[bytes], bytes], name: str = ITEM) -> None:
    """Change an item's bytes; what grows moves to the end of the file."""
    file = folder / "__0_0.distcp"
    data = bytearray(file.read_bytes())

    def moved(found: Any) -> None:
        info = _info(found, name)
        new = change(bytes(data[info.offset : info.offset + info.length]))
        if len(new) == info.length:
            data[info.offset : info.offset + info.length] = new
        else:
            info.offset, info.length = len(data), len(new)
            data.extend(new)

    _edit(folder, moved)
    file.write_bytes(data)


def _archive(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def _flip(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def _numbers(data: bytes) -> int:
    """Where in an archive the first number is."""
    info = zipfile.ZipFile(io.BytesIO(data)).getinfo("archive/data/0")
    name, padding = data[info.header_offset + 26], data[info.header_offset + 28]
    return info.header_offset + 30 + name + padding


def _with_pickle(data: bytes, told: bytes) -> bytes:
    """An archive with another description of its tensor."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w") as new:
        for info in old.infolist():
            new.writestr(info.filename, told if info.filename == "archive/data.pkl" else old.read(info))
    return out.getvalue()


def _chunks(found: Any) -> list[ChunkStorageMetadata]:
    return found.state_dict_metadata[ITEM].chunks  # type: ignore[no-any-return]


def _halve(found: Any) -> None:
    _chunks(found)[0] = ChunkStorageMetadata(torch.Size((0, 0)), torch.Size((7, 8)))


def _twice(found: Any) -> None:
    _chunks(found).append(ChunkStorageMetadata(torch.Size((0, 0)), torch.Size((7, 8))))


def _beyond(found: Any) -> None:
    _chunks(found)[0] = ChunkStorageMetadata(torch.Size((1, 0)), torch.Size((13, 8)))


def _nowhere(found: Any) -> None:
    del found.storage_data[MetadataIndex(ITEM, torch.Size((0, 0)))]


def _transformed(found: Any) -> None:
    _info(found).transform_descriptors = ["zstd"]


def _put(name: str, value: Any) -> Callable[[Any], None]:
    return lambda found: setattr(_info(found), name, value)


def _other_file(folder: Path, file: str) -> None:
    (folder.parent / "secret.distcp").write_bytes((folder / "__0_0.distcp").read_bytes())
    _edit(folder, _put("relative_path", file))


def _folder_for_file(folder: Path) -> None:
    (folder / "__0_0.distcp").unlink()
    (folder / "__0_0.distcp").mkdir()


def _pipe_for_file(folder: Path) -> None:
    (folder / "__0_0.distcp").unlink()
    os.mkfifo(folder / "__0_0.distcp")


def _write(folder: Path, file: str, data: bytes) -> None:
    (folder / file).write_bytes(data)


FILE = "__0_0.distcp"
NOT_PLAIN = "not a plain file name"
# setattr(MetadataIndex, "fqn", "poisoned"), by the state of a class in place of an object's
_POISON = b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\n(N}X\3\0\0\0fqnX\x08\0\0\0poisonedstb."
RAN = "it-ran"  # what a malicious checkpoint would make
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "metadata cut": (lambda f: _cut(f, ".metadata", 40), ".metadata"),
    "metadata empty": (lambda f: _write(f, ".metadata", b""), ".metadata"),
    "metadata garbage": (lambda f: _write(f, ".metadata", random.Random(0).randbytes(999)), ".metadata"),
    "metadata of text": (lambda f: _write(f, ".metadata", pickle.dumps("text")), "it holds a str"),
    "metadata runs code": (lambda f: _write(f, ".metadata", pickle.dumps(Runs(f / RAN))), "system"),
    "metadata runs code inside": (
        lambda f: _edit(f, lambda m: m.planner_data.update(x=Runs(f / RAN))),
        "system",
    ),
    "metadata evaluates": (lambda f: _write(f, ".metadata", b"cbuiltins\neval\n(V1+1\ntR."), "builtins.eval"),
    "metadata takes memory": (lambda f: _write(f, ".metadata", b"\x80\x04Nr\xff\xff\xff\xff."), "NoneType"),
    "metadata changes a class": (lambda f: _write(f, ".metadata", _POISON), "MetadataIndex"),
    "metadata of nothing": (lambda f: _edit(f, lambda m: setattr(m, "storage_data", None)), ".metadata"),
    "metadata names a list": (lambda f: _edit(f, lambda m: m.state_dict_metadata.update(x=[])), "is a list"),
    "file cut": (lambda f: _cut(f, "__0_0.distcp", 1), "cut short"),
    "file halved": (lambda f: _cut(f, "__0_0.distcp", 30_000), "__0_0.distcp"),
    "file empty": (lambda f: _write(f, "__0_0.distcp", b""), "cut short"),
    "file missing": (lambda f: (f / "__0_0.distcp").unlink(), "__0_0.distcp"),
    "file is a folder": (_folder_for_file, "__0_0.distcp"),
    "file is a pipe": (_pipe_for_file, "__0_0.distcp"),
    "file of zeros": (lambda f: _write(f, FILE, bytes((f / FILE).stat().st_size)), FILE),
    "path above": (lambda f: _other_file(f, "../secret.distcp"), NOT_PLAIN),
    "path from the root": (lambda f: _other_file(f, str(f.parent / "secret.distcp")), NOT_PLAIN),
    "place far away": (lambda f: _edit(f, _put("offset", 2**50)), "cut short"),
    "place before the file": (lambda f: _edit(f, _put("offset", -5)), ITEM),
    "place of another": (
        lambda f: _edit(f, lambda m: vars(_info(m)).update(vars(_info(m, "model.head.bias")))),
        ITEM,
    ),
    "place off by one": (lambda f: _edit(f, lambda m: _put("offset", _info(m).offset + 1)(m)), ITEM),
    "no place": (lambda f: _edit(f, _nowhere), ITEM),
    "transformed": (lambda f: _edit(f, _transformed), "zstd"),
    "a part is missing": (lambda f: _edit(f, _halve), "missing or duplicated"),
    "all parts are missing": (lambda f: _edit(f, lambda m: _chunks(m).clear()), "missing or duplicated"),
    "a part is there twice": (lambda f: _edit(f, _twice), "missing or duplicated"),
    "a part beyond the end": (lambda f: _edit(f, _beyond), ITEM),
    "a number has changed": (lambda f: _item(f, lambda d: _flip(d, _numbers(d) + 11)), "checksum differs"),
    "a number of an optimizer": (
        lambda f: _item(f, lambda d: _flip(d, _numbers(d)), "optim.state.head.weight.exp_avg"),
        "checksum differs",
    ),
    "another dtype": (lambda f: _item(f, lambda d: _archive(torch.zeros(13, 8).half())), "torch.float16"),
    "another shape": (lambda f: _item(f, lambda d: _archive(torch.zeros(8, 13))), "(8, 13)"),
    "a tensor that is a list": (lambda f: _item(f, lambda d: _archive([1, 2])), "list"),
    "a sparse tensor": (lambda f: _item(f, lambda _: _archive(torch.eye(13, 8).to_sparse())), "sparse"),
    "a tensor runs code": (
        lambda f: _item(f, lambda d: _with_pickle(d, pickle.dumps(Runs(f / RAN), 2))),
        "system",
    ),
    "an option runs code": (
        lambda f: _item(f, lambda d: _archive(Runs(f / RAN)), "optim.param_groups.0.lr"),
        "without running code",
    ),
    "an option has changed": (
        lambda f: _item(f, lambda d: d.replace(b"G?", b"G@"), "optim.param_groups.0.lr"),
        "optim.param_groups.0.lr",
    ),
    "groups without parameters": (
        lambda f: _item(f, lambda d: _archive("all"), "optim.param_groups.0.params"),
        "does not name its parameters",
    ),
}  # fmt: skip


def _load_all(folder: str, names: list[str]) -> dict[str, Any]:
    import fullshard as fs

    model = fs.shard(build(Net, seed=5))
    optimizer = adamw(model)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    before = our_whole(model, optimizer)
    found: dict[str, Any] = {}
    for name in names:
        try:
            found[name] = refusal(lambda name=name: fs.load(f"{folder}/{name}", model, optimizer))
        except AssertionError as error:
            found[name] = ("none", str(error), "")
    found["after"] = all(
        reference.bitwise(a, b)
        for one, other in zip(before, our_whole(model, optimizer), strict=True)
        for a, b in zip(_tensors(one), _tensors(other), strict=True)
    )
    fs.load(f"{folder}/good", model, optimizer)
    found["good"] = our_whole(model, None)[0]
    return found


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    for value in tree.values() if isinstance(tree, dict) else [tree]:
        yield from _tensors(value) if isinstance(value, dict) else [value]


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("damaged")
    good = _saved(folder / "good")
    for name, (damage, _) in DAMAGES.items():
        shutil.copytree(good, folder / name)
        damage(folder / name)
    return folder, ranks.run(_load_all, 2, str(folder), list(DAMAGES), timeout_s=120)


@pytest.mark.parametrize("name", list(DAMAGES))
def test_damaged_folder_is_refused_by_all_ranks(
    name: str, refusals: tuple[Path, list[dict[str, Any]]]
) -> None:
    folder, found = refusals
    for rank in found:
        kind, message, remedy = rank[name]
        assert kind in ("DamagedCheckpoint", "CheckpointError"), message
        assert DAMAGES[name][1] in message
        assert remedy
    assert not (folder / name / RAN).exists()


def test_stock_reader_runs_the_code_that_we_refuse(tmp_path: Path) -> None:
    for name in ("metadata runs code", "metadata runs code inside"):
        folder = _saved(tmp_path / name)
        DAMAGES[name][0](folder)
        pickle.loads((folder / ".metadata").read_bytes())
        assert (folder / RAN).exists(), "the file of the test above is harmless, so it proves nothing"


def test_class_stays_as_it_was_when_a_file_would_change_it(tmp_path: Path) -> None:
    from fullshard.checkpoint.dcp.format import read_index
    from fullshard.errors import CheckpointError

    (tmp_path / ".metadata").write_bytes(_POISON)
    with pytest.raises(CheckpointError, match="none of it was run"):
        read_index(tmp_path)
    assert not hasattr(MetadataIndex, "fqn")
    try:
        pickle.loads(_POISON)
        assert MetadataIndex.fqn == "poisoned", "the file is harmless, so it proves nothing"
    finally:
        del MetadataIndex.fqn


def test_refused_loads_change_nothing(refusals: tuple[Path, list[dict[str, Any]]]) -> None:
    for rank in refusals[1]:
        assert rank["after"]
        for name, value in reference.whole_parameters(build(Net)).items():
            assert reference.bitwise(rank["good"][name], value), name


def _mismatches(folder: str) -> dict[str, Any]:
    import fullshard as fs

    narrow = fs.shard(build(lambda: Net(num_blocks=2)))  # type: ignore[arg-type,return-value]
    deep = fs.shard(build(lambda: Net(num_blocks=4)))  # type: ignore[arg-type,return-value]
    other = build(Net)
    other.head = torch.nn.Linear(8, 6)
    found = {
        "more": refusal(lambda: fs.load(folder, narrow)),
        "fewer": refusal(lambda: fs.load(folder, deep)),
        "shape": refusal(lambda: fs.load(folder, fs.shard(other))),
    }
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found["notes"] = fs.load(folder, narrow, strict=False).notes
    return found


def test_folder_of_another_model_is_refused(tmp_path: Path) -> None:
    for found in ranks.run(_mismatches, 2, str(_saved(tmp_path / "good"))):
        assert "'blocks.2.0.bias'" in found["more"][1]
        assert "which the model does not have" in found["more"][1]
        assert "'blocks.3.0.bias'" in found["fewer"][1] or "'blocks.3.0.weight'" in found["fewer"][1]
        assert "which the model has" in found["fewer"][1]
        assert "(5, 8)" in found["shape"][1]
        assert "(6, 8)" in found["shape"][1]
        assert all(found[what][0] == "CheckpointError" for what in ("more", "fewer", "shape"))
        assert "blocks.2.0.bias" in found["notes"][0]


def _read_everything(folder: Path) -> dict[str, torch.Tensor]:
    from fullshard.checkpoint import dcp

    source: Any = dcp.open_dcp(folder)
    try:
        stored = source._index.tensors
        for tiled in stored.values():
            source.want(tiled, 0, tiled.tensor.num_elements)
        source.blocks.verify()
        return {name: source.read_tensor(tiled) for name, tiled in stored.items()}
    finally:
        source.close()


def test_no_changed_byte_of_the_files_goes_unnoticed_where_it_matters(tmp_path: Path) -> None:
    from fullshard.errors import CheckpointError

    values = {"a": torch.randn(5, 7), "b": torch.randn(9).bfloat16()}
    quietly(stock.save, values, checkpoint_id=str(tmp_path / "good"))
    file = tmp_path / "good" / "__0_0.distcp"
    data = file.read_bytes()
    refused = 0
    for at in range(0, len(data), 4):
        file.write_bytes(_flip(data, at))
        try:
            found = _read_everything(tmp_path / "good")
        except CheckpointError as error:
            assert "__0_0.distcp" in str(error), at
            refused += 1
            continue
        for name, value in values.items():
            assert reference.bitwise(found[name], value), f"byte {at} changed {name}, and nobody said so"
    assert refused > 200


def test_changed_metadata_is_read_or_refused_and_nothing_else(tmp_path: Path) -> None:
    from fullshard.errors import CheckpointError

    quietly(
        stock.save, {"a": torch.randn(5, 7), "b": {"c": torch.randn(9)}}, checkpoint_id=str(tmp_path / "x")
    )
    file = tmp_path / "x" / ".metadata"
    data = file.read_bytes()
    chance = random.Random(0)
    refused = 0
    for _ in range(600):
        changed = bytearray(data)
        for _ in range(chance.choice((1, 1, 3))):
            changed[chance.randrange(len(data))] = chance.randrange(256)
        file.write_bytes(changed)
        try:
            _read_everything(tmp_path / "x")
        except CheckpointError:
            refused += 1
    assert refused > 200


# --- memory --------------------------------------------------------------------------------------------


def test_only_items_that_are_needed_are_read_and_a_piece_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fullshard.checkpoint import dcp
    from fullshard.checkpoint.dcp import archives

    value = torch.randn(40, 64)
    quietly(stock.save, {"a": value, "b": torch.randn(40, 64)}, checkpoint_id=str(tmp_path / "x"))
    monkeypatch.setattr(archives, "CHUNK_BYTES", 1024)
    asked: list[tuple[int, int]] = []
    read_into = archives.ItemFiles.read_into

    def counted(self: Any, file: str, begin: int, end: int, out: Any) -> None:
        asked.append((begin, end))
        read_into(self, file, begin, end, out)

    monkeypatch.setattr(archives.ItemFiles, "read_into", counted)
    source: Any = dcp.open_dcp(tmp_path / "x")
    stored = source._index.tensors["a"]
    source.want(stored, 100, 1700)
    source.blocks.verify()
    place = stored.chunks[0].place
    assert all(place.begin <= begin <= end <= place.begin + place.length for begin, end in asked)
    asked.clear()
    out = torch.zeros(1600)
    source.read(stored, 100, 1700, out)
    assert reference.bitwise(out, value.flatten()[100:1700])
    assert max(end - begin for begin, end in asked) <= 1024
    assert sum(end - begin for begin, end in asked) == 1600 * 4


MIB = 2**20


def _status(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def _peak(call: Callable[[], Any]) -> int:
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    call()
    return _status("VmHWM") - before


def _load_large(folder: str) -> dict[str, int]:
    import fullshard as fs
    from fullshard.checkpoint import dcp

    model = fs.shard(torch.nn.Linear(4096, 6144, bias=False))  # 96 MiB
    found = {"save": _peak(lambda: dcp.save(f"{folder}/saved", model))}
    fs.load(f"{folder}/saved", model)  # what is loaded once, such as code, is no part of it
    found["load"] = _peak(lambda: fs.load(f"{folder}/saved", model))
    return found


def test_load_holds_a_few_megabytes_and_save_one_item_at_a_time(tmp_path: Path) -> None:
    (found,) = ranks.run(_load_large, 1, str(tmp_path), timeout_s=120)
    assert found["load"] < 48 * MIB, found  # one piece to check, one to copy, 16 MiB each
    assert found["save"] < 120 * MIB, found
