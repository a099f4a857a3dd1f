"""Options of fs.shard that Hugging Face has no option for.

`fsdp_config` drops unknown keys, so they are given separately.
"""

from __future__ import annotations

import inspect
from typing import Any

from fullshard import keywords
from fullshard.api import shard
from fullshard.option_table import OTHER_NAMES

_KNOWN = tuple(name for name in inspect.signature(shard).parameters if name != "model")
_given: dict[str, Any] = {}


class options:
    """Options of fs.shard for models that are prepared from now on; they override the FSDP settings.

        fullshard.hugging_face.options(keep_full="all", check_gradients=True)
        with fullshard.hugging_face.options(units=MyBlock):
            accelerator.prepare(model, optimizer)

    As a statement they apply until the script ends; as a context, until it is left. `mesh` may be a function
    without arguments, which is called once the process group exists.
    """

    def __init__(self, **given: Any) -> None:
        unknown = sorted(set(given) - set(_KNOWN))
        if unknown:
            raise keywords.unknown("fullshard.hugging_face.options", unknown[0], _KNOWN, OTHER_NAMES)
        self._before = dict(_given)
        _given.update(given)

    def __enter__(self) -> options:
        return self

    def __exit__(self, *_: object) -> None:
        _given.clear()
        _given.update(self._before)


def given_options() -> dict[str, Any]:
    """Keyword arguments of fs.shard."""
    given = dict(_given)
    mesh = given.get("mesh")
    if callable(mesh):
        given["mesh"] = mesh()
    return given
