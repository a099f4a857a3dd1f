"""Functions, methods and properties of other libraries that are replaced, each recorded with its original."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class Patch:
    owner: type | ModuleType
    name: str
    original: Any
    replacement: Any

    def is_in_place(self) -> bool:
        return vars(self.owner).get(self.name) is self.replacement


class Patches:
    """Replacements that can be undone together.

    `packages` are those whose modules may have imported a replaced function by its name; '*': any. Functions
    and methods are replaced in place, not classes: scripts hold references to the classes already.
    """

    def __init__(self, *packages: str) -> None:
        self._packages = frozenset(packages)
        self._applied: dict[tuple[type | ModuleType, str], Patch] = {}

    def replace(self, owner: type | ModuleType, name: str, make: Callable[[Any], Any]) -> None:
        """Replace `owner.name` by `make(original)`, once."""
        if (owner, name) in self._applied:
            return
        original = vars(owner)[name]
        replacement = make(original)
        if callable(original):
            functools.update_wrapper(replacement, original)
        self._applied[owner, name] = Patch(owner, name, original, replacement)
        self._exchange(owner, name, original, replacement)

    def undo(self) -> None:
        """Put every original back, also where modules imported a replacement meanwhile."""
        for key, patch in reversed(list(self._applied.items())):
            if not patch.is_in_place():
                warnings.warn(
                    f"{patch.owner.__name__}.{patch.name} was replaced once more by other code, and stays so",
                    stacklevel=3,
                )
                continue
            self._exchange(patch.owner, patch.name, patch.replacement, patch.original)
            del self._applied[key]

    def _exchange(self, owner: type | ModuleType, name: str, before: Any, after: Any) -> None:
        setattr(owner, name, after)
        if isinstance(owner, ModuleType) and self._packages:
            for module_name, module in list(sys.modules.items()):
                package = module_name.partition(".")[0]
                if not self._packages.isdisjoint((package, "*")) and _attributes(module).get(name) is before:
                    setattr(module, name, after)

    def is_replacement(self, value: Any) -> bool:
        return any(patch.replacement is value for patch in self._applied.values())


def _attributes(module: Any) -> dict[str, Any]:
    return getattr(module, "__dict__", {})  # sys.modules may hold anything
