"""Values of options: sizes, and names out of a list."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import Any

import typer

from fullshard.errors import OptionError
from fullshard.option_table import TABLE


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
    about = TABLE[name].help.partition(";")[0].removesuffix(".")  # what True does
    return typer.Option(flag, help=_sentence(f"{about}."), rich_help_panel=panel)


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]
