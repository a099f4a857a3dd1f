"""Patches of accelerate, transformers and trl: applied when their modules are imported, or now if they are.

Nothing is imported here, so a script that never imports accelerate pays nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from fullshard import extras
from fullshard.patches import Patches

PATCHES = Patches("accelerate", "transformers", "trl")

# A module of a library, and our module that patches it, imported only when it is needed.
_PATCHED_BY = {
    "accelerate.state": "fullshard.hugging_face.accelerator_state",
    "accelerate.accelerator": "fullshard.hugging_face.accelerators",
    "transformers.training_args": "fullshard.hugging_face.training_arguments",
    "transformers.trainer": "fullshard.hugging_face.trainers",
    "transformers.trainer_utils": "fullshard.hugging_face.trainers",
    "transformers.trainer_pt_utils": "fullshard.hugging_face.trainers",
    "trl.models.utils": "fullshard.hugging_face.reference_models",
}
# Patched in any version, so that an untested one is refused when FSDP is requested, and only then.
_IN_ANY_VERSION = ("accelerate.state",)


def turn_on() -> None:
    """From now on, FSDP requested through Hugging Face runs on fullshard. A second call changes nothing."""
    for name in _PATCHED_BY:
        if name in sys.modules:
            _patch(sys.modules[name])
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


def turn_off() -> None:
    """Put the libraries' own functions and methods back. Models that were sharded meanwhile stay sharded."""
    if _FINDER in sys.meta_path:
        sys.meta_path.remove(_FINDER)
    PATCHES.undo()


def _patch(module: ModuleType) -> None:
    name = module.__name__
    if name in _IN_ANY_VERSION or extras.is_tested(name.partition(".")[0]):
        patching: Any = import_module(_PATCHED_BY[name])
        patching.apply(module)


class _Finder(MetaPathFinder):
    """Finds the modules to be patched by the other finders, and patches them once they have been executed."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        if fullname not in _PATCHED_BY:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _PatchingLoader(spec.loader)
                return spec
        return None


_FINDER = _Finder()


class _PatchingLoader(Loader):
    def __init__(self, inner: Loader) -> None:
        self._inner = inner

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._inner
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner  # tracebacks and inspect read the source through it
        self._inner.exec_module(module)
        _patch(module)
