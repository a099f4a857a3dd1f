"""From what a YAML file says to frozen dataclasses, each value checked once, by its dotted key."""

from __future__ import annotations

import dataclasses
import difflib
import os
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from fullshard.errors import OptionError

T = TypeVar("T")


@dataclass(frozen=True)
class Given:
    """A value from the command line: its paths are relative to the folder that one is in."""

    value: Any


@dataclass(frozen=True)
class Source:
    """Where values come from: what messages call it, and the folder that its paths start at."""

    name: str
    folder: Path


def build(kind: type[T], said: Any, source: Source, key: str = "") -> T:
    """An instance of a dataclass from a mapping; every key must be known and every value fit its type."""
    said, source = _unpacked(said, source)
    if said is None:
        said = {}
    if not isinstance(said, Mapping):
        raise _wrong(source, key, said, "a mapping of keys to values")
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for name in said:
        if name not in fields:
            raise _unknown(_source_of(said[name], source), _join(key, name), list(fields))
    hints = typing.get_type_hints(kind)
    values: dict[str, Any] = {}
    for name, field in fields.items():
        here = _join(key, name)
        if name in said:
            values[name] = _value(hints[name], said[name], source, here)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise OptionError(f"{here!r} is missing in {source.name}", f"Add it: {_purpose(field)}.")
    return kind(**values)


def _purpose(field: dataclasses.Field[Any]) -> str:
    return str(field.metadata.get("purpose", "it has no default"))


def _join(key: str, name: Any) -> str:
    return f"{key}.{name}" if key else str(name)


def _unpacked(said: Any, source: Source) -> tuple[Any, Source]:
    if isinstance(said, Given):
        return said.value, Source("--set", Path.cwd())
    return said, source


def _source_of(said: Any, source: Source) -> Source:
    """Who named a section that is not known: --set, if all that is in it comes from there."""
    if isinstance(said, dict) and said:
        found = [_source_of(inner, source) for inner in said.values()]
        return found[0] if all(one != source for one in found) else source
    return _unpacked(said, source)[1]


def _value(kind: Any, said: Any, source: Source, key: str) -> Any:
    said, source = _unpacked(said, source)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if said is None and type(None) in arguments:
            return None
        (kind,) = (a for a in arguments if a is not type(None))
        return _value(kind, said, source, key)
    if origin is typing.Literal:
        # YAML reads a plain `off` or `on` as a truth value; no choice of ours is spelled so.
        if said not in arguments or isinstance(said, bool):
            near = difflib.get_close_matches(str(said), map(str, arguments), n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            choices = ", ".join(map(str, arguments))
            raise OptionError(f"{key!r} in {source.name} is {said!r}", f"Choose one of {choices}.{hint}")
        return said
    if origin is tuple:
        items = list(said) if isinstance(said, list | tuple) else [said]
        return tuple(_value(arguments[0], item, source, f"{key}[{i}]") for i, item in enumerate(items))
    if dataclasses.is_dataclass(kind):
        return build(typing.cast(type, kind), said, source, key)
    return _plain(kind, said, source, key)


def _plain(kind: Any, said: Any, source: Source, key: str) -> Any:
    if kind is Path:
        if not isinstance(said, str) or not said:
            raise _wrong(source, key, said, "a path")
        return Path(os.path.normpath(source.folder / Path(said).expanduser()))
    if kind is float:
        number = _number(said)
        if number is None:
            raise _wrong(source, key, said, "a number")
        return number
    if type(said) is not kind:
        names = {int: "a whole number", str: "a text", bool: "true or false"}
        raise _wrong(source, key, said, names[kind])
    return said


def _number(said: Any) -> float | None:
    if isinstance(said, bool) or not isinstance(said, int | float | str):
        return None
    try:
        return float(said)  # also of a text: YAML 1.1 reads 3e-4, without a point, as one
    except ValueError:
        return None


def _wrong(source: Source, key: str, said: Any, wanted: str) -> OptionError:
    what = f"{key!r} in {source.name}" if key else source.name
    return OptionError(f"{what} is {said!r}, a {type(said).__name__}", f"Give {wanted}.")


def _unknown(source: Source, key: str, known: list[str]) -> OptionError:
    name = key.rpartition(".")[2]
    near = difflib.get_close_matches(name, known, n=1)
    place = f" under {key.rpartition('.')[0]!r}" if "." in key else ""
    remedy = f"Did you mean {near[0]!r}?" if near else f"Known keys{place}: {', '.join(known)}."
    return OptionError(f"unknown key {key!r} in {source.name}", remedy)


def apply_override(said: dict[str, Any], text: str, parse: Any) -> None:
    """Put `key.path=value` into what a file said; the value is YAML."""
    key, equals, value = text.partition("=")
    names = key.strip().split(".")
    if not equals or not all(names):
        raise OptionError(f"--set got {text!r}", "Write it as --set section.key=value.")
    place = said
    for name in names[:-1]:
        inner = place.get(name)
        if isinstance(inner, Given) and isinstance(inner.value, dict):
            inner = {name: Given(value) for name, value in inner.value.items()}
        if inner is None:
            inner = {}
        if not isinstance(inner, dict):
            raise OptionError(f"--set {key.strip()}: {name!r} is {inner!r}, not a section", "Check the key.")
        place[name] = inner
        place = inner
    place[names[-1]] = Given(parse(value, f"--set {key.strip()}"))
