"""Options of fs.shard that Hugging Face has no words for.

`fsdp_config` drops keys that it does not know, so they need a way of their own.
"""

from __future__ import annotations

import inspect
from typing import Any

from fullshard.api import shard
from fullshard.errors import OptionError

_KNOWN = tuple(name for name in inspect.signature(shard).parameters if name != "model")
_said: dict[str, Any] = {}


class options:
    """Options of fs.shard for models that are prepared from now on, above what the FSDP settings say.

        fullshard.hugging_face.options(keep_full="all", check_gradients=True)
        with fullshard.hugging_face.options(units=MyBlock):
            accelerator.prepare(model, optimizer)

    As a statement they count until the script ends; around a block, until the block ends. A `mesh` may be a
    function without arguments, called when the process group is there.
    """

    def __init__(self, **said: Any) -> None:
        unknown = sorted(set(said) - set(_KNOWN))
        if unknown:
            raise OptionError(
                f"options got {', '.join(map(repr, unknown))}, which fs.shard does not know",
                f"Choose from {', '.join(_KNOWN)}.",
            )
        self._before = dict(_said)
        _said.update(said)

    def __enter__(self) -> options:
        return self

    def __exit__(self, *_: object) -> None:
        _said.clear()
        _said.update(self._before)


def said() -> dict[str, Any]:
    """What was said, ready for fs.shard."""
    found = dict(_said)
    mesh = found.get("mesh")
    if callable(mesh):
        found["mesh"] = mesh()
    return found
