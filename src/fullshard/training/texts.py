"""Which files hold the text, and the documents in them."""

from __future__ import annotations

import glob
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fullshard.errors import OptionError

SUFFIXES = (".txt", ".md", ".jsonl")  # of a folder; other files are named, or found by a glob
PIECE_BYTES = 1 << 20
_KINDS = {type(None): "null", bool: "a truth value", list: "a list", dict: "an object"}  # of JSON


@dataclass(frozen=True)
class Fields:
    """The fields of a JSON object that hold its text: one, or a prompt that is given and its completion."""

    text: str
    prompt: str | None
    completion: str | None


@dataclass(frozen=True)
class Piece:
    """Some text, whether it is to be learned, and whether its document ends here."""

    text: bytes
    learned: bool
    ends: bool


def find_files(named: Sequence[Path], key: str, output: Path | None = None) -> list[Path]:
    """The files that `data.train` or `data.validation` names, each once, in the order of their names.

    Files below `output` are left out: the run writes its own metrics and model there, and with them the texts
    would differ when it is resumed.
    """
    paths: dict[Path, None] = {}
    for path in named:
        files = [file for file in _files_of(path) if file == path or output not in file.parents]
        if not files:
            raise OptionError(f"{key!r}: {_nothing_at(path)}", "Name files, globs or folders that are there.")
        paths.update(dict.fromkeys(files))
    return list(paths)


def _files_of(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(p for p in path.rglob("*") if p.suffix in SUFFIXES and p.is_file())
    if path.is_file():
        return [path]
    return sorted(p for match in glob.glob(str(path), recursive=True) if (p := Path(match)).is_file())


def _nothing_at(path: Path) -> str:
    if path.is_dir():
        return f"the folder {str(path)!r} holds no {', '.join(SUFFIXES)} file"
    if glob.has_magic(str(path)):
        return f"no file matches {str(path)!r}"
    return f"there is no {str(path)!r}"


def pieces(file: Path, fields: Fields) -> Iterator[Piece]:
    """The text of one file in pieces of bounded size; a plain file is one document."""
    try:
        yield from _lines_of_json(file, fields) if file.suffix == ".jsonl" else _plain(file)
    except OSError as error:
        raise OptionError(f"cannot read {str(file)!r}: {error.strerror or error}", "Check it.") from error


def _plain(file: Path) -> Iterator[Piece]:
    """Cut at ends of lines, where a tokenizer would hardly join anything."""
    with file.open("rb") as source:
        waiting = b""
        while block := source.read(PIECE_BYTES):
            waiting += block
            cut = waiting.rfind(b"\n") + 1
            if cut:
                yield Piece(waiting[:cut], learned=True, ends=False)
                waiting = waiting[cut:]
        yield Piece(waiting, learned=True, ends=True)


def _lines_of_json(file: Path, fields: Fields) -> Iterator[Piece]:
    with file.open("rb") as source:
        for number, line in enumerate(source, 1):
            if not line.strip():
                continue
            where = f"{str(file)!r}, line {number}"
            try:
                row = json.loads(line)
            except ValueError as error:
                raise OptionError(
                    f"{where} is not JSON: {error}", "A .jsonl file has one object a line."
                ) from None
            if fields.prompt is None or fields.completion is None:
                yield Piece(_field(row, fields.text, where, "data.text"), learned=True, ends=True)
            else:
                yield Piece(_field(row, fields.prompt, where, "data.prompt"), learned=False, ends=False)
                yield Piece(_field(row, fields.completion, where, "data.completion"), learned=True, ends=True)


def _field(row: object, name: str, where: str, key: str) -> bytes:
    if isinstance(row, dict) and name in row and not isinstance(row[name], str):
        raise OptionError(
            f"{where}: the field {name!r} holds {_KINDS.get(type(row[name]), 'a number')}, and no text",
            f"Mend it, or name another field with {key!r}.",
        )
    if not isinstance(row, dict) or name not in row:
        has = f"fields {', '.join(map(repr, row))}" if isinstance(row, dict) else f"a {type(row).__name__}"
        raise OptionError(
            f"{where} has no text in the field {name!r}; it has {has}", f"Name the field with {key!r}."
        )
    return str(row[name]).encode("utf-8", errors="surrogatepass")
