"""A command: a function with typer's options, and its help texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Command:
    """A command. The lines of `about` and `examples` are printed as they are, so they are short."""

    name: str
    run: Callable[..., int]
    summary: str
    about: str
    examples: str
    settings: dict[str, Any] = field(default_factory=dict)  # of typer's context
    names: Callable[[], Sequence[str]] = tuple  # that shell completion offers, besides options and files


def shown(text: str, plain: bool) -> str:
    """A help text with its line breaks kept. On a terminal rich prints it: brackets are not markup."""
    if plain:
        return "\n\n".join(f"\b\n{paragraph}" for paragraph in text.strip().split("\n\n"))
    return text.strip().replace("[", "\\[")
