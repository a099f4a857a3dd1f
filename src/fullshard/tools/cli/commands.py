"""What a command is: a function with typer's options, and the words that teach it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Command:
    """A command. `about` and `examples` are shown as they are written, so their lines are short."""

    name: str
    run: Callable[..., int]
    summary: str
    about: str
    examples: str
    settings: dict[str, Any] = field(default_factory=dict)  # of typer's context


def shown(text: str, plain: bool) -> str:
    """A help text, its lines kept: on a terminal by rich, which must not take brackets for markup."""
    if plain:
        return "\n\n".join(f"\b\n{paragraph}" for paragraph in text.strip().split("\n\n"))
    return text.strip().replace("[", "\\[")
