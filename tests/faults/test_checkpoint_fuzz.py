"""Files that may be anything: only a CheckpointError comes of them, in bounded time and memory."""

from __future__ import annotations

import copy
import hashlib
import json
import random
import resource
import shutil
import time
import tracemalloc
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import ranks
from engines import build
from fullshard.checkpoint.format import headers, manifest, values
from fullshard.checkpoint.format.manifest import Count, FileRecord, Manifest, Part
from fullshard.errors import CheckpointError

CASE_S = 2.0  # processor time for one case; what is refused takes milliseconds
CASE_BYTES = 64 * 2**20  # at its peak, where the case itself has a megabyte at most
quickly = settings(max_examples=150, deadline=None)

# --- junk ----------------------------------------------------------------------------------------------


def nested(depth: int, inner: Any = 0) -> Any:
    for _ in range(depth):
        inner = [inner]
    return inner


JUNK: list[Any] = [
    None, True, False, 0, 1, -1, 7, 2**31, 2**53, 2**60, 2**63, 2**64, -(2**63), 10**400, 1.5, -0.0, 1e308,
    "", "x", "../x", "/etc/passwd", "..", ".", "a/b", "a\0b", "\ud800", "é", "x" * 10_000,
    "model.safetensors", "fullshard.json", "F32", "I64", "nothing.safetensors", "part-00000.safetensors",
    [], [0], [0, 4], [4, 0], [[]], [2**59] * 8, [1] * 70, [-1], [1.0], [True], ["a"], [None] * 3,
    {}, {"a": 1}, {"$tensor": {}}, {"$float": "nan"}, {"$tuple": [1]}, {"$bytes": {"data": "AA=="}},
    {"$tensor": {"dtype": "float32", "shape": [2**28], "data": values._packed(b"")}},
    {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, nested(60), nested(150),
]  # fmt: skip
TOKENS = [
    "[",
    "]",
    "{",
    "}",
    ",",
    ":",
    '"',
    "\\",
    "null",
    "NaN",
    "-Infinity",
    "1e999",
    "-",
    "0",
    '"a":1,',
    "\0",
]
TOKENS += [
    "[" * 100_000,
    '{"a":' * 100_000,
    "9" * 5_000,
    "1" + "0" * 5_000,
    "0." + "1" * 5_000,
    '"a":1,"a":2,',
]


def change_bytes(draw: random.Random, data: bytes) -> bytes:
    """Flips, cuts, insertions: the text is no longer what it was, and perhaps no longer a text."""
    found = bytearray(data)
    for _ in range(draw.choice([1, 1, 1, 2, 5])):
        at = draw.randrange(len(found) + 1)
        match draw.randrange(6):
            case 0:
                found[at : at + 1] = bytes([draw.randrange(256)])
            case 1:
                found[at:at] = draw.choice(TOKENS).encode()
            case 2:
                del found[at : at + draw.choice([1, 1, 2, 10, 1000])]
            case 3:
                stop = min(len(found), at + draw.choice([1, 10, 100]))
                found[at:at] = found[at:stop]
            case 4:
                del found[at:]
            case 5:
                digits = [i for i, byte in enumerate(found) if 48 <= byte <= 57]
                if digits:
                    found[draw.choice(digits)] = draw.choice(b"0123456789-.eE")
        if not found:
            return b""
    return bytes(found)


def places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every place in a tree: a container, and a key in it."""
    keys = list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    for key in keys:
        yield tree, key
        yield from places(tree[key])


def change_tree(draw: random.Random, tree: Any) -> Any:
    """Another tree: something has another type, another size, another place, or is gone or there twice."""
    tree = copy.deepcopy(tree)
    for _ in range(draw.choice([1, 1, 1, 2, 4])):
        found = list(places(tree))
        if not found:
            return draw.choice(JUNK)
        container, key = draw.choice(found)
        value = container[key]
        match draw.randrange(6):
            case 0 | 1:
                container[key] = copy.deepcopy(draw.choice(JUNK))
            case 2 if isinstance(value, int):
                container[key] = draw.choice(
                    [value + 1, value - 1, -value, value * 2, value + 0.5, value + 2**40]
                )
            case 3:
                del container[key]
            case 4:
                other, place = draw.choice(found)
                container[key] = copy.deepcopy(other.get(place) if isinstance(other, dict) else other[place:])
            case _:
                if isinstance(container, dict):
                    container[str(draw.choice(["../x", "/x", "x" * 300, "\0", "é", "a"]))] = container.pop(
                        key
                    )
                else:
                    container.insert(key, copy.deepcopy(draw.choice(JUNK)))
    return tree


# --- what is tried, and what must come of it -----------------------------------------------------------


@dataclass
class Tried:
    """Outcomes of many cases; `wrong` has those that ended otherwise than they may."""

    accepted: int = 0
    refused: int = 0
    slowest_s: float = 0.0
    wrong: list[str] = field(default_factory=list)

    def run(self, label: str, case: Callable[[], Any]) -> Any:
        started, result = time.process_time(), None
        try:
            result = case()
            self.accepted += 1
        except CheckpointError as error:
            self.refused += 1
            if len(str(error)) > 5_000:
                self.wrong.append(f"{label}: a message of {len(str(error))} characters")
        except BaseException as error:
            self.wrong.append(f"{label}: {type(error).__name__}: {str(error)[:300]}")
        took = time.process_time() - started
        self.slowest_s = max(self.slowest_s, took)
        if took > CASE_S:
            self.wrong.append(f"{label}: took {took:.1f} s")
        return result

    def check(self, cases: int) -> None:
        assert self.wrong == []
        assert self.accepted + self.refused == cases
        assert self.refused > cases // 3, "most of the cases should be refused, or they are no test"
        print(
            f"{cases} cases: {self.refused} refused, {self.accepted} accepted, {self.slowest_s:.3f} s at most"
        )


def read_header(data: bytes) -> tuple[dict[str, headers.Tensor], dict[str, int]]:
    return headers.read("file", len(data), lambda begin, end: data[begin:end])[:2]


HEADER: dict[str, Any] = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b.c": {"dtype": "BF16", "shape": [5], "data_offsets": [24, 34]},
    "scalar": {"dtype": "I64", "shape": [], "data_offsets": [34, 42]},
    "empty": {"dtype": "BOOL", "shape": [0, 7], "data_offsets": [42, 42]},
}
DATA = bytes(42)


def header_case(draw: random.Random) -> bytes:
    text = json.dumps(HEADER).encode()
    match draw.randrange(8):
        case 0:
            return draw.randbytes(draw.choice([0, 1, 7, 8, 9, 100, 5_000]))
        case 1:
            text = draw.randbytes(draw.choice([1, 10, 1_000]))
        case 2 | 3:
            text = change_bytes(draw, text)
        case _:
            text = json.dumps(change_tree(draw, HEADER)).encode()
    length = len(text)
    if not draw.randrange(6):
        length = draw.choice([0, 1, length - 1, length + 1, length + 42, 2**31, 2**40, 2**63, 2**64 - 1])
    return max(0, length).to_bytes(8, "little") + text + DATA[: draw.choice([42, 42, 42, 42, 41, 0])]


def manifest_tree() -> Any:
    found = Manifest(
        id="0123", saved_at_ns=2**61, software={"torch": "2"}, layout={"ranks": 2, "files": "shared"},
        block_bytes=2**20,
        files={"model.safetensors": FileRecord(3 * 2**20, (1, 2, 3)), "config.json": FileRecord(5, (7,))},
        model=Count(2, 30), optimizer=Count(4, 60), tied={"b": "a"}, modules={"m": {"$tuple": [1, 2]}},
        optimizer_state={
            "class": "AdamW",
            "groups": [{"parameters": ["a"], "options": {"lr": 0.1, "betas": {"$tuple": [0.9, 0.999]}}}],
            "state": {"a": {"step": {"kind": "scalar", "device": "host"}, "m": {"kind": "elements"}}},
        },
        extra={"step": 5, "nan": {"$float": "nan"}}, ranks=({"extra": {}, "values": {}}, {"random": None}),
        parts={"part-00000.safetensors": (Part("model/a", 0, 15, (3, 10)), Part("model/a", 15, 30, (3, 10)))},
    )  # fmt: skip
    tree = json.loads(manifest.to_bytes(found))
    del tree["sha256"]
    return tree


def signed(body: bytes) -> bytes:
    """A manifest that carries the right checksum of whatever it says: the parser itself is reached."""
    rest = b'",' + body.lstrip()[1:]
    return b'{"sha256":"' + hashlib.sha256(rest).hexdigest().encode() + rest


def manifest_case(draw: random.Random, tree: Any) -> bytes:
    match draw.randrange(8):
        case 0:
            return draw.randbytes(draw.choice([0, 1, 50, 100, 5_000]))
        case 1:
            return signed(draw.randbytes(draw.choice([1, 10, 1_000])))
        case 2 | 3:
            return signed(change_bytes(draw, json.dumps(tree).encode()))
        case 4:
            return change_bytes(draw, signed(json.dumps(tree).encode()))
        case _:
            return signed(json.dumps(change_tree(draw, tree)).encode())


def sample_value() -> Any:
    return {
        "int": 5, "big": 10**900, "list": [1, 2.5, None, "x"], "tuple": (1, (2,)), "set": {1, 2},
        "any": {1: 2, (3, 4): b"abc"}, "nan": float("nan"), "tensor": torch.arange(6.0).view(2, 3),
        "array": torch.arange(3).numpy(), "dtype": torch.bfloat16, "empty": torch.empty(0, 3),
    }  # fmt: skip


def value_case(draw: random.Random) -> Any:
    encoder = values.Encoder()
    tree = encoder.encode(sample_value(), "x")
    return change_tree(draw, tree)


def try_parsers(cases: int, seed: int) -> dict[str, Tried]:
    draw = random.Random(seed)
    tree = manifest_tree()
    tried = {name: Tried() for name in ("headers", "manifests", "values")}
    for number in range(cases):
        data = header_case(draw)
        accepted = tried["headers"].run(f"header {number}", partial(read_header, data))
        if accepted is not None:
            _check_accepted(tried["headers"], number, data, accepted[0])
        data = manifest_case(draw, tree)
        tried["manifests"].run(f"manifest {number}", partial(manifest.from_bytes, data))
        found = value_case(draw)
        tried["values"].run(f"value {number}", partial(values.decode, found, {}.__getitem__))
    return tried


def _check_accepted(tried: Tried, number: int, data: bytes, ours: dict[str, headers.Tensor]) -> None:
    """What we accept, the format's own library accepts too, with the same tensors."""
    try:
        theirs = {name: tuple(said["shape"]) for name, said in safetensors.deserialize(data)}
    except safetensors.SafetensorError as error:
        if "hex escape" in str(error):  # half a surrogate pair in a name: Python's JSON takes it
            return
        tried.wrong.append(f"header {number}: accepted, but safetensors says {error}: {data[8:400]!r}")
        return
    if theirs != {name: tensor.shape for name, tensor in ours.items()}:
        tried.wrong.append(f"header {number}: other tensors than safetensors sees")


def _limited(cases: int, seed: int) -> tuple[dict[str, Tried], int]:
    """In a process that cannot have much more memory than it has; and how much more it had at its peak."""
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + 2**30, size + 2**30))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tried = try_parsers(cases, seed)
    return tried, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024


def test_fuzzed_headers_manifests_and_values_are_checkpoint_errors() -> None:
    for tried in try_parsers(200, 1).values():
        tried.check(200)


def test_fuzzed_files_need_no_memory_that_they_only_claim() -> None:
    """The largest of these files has a megabyte; so none needs many."""
    draw, tree = random.Random(2), manifest_tree()
    for number in range(60):
        header, text, value = header_case(draw), manifest_case(draw, tree), value_case(draw)
        cases: list[Callable[[], Any]] = [
            partial(read_header, header),
            partial(manifest.from_bytes, text),
            partial(values.decode, value, {}.__getitem__),
        ]
        for case in cases:
            tracemalloc.start()
            Tried().run(str(number), case)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert peak < CASE_BYTES, f"case {number} took {peak} bytes"


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_ten_thousand_fuzzed_headers_and_as_many_manifests_and_values_are_checkpoint_errors() -> None:
    ((found, more_bytes),) = ranks.run(_limited, 1, 10_000, 3, timeout_s=1100, fresh=True)
    for tried in found.values():
        tried.check(10_000)
    assert more_bytes < 4 * CASE_BYTES


# --- structured cases ----------------------------------------------------------------------------------

names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(
    lambda name: name != "__metadata__"
)
described = st.builds(
    headers.Tensor,
    names,
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.float64]),
    st.lists(st.integers(0, 5), max_size=4).map(tuple),
)


@given(st.lists(described, max_size=8, unique_by=lambda tensor: tensor.name))
@quickly
def test_header_that_we_write_is_read_alike_by_us_and_by_safetensors(tensors: list[headers.Tensor]) -> None:
    head, begins = headers.build(tensors)
    size = sum(tensor.size_bytes for tensor in tensors)
    data = head + bytes(i % 251 for i in range(size))
    assert len(head) % 64 == 0
    found, places_ = read_header(data)
    assert found == {tensor.name: tensor for tensor in tensors}
    assert places_ == begins
    for name, said in safetensors.deserialize(data):
        tensor = found[name]
        assert tuple(said["shape"]) == tensor.shape
        assert bytes(said["data"]) == data[begins[name] : begins[name] + tensor.size_bytes]


anything = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.sampled_from(JUNK)
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(st.sampled_from(["dtype", "shape", "data_offsets", "more", None]), anything)
@quickly
def test_any_value_in_any_field_of_a_header_is_refused_or_harmless(field_: str | None, value: Any) -> None:
    tree = copy.deepcopy(HEADER)
    if field_ is None:
        tree["a"] = value
    else:
        tree["a"][field_] = value
    text = json.dumps(tree).encode()
    tried = Tried()
    found = tried.run("header", lambda: read_header(len(text).to_bytes(8, "little") + text + DATA))
    assert tried.wrong == []
    if found is not None:
        assert found[0]["a"].size_bytes == 24


@given(st.sampled_from(sorted(manifest_tree())), anything)
@quickly
def test_any_value_in_any_field_of_a_manifest_is_refused_or_kept(field_: str, value: Any) -> None:
    tree = manifest_tree()
    tree[field_] = value
    tried = Tried()
    found = tried.run("manifest", lambda: manifest.from_bytes(signed(json.dumps(tree).encode())))
    assert tried.wrong == []
    if found is not None:
        again = manifest.from_bytes(manifest.to_bytes(found))
        assert json.dumps(json.loads(manifest.to_bytes(again))) == json.dumps(
            json.loads(manifest.to_bytes(found))
        )


def _said(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda tree: tree["b.c"].update(fields)


REFUSED: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "overlapping": (_said(data_offsets=[20, 30]), "overlaps the one before it"),
    "gapped": (_said(data_offsets=[26, 36]), "leaves a gap before it"),
    "backwards": (_said(data_offsets=[34, 24]), "has -10 bytes"),
    "out of range": (_said(shape=[500], data_offsets=[24, 1024]), "overlaps the one before it"),
    "enormous": (_said(shape=[2**59, 2**59]), "its shape and dtype need"),
    "negative": (_said(shape=[-5]), "not a list of counts"),
    "a float": (_said(shape=[5.0]), "not a list of counts"),
    "true": (_said(shape=[True]), "not a list of counts"),
    "many dimensions": (_said(shape=[1] * 65), "not a list of counts"),
    "offsets of floats": (_said(data_offsets=[24.0, 34.0]), "not two counts"),
    "huge offsets": (_said(data_offsets=[24, 10**400]), "not two counts"),
    "unknown dtype": (_said(dtype="F33"), "unknown dtype 'F33'"),
    "another field": (_said(more=1), "is not described by"),
    "metadata of numbers": (lambda tree: tree.update(__metadata__={"a": 1}), "metadata"),
    "too little": (lambda tree: tree.pop("scalar"), "overlaps|gap|describes"),
    "not there": (lambda tree: tree.update(b=None), "is not described by"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_header_is_refused_with_the_reason(what: str) -> None:
    change, message = REFUSED[what]
    tree = copy.deepcopy(HEADER)
    change(tree)
    text = json.dumps(tree).encode()
    with pytest.raises(CheckpointError, match=message) as info:
        read_header(len(text).to_bytes(8, "little") + text + DATA)
    assert "'file'" in str(info.value)


def test_name_that_is_there_twice_is_refused() -> None:
    text = json.dumps(HEADER).replace('"b.c"', '"a"').encode()
    with pytest.raises(CheckpointError, match="names 'a' twice"):
        read_header(len(text).to_bytes(8, "little") + text + DATA)
    body = json.dumps(manifest_tree()).replace('"config.json"', '"model.safetensors"').encode()
    with pytest.raises(CheckpointError, match=r"names 'model\.safetensors' twice"):
        manifest.from_bytes(signed(body))


@pytest.mark.parametrize("depth", [500, 900, 980, 990, 995, 1_000, 3_000, 100_000])
def test_depth_that_breaks_the_reader_is_refused(depth: int) -> None:
    """Near the depth that Python itself can bear, a value may be read and then not be printed."""
    for opening, closing in (("[", "]"), ('{"a":', "}")):
        deep = opening * depth + "0" + closing * depth
        for place in ("dtype", "shape", "data_offsets"):
            text = json.dumps(HEADER | {"a": HEADER["a"] | {place: "@"}}).replace('"@"', deep).encode()
            with pytest.raises(CheckpointError):
                read_header(len(text).to_bytes(8, "little") + text + DATA)
        for place in ("version", "id", "files", "model", "parts", "block_bytes", "format"):
            text = json.dumps(manifest_tree() | {place: "@"}).replace('"@"', deep).encode()
            with pytest.raises(CheckpointError):
                manifest.from_bytes(signed(text))


@pytest.mark.parametrize(
    "name",
    ["../x", "/etc/passwd", "a/b", "..", ".", "", ".hidden", "a\0b", "a\nb", "x" * 300, "a..b", "é", "C:\\x"],
)
def test_manifest_that_names_a_file_elsewhere_is_refused(name: str) -> None:
    for place in ("files", "parts"):
        tree = manifest_tree()
        tree[place] = {name: next(iter(tree[place].values()))}
        with pytest.raises(CheckpointError, match="not a plain file name"):
            manifest.from_bytes(signed(json.dumps(tree).encode()))


# --- the whole of a load -------------------------------------------------------------------------------


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.tied = self.layers[0]
        self.norm = nn.BatchNorm1d(6)
        self.counter = Counting()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(self.norm(x)))
        return self.counter(x).square().mean()


class Counting(nn.Module):
    """Keeps a value that is no tensor, and believes what it is given."""

    calls: Any = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state


def _run(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    import fullshard as fs

    model = fs.shard(build(Small, seed), ignore=["norm.bias"])
    groups = [
        {"params": list(model.layers.parameters())},
        {"params": list(model.norm.parameters()), "lr": 0.5},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    model(torch.randn(5, 6, generator=torch.Generator().manual_seed(seed))).backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Everything that a load may change, printed."""
    state = [optimizer.state.get(p) for p in model.parameters()]
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    held = [[id(p) for p in g["params"]] for g in optimizer.param_groups]
    tensors = [t.detach().tolist() for t in (*model.parameters(), *model.buffers())]
    numbers = torch.get_rng_state().sum().item(), random.getstate()[1][:5]
    return repr((tensors, state, groups, held, model.counter.calls, numbers))


def _resigned(folder: Path, tree: Any) -> bytes:
    """A manifest with the checksums that the files in the folder have now."""
    for name, record in tree["files"].items():
        data = (folder / name).read_bytes()
        crcs = [zlib.crc32(data[at : at + 2**20]) for at in range(0, len(data), 2**20)]
        record |= {"bytes": len(data), "crc32": "".join(f"{crc:08x}" for crc in crcs)}
    return signed(json.dumps(tree).encode())


def _with_other_header(draw: random.Random, data: bytes) -> bytes:
    length = int.from_bytes(data[:8], "little")
    text = data[8 : 8 + length]
    if draw.randrange(3):
        text = json.dumps(change_tree(draw, json.loads(text))).encode()
    else:
        text = change_bytes(draw, text.rstrip())
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def _load_case(draw: random.Random, sound: Path, folder: Path, tree: Any) -> None:
    """A folder whose files are what its manifest says, and which is still no checkpoint, or another one."""
    for path in sound.iterdir():
        shutil.copyfile(path, folder / path.name)
    if draw.randrange(4):
        text = json.dumps(change_tree(draw, tree)).encode()
        if not draw.randrange(5):
            text = change_bytes(draw, text)
        (folder / manifest.NAME).write_bytes(signed(text))
    else:
        path = folder / draw.choice(sorted(tree["files"]))
        if path.suffix == ".safetensors":
            path.write_bytes(_with_other_header(draw, path.read_bytes()))
        (folder / manifest.NAME).write_bytes(_resigned(folder, copy.deepcopy(tree)))


def _fuzz_loads(root: Path, files: str, cases: int, seed: int) -> Tried:
    import fullshard as fs

    torch.manual_seed(seed)
    model, optimizer = _run(1)
    extra = {"step": 5, "large": torch.arange(20_000), "nested": sample_value()}
    fs.save(root / "sound", model, optimizer, extra=extra, files=files)
    tree = json.loads((root / "sound" / manifest.NAME).read_bytes())
    del tree["sha256"]
    draw, tried, folder = random.Random(seed), Tried(), root / "fuzzed"
    folder.mkdir()
    model, optimizer = _run(2)
    for number in range(cases):
        _load_case(draw, root / "sound", folder, tree)
        before, refused = _state(model, optimizer), tried.refused
        load = partial(fs.load, folder, model, optimizer, strict=bool(draw.randrange(4)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tried.run(f"load {number}", load)
        if tried.refused == refused:
            model, optimizer = _run(2)  # a checkpoint of something else: a learning rate of 2**64, say
        elif _state(model, optimizer) != before:
            tried.wrong.append(f"load {number}: refused, and something has changed")
    return tried


@pytest.mark.parametrize("files", ["shared", "parts"])
def test_load_of_a_fuzzed_folder_is_a_checkpoint_error_and_changes_nothing(
    tmp_path: Path, files: str
) -> None:
    (tried,) = ranks.run(_fuzz_loads, 1, tmp_path, files, 100, 5, timeout_s=120)
    tried.check(100)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("files", ["shared", "parts"])
def test_one_thousand_loads_of_fuzzed_folders_are_checkpoint_errors(tmp_path: Path, files: str) -> None:
    (tried,) = ranks.run(_fuzz_loads, 1, tmp_path, files, 1000, 6, timeout_s=1100)
    tried.check(1000)
