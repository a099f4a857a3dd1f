"""Values of options: sizes, and names out of a list."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import Any

import typer

from fullshard.errors import OptionError
from fullshard.option_table import TABLE

_SIZES = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "kB": 10**3, "MB": 10**6, "GB": 10**9}


def size(text: str, option: str, remedy: str) -> int:
    """'24GiB' in bytes."""
    number, factor = text.strip(), 1
    for suffix, bytes_each in _SIZES.items():
        if number.endswith(suffix):
            number, factor = number.removesuffix(suffix), bytes_each
            break
    try:
        return round(float(number) * factor)
    except (ValueError, OverflowError):
        raise OptionError(f"{option} is {text!r}", remedy) from None


def one_of(option: str, known: Iterable[str]) -> Callable[[str | None], str | None]:
    """A callback for typer. Its own choices need an Enum or a Literal, which our tables are not."""
    choices = tuple(known)

    def check(value: str | None) -> str | None:
        if value is None or value in choices:
            return value
        near = get_close_matches(value, choices, 1)
        meant = f"Did you mean {near[0]}? " if near else ""
        raise OptionError(f"{option} is {value!r}", f"{meant}Choose one of {', '.join(choices)}.")

    return check


def choice(name: str, panel: str) -> Any:
    """The typer option for an option of `fs.shard` that has choices."""
    option = TABLE[name]
    check = one_of(f"--{name}", option.choices)
    metavar = "|".join(option.choices)
    return typer.Option(
        f"--{name}", metavar=metavar, callback=check, help=_sentence(option.help), rich_help_panel=panel
    )


def switch(name: str, panel: str) -> Any:
    """The typer option for an option of `fs.shard` that is a bool, off by default."""
    flag = f"--{name.replace('_', '-')}"
    return typer.Option(flag, help=_sentence(TABLE[name].help), rich_help_panel=panel)


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]
