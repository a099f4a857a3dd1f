"""Public names of the package that are imported when they are first used."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

# Modules that were loaded with the package before its names were lazy, and can be used as its attributes.
_MODULES = ("api", "data", "errors", "options", "precision")


class _Package(ModuleType):
    """A package whose names are in other modules."""

    _homes: Mapping[str, str]

    def __getattr__(self, name: str) -> Any:
        if name in self._homes:
            value: Any = getattr(import_module(self._homes[name]), name)
        elif name in _MODULES:
            value = import_module(f"{self.__name__}.{name}")
        else:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}", name=name, obj=self)
        vars(self)[name] = value
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        """Python makes every imported submodule an attribute of its package. `plan` is a public function too,
        which the folder of that name must not hide."""
        if not (name in self._homes and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        """By name, as cloudpickle pickles plain modules: Ray and Dask send functions of a script that way,
        with the modules that they use."""
        return import_module, (self.__name__,)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._homes})


def install(package: str, homes: Mapping[str, str]) -> None:
    """`homes`: by public name, the module that defines it."""
    module = sys.modules[package]
    vars(module)["_homes"] = homes
    module.__class__ = _Package
