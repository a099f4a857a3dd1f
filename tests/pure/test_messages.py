"""Control messages between ranks are plain data, and nothing in the package unpickles what it receives."""

from __future__ import annotations

import ast
import contextlib
import json
import math
import os
import random
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fullshard as fs
from fullshard.checkpoint.format.checksums import PIECE
from fullshard.checkpoint.format.manifest import Part
from fullshard.comm import messages, recorder_files, tree
from fullshard.errors import NotSupported

PACKAGE = Path(fs.__file__).parent
PLAIN: dict[str, Any] = {
    "constants": [None, True, False, 0, -1, 2**80, "", "naïve \0 text", 1.5, math.inf, -math.inf],
    "containers": [(1, (2,)), {3, 4}, frozenset({5}), {"a": 1, 2: "b", (3, "c"): None}, {"$": 1}, {}],
    "bytes": [b"", b"\0\xff" * 1000],
    "torch": [torch.float32, torch.bfloat16],
    "paths": [Path("/tmp/a")],
    "records": [Part("w", 1, 2, (3, 4))],
}
TENSORS = [
    torch.arange(6.0).view(2, 3).t(),
    torch.tensor(3, dtype=torch.int64),
    torch.empty(0, 4),
    torch.ones(3, dtype=torch.bfloat16),
    torch.tensor([1 + 2j]),
    torch.tensor([True, False]),
]


def _back(value: Any) -> Any:
    return messages.decode(messages.encode(value), 0)


@pytest.mark.parametrize("kind", PLAIN)
def test_plain_values_come_back_equal_and_of_the_same_type(kind: str) -> None:
    found = _back(PLAIN[kind])
    assert found == PLAIN[kind]
    assert [type(value) for value in found] == [type(value) for value in PLAIN[kind]]
    assert math.isnan(_back(math.nan))


def test_tensors_and_arrays_come_back_bitwise() -> None:
    for tensor in TENSORS:
        found = _back({"a": [tensor]})["a"][0]
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found, tensor)
    pieces = np.array([(1, 2, 3, 4)], dtype=PIECE)
    assert _back(pieces).dtype == PIECE
    assert _back(pieces).tolist() == pieces.tolist()
    assert type(_back(np.float32(0.5))) is np.float32


class Sneaky:
    def __reduce__(self) -> Any:
        return os.system, ("true",)


def test_what_is_not_plain_is_an_error_where_it_is_read_and_names_the_sender() -> None:
    for value in (Sneaky(), lambda: 0, [object()], torch.ones(2).to_sparse(), np.array([object()])):
        message = messages.encode(value)  # no error here: the other ranks wait for a message
        with pytest.raises(NotSupported, match="rank 3 cannot send a"):
            messages.decode(message, 3)
    deep: Any = []
    for _ in range(200):
        deep = [deep]
    with pytest.raises(NotSupported, match="nested"):
        _back(deep)


def test_damaged_messages_are_our_error_and_take_no_memory() -> None:
    message = messages.encode(
        {"w": torch.arange(20.0), "list": [1, (2, b"abc")], "part": Part("w", 1, 2, (3,))}
    )
    generator = random.Random(0)
    for _ in range(2000):
        changed = bytearray(message)
        for _ in range(generator.randint(1, 4)):
            changed[generator.randrange(len(changed))] = generator.randrange(256)
        with contextlib.suppress(fs.FullshardError):
            messages.decode(bytes(changed[: generator.randint(0, len(changed))]), 1)
    for content in (
        {"$": ["tensor", "float32", [2**40], 0]},
        {"$": ["array", "<f8", [2**40], 0]},
        {"$": ["array", "|O", [1], 0]},
        {"$": ["record", "os.system", ["true"]]},
        {"$": ["record", "builtins.eval", ["1"]]},
    ):
        text = json.dumps([content, [8]]).encode()
        with pytest.raises(fs.FullshardError, match="cannot be read"):
            messages.decode(struct.pack("<q", len(text)) + text + bytes(8), 1)


def test_a_message_that_is_announced_as_too_large_is_refused_on_every_rank() -> None:
    def frame(size: int) -> tree.Frame:
        return tree.Frame(size, 1, False, tree.label_of("agreement"), b"")

    for sizes, rank in (([10, messages.MAX_BYTES + 1], 5), ([-1, 3], 4)):
        problem = tree._problem([frame(size) for size in sizes], [4, 5])
        assert problem is not None
        with pytest.raises(NotSupported, match=f"rank {rank} sends a message of"):
            tree.raise_failure(problem)


# --- no pickle --------------------------------------------------------------------------------------------

# Modules that may name it, with the reason.
ALLOWED = {
    "checkpoint/dcp/folders.py": "writes torch's .metadata, which is a pickle; nothing is read",
    "lightning/checkpoints.py": "Lightning's own objects; weights_only is what the caller of Lightning sets",
    "tools/simulation/group.py": "replaces torch's object broadcast by nothing, for a script's own calls",
}
MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
OBJECTS = {"all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"}
OBJECTS |= {"send_object_list", "recv_object_list"}


def _uses(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [a.name for a in node.names if a.name.split(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            found += [module] if module.split(".")[0] in MODULES else []
            if module.startswith("torch.distributed"):
                found += [a.name for a in node.names if a.name in OBJECTS]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id in ("dist", "distributed", "distributed_c10d") and node.attr in OBJECTS:
                found.append(f"{node.value.id}.{node.attr}")
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
            safe = [k for k in node.keywords if k.arg == "weights_only"]
            literal = safe[0].value if safe else None
            if not (isinstance(literal, ast.Constant) and literal.value is True):
                found.append(ast.unparse(node)[:80])
    return found


def test_no_module_pickles_or_unpickles() -> None:
    wrong = {str(path.relative_to(PACKAGE)): uses for path in PACKAGE.rglob("*.py") if (uses := _uses(path))}
    assert {name: uses for name, uses in wrong.items() if name not in ALLOWED} == {}


# --- the folder of the flight recorder ----------------------------------------------------------------------


def _abandoned_record(folder: Path) -> Path:
    folder.mkdir(mode=0o700)
    head = recorder_files.HEADER.pack(recorder_files.MAGIC, recorder_files.host(), 2**22 + 1, 1, 0, 1, 0)
    path = folder / "rank-0.record"
    path.write_bytes(head)
    return path


def test_cleaning_up_follows_no_link_opens_no_fifo_and_touches_no_other_folder(tmp_path: Path) -> None:
    begun = time.monotonic()
    with_fifo, good, linked = tmp_path / "p-fifo", tmp_path / "p-good", tmp_path / "p-link"
    with_fifo.mkdir()
    os.mkfifo(with_fifo / "rank-0.record")
    _abandoned_record(good)
    victim = _abandoned_record(tmp_path / "other")
    linked.symlink_to(tmp_path / "other")
    with_link = tmp_path / "p-links"
    with_link.mkdir()
    (with_link / "rank-0.record").symlink_to(victim)
    os.mkfifo(tmp_path / "p-not-a-folder")
    recorder_files.remove_abandoned(str(tmp_path), "p-")
    assert time.monotonic() - begun < 60.0, "it blocked"
    assert not good.exists(), "what a killed run left behind goes"
    assert victim.exists()
    assert {p.name for p in tmp_path.iterdir()} == {"p-fifo", "p-link", "p-links", "p-not-a-folder", "other"}


def test_a_folder_of_another_user_or_behind_a_link_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    with pytest.raises(OSError):
        recorder_files.Folder(str(tmp_path / "link"))
    record = _abandoned_record(tmp_path / "theirs")
    folder = recorder_files.Folder(str(tmp_path / "theirs"))
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert folder.open("rank-0.record") is None
    with pytest.raises(PermissionError, match="another user"):
        recorder_files.Folder(str(tmp_path / "mine"))
    recorder_files.remove_abandoned(str(tmp_path), "theirs")
    assert record.exists()
    folder.close()


def test_a_record_that_is_a_fifo_or_a_link_is_unknown_and_does_not_block(tmp_path: Path) -> None:
    folder = recorder_files.Folder(str(tmp_path))
    os.mkfifo(tmp_path / "rank-1.record")
    (tmp_path / "rank-2.record").symlink_to("/dev/zero")
    assert recorder_files.Peer.open(folder, 1, 3) is None
    assert recorder_files.Peer.open(folder, 2, 3) is None
    assert folder.ranks() == [1, 2]
    folder.close()
