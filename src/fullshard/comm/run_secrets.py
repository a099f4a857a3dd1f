"""The secret of a run, with which hosts sign what they write into the store.

It is made of a word that the ranks agree on over their own connections, which is never in the store, and of
the one that the launcher gave them, if it did.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence

from fullshard.environment import run_secret

_agreed: dict[tuple[int, ...], bytes] = {}


def propose() -> str:
    return os.urandom(16).hex()


def remember(members: Sequence[int], agreed: str) -> None:
    """What the first of these ranks has proposed, on all of them."""
    _agreed[tuple(members)] = hashlib.sha256(f"{agreed} {run_secret()}".encode()).digest()


def secret(members: Sequence[int]) -> bytes | None:
    """None before these ranks have agreed."""
    return _agreed.get(tuple(members))
