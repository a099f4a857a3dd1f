"""Files that were made to run code or to exhaust memory: refused by our own error, in little memory."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import resource
import struct
import subprocess
import sys
import time
import zipfile
import zlib
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fullshard.checkpoint import commit, dcp
from fullshard.checkpoint.format import manifest, torch_archives
from fullshard.checkpoint.format.budget import parse_json
from fullshard.checkpoint.format.torch_archives import NotPlain, read_bytes, read_file
from fullshard.checkpoint.hugging_face import folders
from fullshard.checkpoint.loading.opening import open_checkpoint
from fullshard.errors import CheckpointError

MEMORY_BYTES = 600 * 2**20  # above what the process has before; most cases would take gigabytes
LONGEST_S = 20.0
META = "torch.distributed.checkpoint.metadata"


class Runs:
    """A pickle of it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch '{self.path}'",)


# ---- pickles, written operation by operation


def _text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def _name(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def _doubled(first: bytes, times: int, join: bytes = b"\x86") -> bytes:
    """A pair of itself, again and again: each refers to the one before twice."""
    return first + b"".join(b"q\0h\0" + join for _ in range(times))


def _pickle(body: bytes) -> bytes:
    return b"\x80\x02" + body + b"."


def _of_class(module: str, name: str, state: bytes) -> bytes:
    return _name(module, name) + b")\x81" + state + b"b"


def _state(**fields: bytes) -> bytes:
    return b"}(" + b"".join(_text(name) + value for name, value in fields.items()) + b"u"


def _joined_paths() -> bytes:
    one = _name("pathlib", "PosixPath") + b"q\1(" + _text("x" * 200) + b"tR"
    return _pickle(one + b"".join(b"q\2h\1h\2h\2\x86R" for _ in range(30)))


def _copied_dicts(copies: int) -> bytes:
    pairs = b"".join(b"K\1J" + struct.pack("<i", i) + b"\x86" for i in range(20_000))
    first = b"](" + pairs + b"eq\0"
    return _pickle(first + (_name("collections", "OrderedDict") + b"h\0\x85R") * copies)


def _shared_chunks(names: int, chunks: int) -> bytes:
    """Many tensors that all have the same long list of parts."""
    size = _name("torch", "Size") + b"(K\1K\1t\x85R"
    chunk = _of_class(META, "ChunkStorageMetadata", _state(offsets=size, sizes=size))
    parts = chunk + b"q\0](" + b"h\0" * chunks + b"e"
    properties = _of_class(META, "TensorProperties", b"(" + _name("torch", "float32") + b"t")
    kind = _of_class(META, "TensorStorageMetadata", _state(properties=properties, size=size, chunks=parts))
    many = kind + b"q\1}(" + b"".join(_text(f"{i}") + b"h\1" for i in range(names)) + b"u"
    return _pickle(_of_class(META, "Metadata", _state(state_dict_metadata=many, storage_data=b"}")))


METADATA: dict[str, Callable[[], bytes]] = {
    "a path joined to itself": _joined_paths,
    "a pair of itself as a name": lambda: _pickle(
        _name("pathlib", "PosixPath") + _doubled(_text("ab"), 60) + b"\x85R"
    ),
    "a pair of itself as a key": lambda: _pickle(b"}" + _doubled(b"K\1", 60) + b"Ns"),
    "a layout of a pair of itself": lambda: _pickle(
        _name("torch.serialization", "_get_layout") + _doubled(_text("ab"), 60) + b"\x85R"
    ),
    "a dict copied again and again": lambda: _copied_dicts(5000),
    "lists of nothing": lambda: _pickle(b"]" * 1_200_000),
    "a memo of everything": lambda: b"\x80\x04" + b"N\x94" * 600_000 + b".",
    "a memo far away": lambda: b"\x80\x04Nr\xff\xff\xff\xff.",
    "text of gigabytes": lambda: _pickle(b"X\xff\xff\xff\xffab"),
    "bytes of gigabytes": lambda: _pickle(b"B\xff\xff\xff\xffab"),
    "a frame of exabytes": lambda: b"\x80\x04\x95" + b"\xff" * 8 + b"N.",
    "a long number": lambda: _pickle(b"\x8b\xff\xff\xff\x7f" + b"\xff" * 100),
    "parts shared by many tensors": lambda: _shared_chunks(20_000, 20_000),
    "marks alone": lambda: _pickle(b"(" * 1_200_000),
    "a list of itself": lambda: _pickle(_of_class(META, "Metadata", b"]q\0h\0a")),
}


def _metadata_case(folder: Path, data: bytes) -> Callable[[], Any]:
    folder.mkdir()
    (folder / ".metadata").write_bytes(data)
    return lambda: dcp.open_dcp(folder)


# ---- archives of torch.save


def _archive(body: bytes, records: dict[str, bytes] | None = None, **options: Any) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", **options) as made:
        made.writestr("archive/data.pkl", _pickle(body))
        for name, data in (records or {}).items():
            made.writestr(f"archive/{name}", data)
    return out.getvalue()


def _tensor(count: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> bytes:
    def numbers(values: tuple[int, ...]) -> bytes:
        return b"(" + b"".join(b"\x8a\x08" + struct.pack("<q", v) for v in values) + b"t"

    storage = b"(" + _text("storage") + _name("torch", "FloatStorage") + _text("0") + _text("cpu")
    storage += numbers((count,))[1:-1] + b"tQ"
    rest = b"K\0" + numbers(shape) + numbers(strides) + b"\x89" + _name("collections", "OrderedDict") + b")R"
    return _name("torch._utils", "_rebuild_tensor_v2") + b"(" + storage + rest + b"tR"


def _overlapping() -> bytes:
    """A thousand records that are all the same megabyte."""
    body = b"](" + b"".join(
        _tensor(2**18, (2**18,), (1,)).replace(_text("0"), _text(f"{i}")) for i in range(1000)
    ) + b"e"  # fmt: skip
    data = bytearray(_archive(body, {"data/0": bytes(2**20)}))
    end = data.rindex(b"PK\5\6")
    at = data.rindex(b"PK\1\2", 0, end)
    entry = bytes(data[at:end])
    more = b"".join(
        entry[:28] + struct.pack("<H", len(name := f"archive/data/{i}".encode())) + entry[30:46] + name
        for i in range(1, 1000)
    )
    first = struct.unpack("<I", data[end + 16 : end + 20])[0]
    size = end - first + len(more)
    tail = b"PK\5\6" + bytes(4) + struct.pack("<HHIIH", 1001, 1001, size, first, 0)
    return bytes(data[:end]) + more + tail


def _lying_end() -> bytes:
    data = bytearray(_archive(b"N"))
    data[-10:-6] = struct.pack("<I", 2**32 - 2)  # the size of the directory
    return bytes(data)


ARCHIVES: dict[str, Callable[[], bytes]] = {
    "bytes by their number": lambda: _archive(
        _name("builtins", "bytearray") + b"\x8a\x05" + struct.pack("<q", 6 * 2**30)[:5] + b"\x85R"
    ),
    "few numbers many times": lambda: _archive(_tensor(1, (2**31,), (0,)), {"data/0": bytes(4)}),
    "more numbers than there are": lambda: _archive(_tensor(2**31, (2**31,), (1,)), {"data/0": bytes(4)}),
    "a shape that overflows": lambda: _archive(
        _tensor(1, (2**40, 2**40, 2**40), (0, 0, 0)), {"data/0": bytes(4)}
    ),
    "zeros that are compressed": lambda: _archive(
        _tensor(2**29, (2**29,), (1,)), {"data/0": bytes(2**24)}, compression=zipfile.ZIP_DEFLATED
    ),
    "records that are the same bytes": _overlapping,
    "a directory of gigabytes": _lying_end,
    "pairs of itself": lambda: _archive(_doubled(b"K\1", 60)),
    "lists of itself": lambda: _archive(b"]q\0h\0a"),
    "a list repeated": lambda: _archive(b"](" + b"K\1" * 100_000 + b"eq\0](" + b"h\0" * 100_000 + b"e"),
    "a text encoded": lambda: _archive(
        _name("_codecs", "encode") + b"\x8a\x05" + b"\xff\xff\xff\xff\1" + _text("latin1") + b"\x86R"
    ),
    "a number of many digits": lambda: _archive(_name("builtins", "int") + _text("9" * 100_000) + b"\x85R"),
}


# ---- JSON


def _deep(count: int) -> bytes:
    return b"[" * count + b"]" * count


JSON: dict[str, Callable[[], bytes]] = {
    "lists of nothing": lambda: b"[" + b"[]," * 20_000_000 + b"[]]",
    "objects of nothing": lambda: b"[" + b"{}," * 20_000_000 + b"{}]",
    "objects of one": lambda: b"[" + b'{"a":1},' * 8_000_000 + b"{}]",
    "texts of nothing": lambda: b"[" + b'"ab",' * 12_000_000 + b'""]',
    "numbers": lambda: b"[" + b"999," * 15_000_000 + b"0]",
    "nested lists": lambda: _deep(1_000_000),
    "a number of many digits": lambda: b"[" + b"9" * 10_000_000 + b"]",
    "names of nothing": lambda: b"{" + b",".join(b'"%x":0' % i for i in range(3_000_000)) + b"}",
}

MANIFESTS = ("objects of one", "nested lists", "names of nothing")  # are read by the same function


def _signed(body: bytes) -> bytes:
    rest = b'",' + body[1:]
    return b'{"sha256":"' + hashlib.sha256(rest).hexdigest().encode() + rest


def _manifest(folder: Path, extra: bytes, files: str = "{}") -> Path:
    folder.mkdir()
    body = (
        '{"format":"fullshard checkpoint","version":1,"id":"0","saved_at_ns":1,"software":{},"layout":{},'
        f'"block_bytes":1048576,"files":{files},"model":{{"tensors":0,"elements":0}},'
        '"optimizer":{"tensors":0,"elements":0},"tied":{},"modules":{},"optimizer_state":null,"ranks":[],'
        '"parts":{},"extra":'
    )
    (folder / manifest.NAME).write_bytes(_signed(body.encode() + extra + b"}"))
    return folder


def _values(folder: Path) -> Any:
    source = open_checkpoint(folder)
    return [source.value(tree, manifest.SHARED_FILE) for tree in source.manifest.extra.values()]


def _packed_zeros(count: int) -> bytes:
    packed = b64encode(zlib.compress(bytes(2**20), 9)).decode()
    return json.dumps({"x": [{"$bytes": {"data": packed}}] * count}).encode()


def _one_tensor_many_times(folder: Path, count: int) -> Path:
    from fullshard.checkpoint.format.checksums import checksum
    from fullshard.checkpoint.format.headers import Tensor, build

    head, _ = build([Tensor("t", torch.float32, (2**20,))])
    data = head + bytes(4 * 2**20)
    crcs = "".join(f"{checksum(data[at : at + 2**20]):08x}" for at in range(0, len(data), 2**20))
    entry = {"$tensor": {"dtype": "float32", "shape": [2**20], "at": "t", "crc32": 0}}
    files = json.dumps({manifest.SHARED_FILE: {"bytes": len(data), "crc32": crcs}})
    _manifest(folder, json.dumps({"x": [entry] * count}).encode(), files)
    (folder / manifest.SHARED_FILE).write_bytes(data)
    return folder


def _header(length: int, text: bytes, size: int) -> bytes:
    return struct.pack("<Q", length) + text + bytes(max(0, size - 8 - len(text)))


def _safetensors_cases(folder: Path) -> dict[str, Callable[[], Any]]:
    def case(name: str, data: bytes) -> Callable[[], Any]:
        path = folder / f"{name}.safetensors"
        path.write_bytes(data)
        return lambda: folders.open_model(path)

    big = {"dtype": "F32", "shape": [2**59, 2**59, 2**59], "data_offsets": [0, 4]}
    text = json.dumps({"a": big}).encode()
    lists = b'{"a":[' + b"[]," * 10_000_000 + b"[]]}"
    return {
        "header longer than the file": case("long", _header(2**62, b"{}", 100)),
        "shape that overflows": case("shape", _header(len(text), text, 8 + len(text) + 4)),
        "header of lists": case("lists", _header(len(lists), lists, 8 + len(lists))),
    }


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**33)


def _all_cases(folder: Path) -> dict[str, Callable[[], Any]]:
    cases: dict[str, Callable[[], Any]] = {}
    for index, (name, make) in enumerate(METADATA.items()):
        cases[f"metadata: {name}"] = lambda i=index, m=make: _metadata_case(folder / f"m{i}", m())()  # type: ignore[misc]
    for index, (name, make) in enumerate(ARCHIVES.items()):
        path = folder / f"{index}.pt"
        path.write_bytes(make())
        cases[f"archive: {name}"] = lambda p=path: read_file(p)  # type: ignore[misc]
        data = make()
        cases[f"archive in memory: {name}"] = lambda d=data: read_bytes("it", d)  # type: ignore[misc]
    for index, (name, make) in enumerate(JSON.items()):
        cases[f"json: {name}"] = lambda m=make: parse_json("it", m())  # type: ignore[misc]
        if name in MANIFESTS:
            cases[f"manifest: {name}"] = lambda i=index, m=make: commit.read_manifest(  # type: ignore[misc]
                _manifest(folder / f"j{i}", m())
            )
    cases["values: zeros that were packed"] = lambda: _values(_manifest(folder / "v", _packed_zeros(2_000)))
    cases["values: one tensor many times"] = lambda: _values(_one_tensor_many_times(folder / "t", 2000))
    cases |= {f"safetensors: {name}": case for name, case in _safetensors_cases(folder).items()}
    for name in (".metadata", manifest.NAME):
        (folder / name).mkdir()
        _sparse(folder / name / name)
    cases["sparse metadata"] = lambda: dcp.open_dcp(folder / ".metadata")
    cases["sparse manifest"] = lambda: commit.read_manifest(folder / manifest.NAME)
    return cases


def _try_all(folder: Path) -> None:
    """In a process of its own, whose memory is limited."""
    cases = _all_cases(folder)
    wrong = []
    for name, case in cases.items():
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
        begun, result = time.process_time(), "it was accepted"
        try:
            case()
        except (CheckpointError, NotPlain):
            result = ""
        except BaseException as error:
            result = f"{type(error).__name__}: {str(error)[:200]}"
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        took = time.process_time() - begun
        if result or took > LONGEST_S:
            wrong.append(f"{name}: {result} ({took:.1f} s)")
    print(f"{len(cases)} cases")
    print("\n".join(wrong))
    sys.exit(bool(wrong))


def test_files_that_describe_gigabytes_are_refused_in_little_memory(tmp_path: Path) -> None:
    import warm  # not in the process that it starts

    command = [f"{warm.commands()}/python", __file__, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr


# ---- what honest files hold is read as torch.load reads it


PLAIN: dict[str, Any] = {
    "numbers": [1, -2**70, 2.5, True, None, 1 + 2j],
    "text": ["a", "ä😀", b"raw \xff", bytearray(b"more")],
    "containers": {"t": (1, (2,)), "s": {1, 2}, "f": frozenset({3}), ("a", 1): [{}]},
    "torch": [torch.float32, torch.Size([2, 3]), torch.device("cpu")],
    "tensors": [
        torch.arange(6.0).view(2, 3),
        torch.arange(6).view(2, 3).t(),
        torch.tensor(3, dtype=torch.uint8),
        torch.empty(0, 4),
        torch.ones(1).expand(5),
        torch.randn(4).bfloat16(),
        torch.tensor([True, False]),
        torch.nn.Parameter(torch.ones(2)),
        torch.randn(3, dtype=torch.complex64),
        torch.arange(20.0)[3:9:2],
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", PLAIN)
def test_plain_values_are_read_as_torch_load_reads_them(name: str) -> None:
    value = PLAIN[name]
    for protocol in (2, 4):
        file = io.BytesIO()
        torch.save(value, file, pickle_protocol=protocol)
        if protocol == 4 and name in ("containers", "text"):
            continue  # operations of protocol 4 that torch.save does not write by default
        ours = read_bytes("it", file.getvalue())
        file.seek(0)
        theirs = torch.load(file, weights_only=False)
        _assert_same(ours, theirs)


def _assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert torch.equal(one, other)
        assert one.requires_grad == other.requires_grad
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            _assert_same(a, b)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            _assert_same(one[key], other[key])
    else:
        assert one == other


def test_versions_in_a_state_dict_are_kept() -> None:
    file = io.BytesIO()
    saved = torch.nn.BatchNorm1d(2).state_dict()
    torch.save(saved, file)
    read = read_bytes("it", file.getvalue())
    assert read._metadata == saved._metadata  # type: ignore[attr-defined]
    _assert_same(dict(read), dict(saved))


def test_tensors_that_share_a_storage_still_do() -> None:
    base = torch.arange(6.0)
    file = io.BytesIO()
    torch.save([base, base[2:]], file)
    one, two = read_bytes("it", file.getvalue())
    one[2] = 9.0
    assert two[0] == 9.0


# ---- nothing runs


def test_no_file_that_is_read_runs_code(tmp_path: Path) -> None:
    ran = tmp_path / "it-ran"
    for value in (Runs(ran), [Runs(ran)], {"state": {0: Runs(ran)}}, {Runs(ran): 1}):
        file = tmp_path / "value.pt"
        torch.save(value, file)
        with pytest.raises(CheckpointError, match=r"system|not plain"):
            read_file(file)
        folder = tmp_path / "folder"
        folder.mkdir(exist_ok=True)
        (folder / ".metadata").write_bytes(pickle.dumps(value))
        with pytest.raises(CheckpointError, match=r"system"):
            dcp.open_dcp(folder)
        for name in ("pytorch_model.bin", "pytorch_model-00001-of-00002.bin"):
            model = tmp_path / name.partition(".")[0]
            model.mkdir(exist_ok=True)
            torch.save(value, model / name)
            with pytest.raises(CheckpointError, match="pickle"):
                folders.open_model(model)
    assert not ran.exists()
    assert torch_archives.NotPlain is NotPlain


if __name__ == "__main__":
    _try_all(Path(sys.argv[1]))
