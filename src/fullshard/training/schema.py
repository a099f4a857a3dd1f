"""From a YAML file to frozen dataclasses, each value checked once, by its dotted key."""

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
    """Where values come from: its name in messages, and the folder that its paths are relative to."""

    name: str
    folder: Path


def build(kind: type[T], given: Any, source: Source, key: str = "") -> T:
    """An instance of a dataclass from a mapping; every key must be known and every value fit its type."""
    given, source = _unpacked(given, source)
    if given is None:
        given = {}
    if not isinstance(given, Mapping):
        raise _wrong(source, key, given, "a mapping of keys to values")
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for name in given:
        if name not in fields:
            raise _unknown(_source_of(given[name], source), _join(key, name), list(fields))
    hints = typing.get_type_hints(kind)
    values: dict[str, Any] = {}
    for name, field in fields.items():
        here = _join(key, name)
        if name in given:
            values[name] = _value(hints[name], given[name], source, here)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise OptionError(f"{here!r} is missing in {source.name}", f"Add it: {_purpose(field)}.")
    return kind(**values)


def _purpose(field: dataclasses.Field[Any]) -> str:
    return str(field.metadata.get("purpose", "it has no default"))


def _join(key: str, name: Any) -> str:
    return f"{key}.{name}" if key else str(name)


def _unpacked(given: Any, source: Source) -> tuple[Any, Source]:
    if isinstance(given, Given):
        return given.value, Source("--set", Path.cwd())
    return given, source


def _source_of(given: Any, source: Source) -> Source:
    """The source of an unknown section: --set, if everything in it comes from there."""
    if isinstance(given, dict) and given:
        sources = [_source_of(inner, source) for inner in given.values()]
        return sources[0] if all(one != source for one in sources) else source
    return _unpacked(given, source)[1]


def _value(kind: Any, given: Any, source: Source, key: str) -> Any:
    given, source = _unpacked(given, source)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if given is None and type(None) in arguments:
            return None
        kinds = [a for a in arguments if a is not type(None)]
        kinds.sort(key=lambda one: not _is_path(one))  # a text is a path if it may be
        fitting = next((kind for kind in kinds if _may_be(kind, given)), kinds[0])
        return _value(fitting, given, source, key)
    if origin is typing.Literal:
        # YAML reads a plain `off` or `on` as a truth value; no choice is spelled so.
        if given not in arguments or isinstance(given, bool):
            near = difflib.get_close_matches(str(given), map(str, arguments), n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            choices = ", ".join(map(str, arguments))
            raise OptionError(f"{key!r} in {source.name} is {given!r}", f"Choose one of {choices}.{hint}")
        return given
    if origin is tuple:
        items = list(given) if isinstance(given, list | tuple) else [given]
        return tuple(_value(arguments[0], item, source, f"{key}[{i}]") for i, item in enumerate(items))
    if _is_path(kind):
        kind = Path
    if dataclasses.is_dataclass(kind):
        return build(typing.cast(type, kind), given, source, key)
    return _plain(kind, given, source, key)


def _may_be(kind: Any, given: Any) -> bool:
    """Whether a value is of this kind, rather than of another of a union."""
    if dataclasses.is_dataclass(kind):
        return isinstance(given, Mapping)
    is_text = _is_path(kind) or typing.get_origin(kind) is typing.Literal
    return isinstance(given, str) if is_text else type(given) is kind


def _is_path(kind: Any) -> bool:
    origin: Any = typing.get_origin(kind)
    return kind is Path or origin is os.PathLike


def _plain(kind: Any, given: Any, source: Source, key: str) -> Any:
    if kind is Path:
        if not isinstance(given, str) or not given:
            raise _wrong(source, key, given, "a path")
        return Path(os.path.normpath(source.folder / Path(given).expanduser()))
    if kind is float:
        number = _number(given)
        if number is None:
            raise _wrong(source, key, given, "a number")
        return number
    if type(given) is not kind:
        names = {int: "an integer", str: "a text", bool: "true or false"}
        raise _wrong(source, key, given, names[kind])
    return given


def _number(given: Any) -> float | None:
    if isinstance(given, bool) or not isinstance(given, int | float | str):
        return None
    try:
        return float(given)  # also of a text: YAML 1.1 reads 3e-4, without a point, as one
    except ValueError:
        return None


def _wrong(source: Source, key: str, given: Any, expected: str) -> OptionError:
    what = f"{key!r} in {source.name}" if key else source.name
    return OptionError(f"{what} is {given!r}, a {type(given).__name__}", f"Give {expected}.")


def _unknown(source: Source, key: str, known: list[str]) -> OptionError:
    name = key.rpartition(".")[2]
    near = difflib.get_close_matches(name, known, n=1)
    place = f" under {key.rpartition('.')[0]!r}" if "." in key else ""
    remedy = f"Did you mean {near[0]!r}?" if near else f"Known keys{place}: {', '.join(known)}."
    return OptionError(f"unknown key {key!r} in {source.name}", remedy)


def apply_override(given: dict[str, Any], text: str, parse: Any) -> None:
    """Put `key.path=value` into the values of a file; the value is YAML."""
    key, equals, value = text.partition("=")
    names = key.strip().split(".")
    if not equals or not all(names):
        raise OptionError(f"--set got {text!r}", "Write it as --set section.key=value.")
    place = given
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
