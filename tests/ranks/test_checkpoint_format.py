"""docs/checkpoint-format.md is enough: a reader written from it, importing nothing of fullshard."""

from __future__ import annotations

import ast
import base64
import hashlib
import json
import math
import re
import shutil
import struct
import zlib
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ranks
import reference

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "checkpoint-format.md"

# --- the reader: json, zlib, struct, hashlib, base64, numpy -------------------------------------------------

NUMPY = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "I16": "<i2",
         "I8": "<i1", "U8": "<u1", "BOOL": "?"}  # fmt: skip
CODES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64",
         "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL"}  # fmt: skip


class Wrong(Exception):
    pass


class Reader:
    """A whole checkpoint in memory, every byte checked."""

    def __init__(self, folder: Path) -> None:
        data = (folder / "fullshard.json").read_bytes()
        if (
            not data.startswith(b'{"sha256":"')
            or hashlib.sha256(data[75:]).hexdigest().encode() != data[11:75]
        ):
            raise Wrong("the manifest is damaged")
        self.manifest = said = json.loads(data)
        if said["format"] != "fullshard checkpoint" or said["version"] != 1:
            raise Wrong("another format")
        self.files = {name: self.tensors(self.checked(folder, name)) for name in said["files"]}
        self.model, self.optimizer = self.of_kind("model"), self.of_kind("optimizer")
        self.extra = self.value(said["extra"], "extra.safetensors")
        self.ranks = [self.value(own, f"rank-{i:05}.safetensors") for i, own in enumerate(said["ranks"])]
        self.state = self.value(said["optimizer_state"], "rank-00000.safetensors")

    def checked(self, folder: Path, name: str) -> bytes:
        data, said, size = (
            (folder / name).read_bytes(),
            self.manifest["files"][name],
            self.manifest["block_bytes"],
        )
        blocks = (zlib.crc32(data[at : at + size]) for at in range(0, len(data), size))
        if len(data) != said["bytes"] or "".join(f"{crc:08x}" for crc in blocks) != said["crc32"]:
            raise Wrong(f"{name} is damaged")
        return data if name.endswith(".safetensors") else b""

    def tensors(self, data: bytes) -> dict[str, np.ndarray]:
        if not data:
            return {}
        (length,) = struct.unpack("<Q", data[:8])
        found = {}
        for name, said in json.loads(data[8 : 8 + length]).items():
            if name != "__metadata__":
                begin, end = (8 + length + at for at in said["data_offsets"])
                found[name] = np.frombuffer(data[begin:end], NUMPY[said["dtype"]]).reshape(said["shape"])
        return found

    def of_kind(self, kind: str) -> dict[str, np.ndarray]:
        whole = re.compile(kind + r"(-\d{5}-of-\d{5})?\.safetensors")
        found = {n: t for file, held in self.files.items() if whole.fullmatch(file) for n, t in held.items()}
        pieces: dict[str, list[tuple[int, int, np.ndarray, list[int]]]] = {}
        for file, parts in self.manifest["parts"].items():
            for label, start, stop, shape in parts:
                if label.startswith(f"{kind}/"):
                    one = (start, stop, self.files[file][label], shape)
                    pieces.setdefault(label.removeprefix(f"{kind}/"), []).append(one)
        for name, own in pieces.items():
            own.sort(key=lambda piece: piece[:2])
            if any(a[1] != b[0] for a, b in pairwise(own)) or own[0][0] != 0:
                raise Wrong(f"elements of {name} are missing")
            found[name] = np.concatenate([piece[2] for piece in own]).reshape(own[0][3])
        if self.manifest[kind] != {"tensors": len(found), "elements": sum(t.size for t in found.values())}:
            raise Wrong(f"tensors of the {kind} are missing")
        return found

    def value(self, tree: Any, file: str) -> Any:
        if isinstance(tree, list):
            return [self.value(one, file) for one in tree]
        if not isinstance(tree, dict):
            return tree
        tag, said = next(iter(tree.items()), ("", None))
        if not tag.startswith("$"):
            return {name: self.value(one, file) for name, one in tree.items()}
        if tag in ("$tensor", "$array", "$scalar", "$bytes"):
            raw = self.raw(said, file)
            if tag == "$bytes":
                return raw
            kind = NUMPY[CODES[said["dtype"]]] if tag == "$tensor" else said["dtype"]
            array = np.frombuffer(raw, kind).reshape(said["shape"])
            return array[()] if tag == "$scalar" else array
        if tag in ("$float", "$int", "$dtype"):
            return {"$float": float, "$int": lambda text: int(text, 16), "$dtype": str}[tag](said)
        items = self.value(said, file)
        makers: dict[str, Callable[[Any], Any]] = {"$tuple": tuple, "$set": set, "$frozenset": frozenset}
        return makers.get(tag, lambda pairs: Counter(dict(pairs)) if tag == "$counter" else dict(pairs))(
            items
        )

    def raw(self, said: dict[str, Any], file: str) -> bytes:
        if "at" not in said:
            return zlib.decompress(base64.b64decode(said["data"]))
        data = self.files[file][said["at"]].tobytes()
        if zlib.crc32(data) != said["crc32"]:
            raise Wrong(f"{said['at']} is another value")
        return data


# --- what is read -----------------------------------------------------------------------------------------


class Net(nn.Module):
    """A table of more than one block of bytes, tied; statistics that differ by rank; a bf16 buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Embedding(600, 512)
        self.blocks = nn.ModuleList(nn.Linear(512, 512) for _ in range(2))
        self.norm = nn.BatchNorm1d(512)
        self.head = nn.Linear(512, 600, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("coarse", torch.arange(6, dtype=torch.bfloat16).view(2, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.table(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _batch(rank: int) -> torch.Tensor:
    return torch.arange(16) * 7 + rank * 200


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-4)


def _extra(rank: int) -> dict[str, Any]:
    return {
        "step": 7,
        "loader": {"epoch": 2, "left": [3, 1, 2], "best": math.inf, "at": (1, "two", None, True)},
        "odd": {1: "one", ("a", 2): {3, 4}},
        "counts": Counter({"x": 2}),
        "raw": b"\x00\xff",
        "long": bytes(range(256)) * 100,
        "huge": 3**2000,
        "fixed": frozenset({"f"}),
        "dtype": torch.bfloat16,
        "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "arrays": np.arange(8000, dtype=">i4").reshape(80, 100),
        "number": np.float32(1.5),
        "small": torch.tensor([[1.0, 2.0]]),
        "large": torch.arange(9000.0),
        "seed": 100 + rank,
        "own": torch.full((5000,), float(rank)),
    }


def _save(root: str) -> dict[str, torch.Tensor]:
    import torch.distributed as dist

    import fullshard as fs
    from fullshard.checkpoint.saving import writing

    model = fs.shard(Net())
    optimizer = _adamw(model.parameters())
    rank = dist.get_rank()
    model(_batch(rank)).square().mean().backward()
    optimizer.step()
    fs.save(f"{root}/shared", model, optimizer, extra=_extra(rank), files="shared")
    fs.save(f"{root}/parts", model, optimizer, extra=_extra(rank), files="parts")
    before, writing.FILE_BYTES = writing.FILE_BYTES, 10**6
    try:
        fs.save(f"{root}/numbered", model, optimizer, extra=_extra(rank), files="shared")
    finally:
        writing.FILE_BYTES = before
    with fs.full(model, writeback=False):
        return {name: value.detach().clone() for name, value in model.state_dict().items()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, torch.Tensor]]]:
    root = tmp_path_factory.mktemp("format")
    return root, ranks.run(_save, 2, str(root), init=True)


FOLDERS = ["shared", "parts", "numbered"]


def test_reader_imports_nothing_of_fullshard() -> None:
    tree = ast.parse(Path(__file__).read_text())
    reader = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Reader")
    assert not any(isinstance(node, (ast.Import, ast.ImportFrom)) for node in ast.walk(reader))
    imported = {
        (alias.asname or alias.name).partition(".")[0]
        for node in tree.body
        if isinstance(node, (ast.Import, ast.ImportFrom)) and "fullshard" in ast.unparse(node)
        for alias in node.names
    }
    assert not imported & {node.id for node in ast.walk(reader) if isinstance(node, ast.Name)}


@pytest.mark.parametrize("folder", FOLDERS)
def test_reader_written_from_the_page_reads_every_tensor_of_the_model(
    folder: str, saved: tuple[Path, list[dict[str, torch.Tensor]]]
) -> None:
    root, (first, second) = saved
    found = Reader(root / folder)
    tied = found.manifest["tied"]
    assert tied == {"head.weight": "table.weight"}
    assert set(found.model) == set(first) - set(tied)
    for name, value in first.items():
        array = found.model[tied.get(name, name)]
        bits = value.view(torch.uint16) if value.dtype == torch.bfloat16 else value
        assert np.array_equal(array, bits.numpy()), name
    # What was not the first rank's is beside it.
    assert not torch.equal(first["norm.running_mean"], second["norm.running_mean"])
    assert found.ranks[0]["values"] == {}
    assert set(found.ranks[1]["values"]) == {"norm.running_mean", "norm.running_var"}
    assert np.array_equal(found.ranks[1]["values"]["norm.running_var"], second["norm.running_var"].numpy())


def test_numbered_files_have_an_index_that_names_them(
    saved: tuple[Path, list[dict[str, torch.Tensor]]],
) -> None:
    folder = saved[0] / "numbered"
    found = Reader(folder)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert sorted(index["weight_map"]) == sorted(found.model)
    assert all(name in found.files[file] for name, file in index["weight_map"].items())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in found.model.values())
    assert len({file for file in found.files if file.startswith("model-")}) > 1
    assert len({file for file in found.files if file.startswith("optimizer-")}) > 1


@pytest.mark.parametrize("folder", FOLDERS)
def test_reader_finds_the_optimizer_of_the_same_training_in_one_process(
    folder: str, saved: tuple[Path, list[dict[str, torch.Tensor]]]
) -> None:
    model = Net()
    optimizer = _adamw(model.parameters())
    for rank in range(2):
        (model(_batch(rank)).square().mean() / 2).backward()
    optimizer.step()
    found = Reader(saved[0] / folder)
    assert found.state["class"] == "AdamW"
    (group,) = found.state["groups"]
    names = dict(model.named_parameters())
    assert sorted(group["parameters"]) == sorted(names)
    assert (group["options"]["lr"], group["options"]["betas"]) == (1e-3, (0.9, 0.999))
    for name, parameter in names.items():
        for key, value in optimizer.state[parameter].items():
            array = torch.from_numpy(found.optimizer[f"{name}.{key}"].copy())
            reference.assert_close(array, value, f"{name}.{key}")
            kind = "scalar" if key == "step" else "elements"
            assert found.state["state"][name][key]["kind"] == kind
    assert len(found.optimizer) == 3 * len(names)


@pytest.mark.parametrize("folder", FOLDERS)
def test_reader_decodes_every_kind_of_value(
    folder: str, saved: tuple[Path, list[dict[str, torch.Tensor]]]
) -> None:
    found = Reader(saved[0] / folder)
    expected = {k: v for k, v in _extra(0).items() if k not in ("seed", "own")}
    assert list(found.extra) == list(expected)
    for name, value in found.extra.items():
        if name in ("array", "arrays", "small", "large"):
            assert np.array_equal(value, np.asarray(expected[name])), name
        elif name == "dtype":
            assert value == "bfloat16"
        else:
            assert value == expected[name], name
            assert type(value) is type(expected[name]), name
    for rank, own in enumerate(found.ranks):
        assert own["extra"]["seed"] == 100 + rank
        assert np.array_equal(own["extra"]["own"], np.full(5000, rank, np.float32))
        assert own["random"]["torch"].shape == torch.get_rng_state().shape
        assert own["random"]["python"][0] == 3


@pytest.mark.parametrize("folder", ["numbered", "parts"])
def test_reader_finds_a_bit_flipped_anywhere(
    folder: str, saved: tuple[Path, list[dict[str, torch.Tensor]]], tmp_path: Path
) -> None:
    copy = tmp_path / folder
    shutil.copytree(saved[0] / folder, copy)
    several = False
    for path in sorted(copy.iterdir()):
        size = path.stat().st_size
        several |= size > 2**20
        for at in sorted({0, 9, size // 2, size - 1}):
            _flip(path, at)
            with pytest.raises((Wrong, ValueError)):
                Reader(copy)
            _flip(path, at)
        with path.open("r+b") as file:
            file.truncate(size - 1)
        with pytest.raises((Wrong, ValueError)):
            Reader(copy)
        shutil.copy(saved[0] / folder / path.name, path)
    assert several, "no file has more than one block"
    Reader(copy)


def _flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 16]))


def test_page_names_every_field_and_every_kind_of_value() -> None:
    from fullshard.checkpoint.format import headers, manifest, values

    page = PAGE.read_text()
    body = json.loads(
        manifest.to_bytes(manifest.Manifest("", 0, {}, {}, 1, {}, manifest.Count(), manifest.Count()))
    )
    for field in body:
        assert f"`{field}`" in page or f'"{field}"' in page, field
    tags = set(re.findall(r'"(\$\w+)"', Path(values.__file__).read_text()))
    assert {"$tensor", "$scalar", "$counter"} <= tags
    for tag in tags:
        assert f'"{tag}"' in page, tag
    assert f'`version` | `"{manifest.FORMAT}"`, `{manifest.VERSION}`' in page
    assert set(NUMPY) <= set(headers._CODES)


def test_page_has_one_length_that_is_read_in_an_afternoon() -> None:
    assert len(PAGE.read_text().splitlines()) < 130
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", PAGE.read_text()):
        assert (PAGE.parent / target).exists(), target
