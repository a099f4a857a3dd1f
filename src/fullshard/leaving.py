"""What runs at exit after the script's own exit functions: it is registered when the package is imported."""

from __future__ import annotations

import atexit
from collections.abc import Callable

_last: list[Callable[[], None]] = []


def at_the_end(function: Callable[[], None]) -> None:
    """Call this function at exit, after everything that was registered since `import fullshard`."""
    _last.append(function)


@atexit.register
def _leave() -> None:
    for function in _last:
        function()
