"""Texts as one row of tokens in a memory-mapped file, made once for the same texts, and its sequences."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fullshard.errors import OptionError
from fullshard.training.texts import Fields, pieces
from fullshard.training.tokenizers import Tokenizer

_VERSION = 1  # goes up when the same texts give other tokens
_INFO, _TOKENS, _LEARNED = "info.json", "tokens.bin", "learned.bin"
IGNORED = -100  # a target that does not count


@dataclass(frozen=True)
class Row:
    """A row of tokens on disk. `learned` marks those that are targets, where not all of them are."""

    folder: Path
    key: str
    num_tokens: int
    num_documents: int
    dtype: str
    masked: bool

    def open(self) -> tuple[np.memmap[Any, Any], np.memmap[Any, Any] | None]:
        tokens = np.memmap(self.folder / _TOKENS, dtype=self.dtype, mode="r", shape=(self.num_tokens,))
        if not self.masked:
            return tokens, None
        return tokens, np.memmap(self.folder / _LEARNED, dtype=np.bool_, mode="r", shape=(self.num_tokens,))


def row_of(files: Sequence[Path], fields: Fields, tokenizer: Tokenizer, cache: Path) -> Row:
    """The row of these files' tokens: found in the cache, or made there.

    One process makes it; others that ask at the same time wait, by a lock that ends with its process.
    """
    key = _key(files, fields, tokenizer)
    folder = cache / key
    with _locked(cache):
        if not (folder / _INFO).is_file():
            _make(folder, files, fields, tokenizer)
    return read(folder)


def read(folder: Path) -> Row:
    """A row that was made earlier."""
    info = json.loads((folder / _INFO).read_text())
    return Row(folder, folder.name, info["num_tokens"], info["num_documents"], info["dtype"], info["masked"])


def _key(files: Sequence[Path], fields: Fields, tokenizer: Tokenizer) -> str:
    """A digest of contents, not of names or times: moved files are the same text, edited ones are not."""
    digest = hashlib.sha256(f"{_VERSION} {tokenizer.fingerprint}".encode())
    for file in files:
        is_json = file.suffix == ".jsonl"
        digest.update(repr((is_json, fields if is_json else None)).encode())
        try:
            with file.open("rb") as source:
                digest.update(hashlib.file_digest(source, "sha256").digest())
        except OSError as error:
            raise OptionError(f"cannot read {str(file)!r}: {error.strerror or error}", "Check it.") from error
    return digest.hexdigest()[:24]


@contextlib.contextmanager
def _locked(cache: Path) -> Iterator[None]:
    try:
        cache.mkdir(parents=True, exist_ok=True)
        handle = os.open(cache / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise OptionError(
            f"cannot keep tokens in {str(cache)!r}: {error.strerror or error}",
            "Name another output, or data.cache.",
        ) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _make(folder: Path, files: Sequence[Path], fields: Fields, tokenizer: Tokenizer) -> None:
    """Written under another name first, so that an existing row is complete."""
    staging = Path(tempfile.mkdtemp(prefix=".making-", dir=folder.parent))
    try:
        info = _write(staging, files, fields, tokenizer)
        (staging / _INFO).write_text(json.dumps(info))
        staging.rename(folder)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _write(folder: Path, files: Sequence[Path], fields: Fields, tokenizer: Tokenizer) -> dict[str, Any]:
    dtype = np.dtype("<u2") if tokenizer.size <= 1 << 16 else np.dtype("<u4")
    masked = fields.prompt is not None and any(file.suffix == ".jsonl" for file in files)
    count = documents = 0
    with (folder / _TOKENS).open("wb") as tokens, contextlib.ExitStack() as stack:
        learned = stack.enter_context((folder / _LEARNED).open("wb")) if masked else None
        for file in files:
            for piece in pieces(file, fields):
                ids = tokenizer.encode(piece.text, repr(str(file)))
                if piece.ends and tokenizer.end is not None:
                    ids = np.append(ids.astype(np.int64), tokenizer.end)
                tokens.write(ids.astype(dtype).tobytes())
                if learned is not None:
                    learned.write(np.full(len(ids), piece.learned, dtype=np.bool_).tobytes())
                count, documents = count + len(ids), documents + piece.ends
    return {"num_tokens": count, "num_documents": documents, "dtype": dtype.str, "masked": masked}


class Sequences:
    """Some of the sequences that a row is cut into: inputs, and the same one token later as targets."""

    def __init__(self, row: Row, length: int, numbers: np.ndarray[Any, np.dtype[np.int64]]) -> None:
        self.length, self._numbers = length, numbers
        self._tokens, self._learned = row.open()

    def __len__(self) -> int:
        return len(self._numbers)

    def batch(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Inputs and targets of some sequences; those that are not learned are IGNORED."""
        starts = self._numbers[list(indices)] * self.length
        places = starts[:, None] + np.arange(self.length + 1)
        tokens = torch.from_numpy(self._tokens[places].astype(np.int64))
        inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
        if self._learned is not None:
            targets[~torch.from_numpy(self._learned[places[:, 1:]])] = IGNORED
        return inputs, targets

    def count_targets(self, indices: Sequence[int]) -> int:
        """How many targets of these sequences count."""
        if self._learned is None:
            return len(indices) * self.length
        starts = self._numbers[list(indices)] * self.length
        return int(self._learned[starts[:, None] + np.arange(1, self.length + 1)].sum())


def split(row: Row, length: int, fraction: float) -> tuple[Sequences, Sequences | None]:
    """Training and validation sequences of one row: the latter are spread evenly over it."""
    numbers = np.arange(max(0, (row.num_tokens - 1) // length), dtype=np.int64)
    held_out = np.floor((numbers + 1) * fraction) > np.floor(numbers * fraction)
    validation = Sequences(row, length, numbers[held_out]) if held_out.any() else None
    return Sequences(row, length, numbers[~held_out]), validation
