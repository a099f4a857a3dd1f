"""Plain values as JSON and back: exact, without pickle, and refused by name where that cannot be."""

from __future__ import annotations

import base64
import enum
import json
import math
import os
import subprocess
import sys
import zlib
from collections import Counter, OrderedDict, defaultdict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import engines
import ranks
import reference
from fullshard.checkpoint.format import values
from fullshard.checkpoint.format.values import INLINE_BYTES, Encoder, decode
from fullshard.errors import CheckpointError

SOURCE = str(Path(values.__file__).parents[3])
quickly = settings(max_examples=300, deadline=None)
TENSOR_DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
    torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex64,
    torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip
ARRAY_DTYPES = ["<f8", "<f4", "<f2", ">f4", "<i8", ">i2", "<u4", "|i1", "|u1", "|b1", "<c8", "<c16", "<f16"]


def through_json(value: Any) -> Any:
    """Encode, write as the manifest is written, read, decode."""
    encoder = Encoder()
    tree = encoder.encode(value, "x")
    text = json.dumps(tree, allow_nan=False)
    return decode(json.loads(text), lambda name: encoder.tensors[name])


def same(a: Any, b: Any) -> bool:
    """Equal, of the same type, all the way down; NaN is itself."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and reference.bitwise(a, b)
    if isinstance(a, (np.ndarray, np.generic)):
        alike = type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape
        return alike and np.asarray(a).tobytes() == np.asarray(b).tobytes()
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return len(a) == len(b) and all(
            same(k, j) and same(v, w) for (k, v), (j, w) in zip(a.items(), b.items(), strict=True)
        )
    return bool(a == b)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(TENSOR_DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    count = math.prod(shape) * dtype.itemsize
    raw = draw(st.binary(min_size=count, max_size=count))
    if dtype is torch.bool:
        raw = bytes(byte & 1 for byte in raw)
    if not raw:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(raw), dtype=dtype).reshape(shape)


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    dtype = np.dtype(draw(st.sampled_from(ARRAY_DTYPES)))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    numbers = draw(st.lists(st.integers(-120, 120), min_size=math.prod(shape), max_size=math.prod(shape)))
    array = np.array([n / 3 if dtype.kind in "fc" else abs(n) for n in numbers]).astype(dtype).reshape(shape)
    return np.asfortranarray(array) if draw(st.booleans()) else array


numbers = st.one_of(
    st.integers(),
    st.integers(-(10**700), 10**700),
    st.floats(allow_nan=True, allow_infinity=True),
    st.builds(lambda exponent, sign: sign * (7**exponent), st.integers(0, 9000), st.sampled_from([1, -1])),
)
texts = st.text(st.characters(exclude_categories=()), max_size=12)
keys = st.one_of(texts, st.integers(), st.booleans(), st.none(), st.binary(max_size=5), st.just("$tensor"))
hashables = st.recursive(
    keys, lambda inner: st.one_of(st.tuples(inner, inner), st.frozensets(inner, max_size=3)), max_leaves=4
)
leaves = st.one_of(
    st.none(),
    st.booleans(),
    numbers,
    texts,
    st.binary(max_size=40),
    tensors(),
    arrays(),
    st.sampled_from(TENSOR_DTYPES),
    st.sampled_from([np.float32(0.1), np.int64(-5), np.bool_(True), np.float64("nan"), np.complex64(1 + 2j)]),
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.tuples(inner),
        st.tuples(inner, inner, inner),
        st.dictionaries(texts, inner, max_size=4),
        st.dictionaries(hashables, inner, max_size=4),
        st.sets(hashables, max_size=4),
        st.frozensets(hashables, max_size=4),
        st.dictionaries(hashables, st.integers(0, 9), max_size=4).map(Counter),
    ),
    max_leaves=12,
)


# --- round trips ---------------------------------------------------------------------------------------


@given(trees)
@quickly
def test_value_comes_back_with_its_type_and_every_bit(value: Any) -> None:
    assert same(through_json(value), value)


@given(tensors(), arrays())
@quickly
def test_large_values_go_into_the_store_and_come_back(tensor: torch.Tensor, array: Any) -> None:
    """The same trees with a limit so low that nothing is written in place."""
    value = {"t": tensor, "a": [array, array], "b": (b"0123456789", {1: array})}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(values, "INLINE_BYTES", 3)
        encoder = Encoder()
        tree = encoder.encode(value, "x")
        assert "x['b'][0]" in encoder.tensors
        assert ("x['t']" in encoder.tensors) == (tensor.numel() * tensor.itemsize > 3)
        assert same(decode(json.loads(json.dumps(tree)), lambda name: encoder.tensors[name]), value)


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(INLINE_BYTES, dtype=torch.int16),
        np.arange(INLINE_BYTES, dtype=np.complex128),
        bytes(range(256)) * (INLINE_BYTES // 256 + 1),
        torch.zeros(INLINE_BYTES // 4),  # the last that fits
        np.zeros(2**23),  # 64 MiB: however well it compresses
    ],
    ids=["tensor", "array", "bytes", "just small enough", "large"],
)
def test_value_of_any_size_comes_back(value: Any) -> None:
    encoder = Encoder()
    tree = json.dumps(encoder.encode(value, "x"))
    assert len(tree) < 3 * INLINE_BYTES, "large values do not belong into the manifest"
    assert same(decode(json.loads(tree), lambda name: encoder.tensors[name]), value)


def test_kinds_of_dict_and_sequence_come_back_as_the_plain_ones() -> None:
    class Colour(enum.IntEnum):
        RED = 3

    class Name(enum.StrEnum):
        A = "a"

    assert same(through_json(OrderedDict(a=1)), {"a": 1})
    assert same(through_json(defaultdict(list, a=[1])), {"a": [1]})
    assert same(through_json(torch.Size([2, 3])), (2, 3))
    assert same(through_json(bytearray(b"ab")), b"ab")
    assert same(through_json(Colour.RED), 3)
    assert through_json(Name.A) == "a"
    assert same(through_json(torch.nn.Parameter(torch.ones(2))), torch.ones(2))


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(12.0).view(3, 4).T,
        torch.arange(12.0)[::5],
        torch.arange(12.0)[::5][:1],  # torch calls it contiguous
        torch.tensor(2.5).expand(3, 2),
        torch.tensor([1 + 2j, 3 - 4j]).conj(),
        torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
        torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.tensor(3),
        torch.empty(0, 5),
    ],
    ids=["transposed", "strided", "one strided", "expanded", "conj", "neg", "channels-last", "0-d", "empty"],
)
def test_tensor_comes_back_however_it_lies_in_memory(value: torch.Tensor) -> None:
    assert same(through_json(value), torch.empty(value.shape, dtype=value.dtype).copy_(value))


@pytest.mark.parametrize(
    "wrap",
    [lambda v: [v], lambda v: (v,), lambda v: {"a": v}, lambda v: {1: v}],
    ids=["list", "tuple", "dict", "any"],
)
def test_whatever_depth_is_accepted_can_be_read(wrap: Any) -> None:
    value: Any = 7
    for _ in range(100):
        value = wrap(value)
    assert same(through_json(value), value)
    with pytest.raises(CheckpointError, match="more than 100 levels deep"):
        Encoder().encode(wrap(value), "x")


def test_two_keys_that_look_alike_keep_their_own_tensors() -> None:
    one, other = torch.zeros(30_000), torch.zeros(30_000)
    other[15_000] = 1  # printed, both are the same zeros and dots
    back = through_json({one: one.clone(), other: other.clone()})
    assert all(torch.equal(k, v) for k, v in back.items())
    assert sorted(float(k.sum()) for k in back) == [0.0, 1.0]


def test_equal_values_have_equal_trees_and_unequal_ones_have_not() -> None:
    large = torch.arange(INLINE_BYTES)
    changed = large.clone()
    changed[-1] = 0

    def tree(value: Any) -> str:
        return json.dumps(Encoder().encode(value, "x"))

    assert tree({"a": large}) == tree({"a": large.clone()})
    assert tree({"a": large}) != tree({"a": changed})
    assert tree(large.float()) != tree(large)
    assert tree(np.float32(1)) != tree(np.float64(1))
    assert tree(1) != tree(1.0)
    assert tree((1,)) != tree([1])


def test_tree_of_a_set_is_the_same_in_every_process() -> None:
    """Texts hash differently in each process; a set that is equal on all ranks must look equal."""
    code = (
        "import json; from fullshard.checkpoint.format.values import Encoder; "
        "print(json.dumps(Encoder().encode([{'a', 'b', 'c', 'd', 'e'}, frozenset({'x', 1, None})], 'x')))"
    )
    elsewhere = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONHASHSEED": "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1", "PYTHONPATH": SOURCE},
        capture_output=True,
        text=True,
        check=True,
        timeout=500,
    ).stdout
    value = [set("abcde"), frozenset({"x", 1, None})]
    assert elsewhere == json.dumps(Encoder().encode(value, "x")) + "\n"
    assert decode(json.loads(elsewhere), {}.__getitem__) == value


# --- through a checkpoint ------------------------------------------------------------------------------


def everything(rank: int) -> dict[str, Any]:
    return {
        "step": 7,
        "shared": {"tensor": torch.arange(30_000), "array": np.arange(9_000.0), "bytes": b"x" * 20_000},
        "set": {"a", "b", "c"},
        "mine": {"rank": rank, "large": torch.full((9_000,), float(rank)), "array": np.full(9_000, rank)},
        "small": (rank, {1: rank}),
    }


def _through_a_checkpoint(root: Path, save: bool) -> tuple[dict[str, Any], tuple[str, ...]]:
    import warnings

    import fullshard as fs

    model = fs.shard(torch.nn.Linear(3, 3))
    if save:
        fs.save(root, model, extra=everything(engines.my_rank()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = fs.load(root, model)
    return dict(loaded), loaded.notes


def test_extra_comes_back_to_each_rank_and_what_was_the_same_to_any(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    for rank, (found, notes) in enumerate(ranks.run(_through_a_checkpoint, 2, path, True, timeout_s=60)):
        assert same(found, everything(rank))
        assert notes == ()
    assert sorted(p.name for p in path.glob("*.safetensors")) == [
        "extra.safetensors",
        "model.safetensors",
        "rank-00000.safetensors",
        "rank-00001.safetensors",
    ]
    alike = {k: v for k, v in everything(0).items() if k in ("step", "shared", "set")}
    for found, notes in ranks.run(_through_a_checkpoint, 3, path, False, timeout_s=60):
        assert same(found, alike)
        assert notes == ("extra 'mine', 'small' differed between the 2 ranks that saved: left out",)


# --- refused, by name ----------------------------------------------------------------------------------

Point = namedtuple("Point", "x y")
cycle: list[Any] = []
cycle.append(cycle)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (lambda: 0, "function"),
        (object(), "object"),
        (Point(1, 2), "Point"),
        (torch.device("cpu"), "device"),
        (torch.eye(3).to_sparse(), "not a dense tensor"),
        (np.array(["a"]), "<U1"),
        (np.array([object()]), "object"),
        (np.datetime64("2020-01-01"), "datetime64"),
        (np.zeros(2, dtype=[("a", "f4")]), "has dtype"),
        (1j, "complex"),
        (range(3), "range"),
        (cycle, "levels deep"),
        (type, "type"),
    ],
)
def test_refused_value_is_named_with_its_path(value: Any, kind: str) -> None:
    with pytest.raises(CheckpointError) as info:
        Encoder().encode({"a": [1, (2, {3: value})]}, "extra['mine']")
    assert "extra['mine']['a'][1][1][3]" in str(info.value)
    assert kind in str(info.value)
    assert "leave out" in info.value.remedy


def test_refused_key_is_named_with_its_path() -> None:
    with pytest.raises(CheckpointError, match=r"extra\['mine'\]\['a'\] key 1"):
        Encoder().encode({"a": {1: 2, object(): 3}}, "extra['mine']")


# --- trees that nobody encoded -------------------------------------------------------------------------


def packed(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data)).decode()


ZEROS = packed(bytes(4))
MALFORMED = {
    "shape that needs a terabyte": {"$tensor": {"dtype": "float32", "shape": [2**38], "data": packed(b"")}},
    "array that needs a terabyte": {"$array": {"dtype": "<f4", "shape": [2**38], "data": packed(b"")}},
    "negative shape": {"$tensor": {"dtype": "float32", "shape": [-1], "data": ZEROS}},
    "negative array": {"$array": {"dtype": "<f4", "shape": [-1], "data": ZEROS}},
    "float in a shape": {"$tensor": {"dtype": "float32", "shape": [1.0], "data": ZEROS}},
    "shape that is a text": {"$tensor": {"dtype": "float32", "shape": "1", "data": ZEROS}},
    "too many dimensions": {"$tensor": {"dtype": "float32", "shape": [1] * 70, "data": ZEROS}},
    "empty, of endless shape": {
        "$tensor": {"dtype": "float32", "shape": [0] + [2**59] * 9, "data": packed(b"")}
    },
    "too few bytes": {"$tensor": {"dtype": "float64", "shape": [1], "data": ZEROS}},
    "no dtype": {"$tensor": {"shape": [1], "data": ZEROS}},
    "dtype that is a module": {"$dtype": "nn"},
    "dtype that is a list": {"$dtype": ["float32"]},
    "array of objects": {"$array": {"dtype": "|O", "shape": [1], "data": packed(bytes(8))}},
    "array of records": {"$array": {"dtype": "f4,f4", "shape": [1], "data": packed(bytes(8))}},
    "array dtype that is a list": {"$array": {"dtype": [["a", "f4"]], "shape": [1], "data": ZEROS}},
    "bytes that are no base64": {"$bytes": {"data": "~~~~"}},
    "bytes that are not packed": {"$bytes": {"data": base64.b64encode(b"abc").decode()}},
    "bytes that are a number": {"$bytes": 3},
    "packed bytes that go on": {"$bytes": {"data": base64.b64encode(zlib.compress(b"a") + b"b").decode()}},
    "packed bytes cut short": {"$bytes": {"data": base64.b64encode(zlib.compress(b"abc")[:-5]).decode()}},
    "a bomb": {"$bytes": {"data": packed(bytes(2**26))}},
    "unknown tag": {"$pickle": "abc"},
    "two tags": {"$tuple": [1], "$set": [2]},
    "set of lists": {"$set": [[1]]},
    "dict of no pairs": {"$dict": [[1, 2, 3]]},
    "dict of a number": {"$dict": 5},
    "dict with a list as key": {"$dict": [[[1], 2]]},
    "tuple of nothing": {"$tuple": None},
    "float that is a word": {"$float": "word"},
    "int that is a word": {"$int": "word"},
    "stored under a number": {"$tensor": {"dtype": "float32", "shape": [1], "at": 5}},
    "stored nowhere": {"$tensor": {"dtype": "float32", "shape": [1], "at": "x"}},
    "stored with another shape": {"$tensor": {"dtype": "float32", "shape": [3], "at": "here"}},
    "stored with another dtype": {"$tensor": {"dtype": "int32", "shape": [2], "at": "here"}},
    "bytes stored as floats": {"$bytes": {"at": "here"}},
}


@pytest.mark.parametrize("what", MALFORMED)
def test_malformed_tree_is_a_checkpoint_error(what: str) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        decode([{"deep": MALFORMED[what]}], {"here": torch.zeros(2)}.__getitem__)


def test_tree_deeper_than_any_that_is_written_is_a_checkpoint_error() -> None:
    for open_, close in (("[", "]"), ('{"a":', "}"), ('{"$tuple":[', "]}")):
        depth = 120
        tree = json.loads(open_ * depth + "1" + close * depth)
        with pytest.raises(CheckpointError, match="too deep"):
            decode(tree, {}.__getitem__)
