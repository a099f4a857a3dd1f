"""Keyword arguments of the public functions: an unknown one is an error that names what was meant.

Python's own TypeError names the wrong word alone. Here a misspelt option is answered with its right name, and
a word of another library with what it is called here. Signatures stay as they are written.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, TypeVar

from fullshard.errors import OptionError

F = TypeVar("F", bound=Callable[..., Any])


def unknown(
    of: str, name: str, known: Iterable[str], other_names: Mapping[str, str], required: Iterable[str] = ()
) -> OptionError:
    """The error for an unknown option. `other_names`: words of other libraries, and what to write instead."""
    options = tuple(known)
    names = (*required, *options)
    listed = f"Options are {', '.join(options)}." if options else "It has no options."
    near = _nearest(name.lower().replace("-", "_"), names, other_names)
    if near is None:
        return OptionError(f"{of} has no option {name!r}", listed)
    advice = f"Did you mean {near!r}?" if near in names else other_names[near]
    return OptionError(f"{of} has no option {name!r}", f"{advice} {listed}")


def _nearest(word: str, names: Sequence[str], other_names: Iterable[str]) -> str | None:
    """What was probably meant. Between names that are about as near, one of our own."""
    if word in other_names:
        return word
    for known, least in ((names, 0.75), ((*names, *other_names), 0.65)):
        near = get_close_matches(word, known, 1, least)
        if near:
            return near[0]
    return None


def checked_keywords(other_names: Mapping[str, str] | None = None, of: str | None = None) -> Callable[[F], F]:
    """Decorates a function or a class: a call with an unknown keyword, or with too many positional arguments,
    raises an OptionError. `of` is the name in messages, by default that of `fs`."""

    def decorate(target: F) -> F:
        label = of or f"fs.{target.__name__}"
        if isinstance(target, type):
            initialize: Any = vars(target)["__init__"]
            target.__init__ = _checked(initialize, label, other_names or {}, 1)  # type: ignore[misc]
            return target
        return _checked(target, label, other_names or {}, 0)

    return decorate


def _checked(function: F, label: str, other_names: Mapping[str, str], bound: int) -> F:
    """`bound`: how many leading arguments Python itself passes: `self` of a method."""
    parameters = list(inspect.signature(function).parameters.values())[bound:]
    names = frozenset(one.name for one in parameters)
    required = [one.name for one in parameters if one.default is one.empty]
    by_position = [one for one in parameters if one.kind is not one.KEYWORD_ONLY]
    options = [one.name for one in parameters if one.default is not one.empty]
    most = len(by_position) + bound

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not names.issuperset(kwargs):
            wrong = next(name for name in kwargs if name not in names)
            raise unknown(label, wrong, options, other_names, required)
        if len(args) > most:
            taken = ", ".join(repr(one.name) for one in by_position)
            raise OptionError(
                f"{label} got {len(args) - bound} positional arguments, and takes {taken} by position",
                f"Give the options by name: {', '.join(f'{name}=...' for name in options)}.",
            )
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]
