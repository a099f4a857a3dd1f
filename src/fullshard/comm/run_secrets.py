"""What the ranks of a run agree on before anything else: a secret, and which host each of them is on.

With the secret hosts sign what they write into the store. It is made of a word that the ranks agree on over
their own connections, which is never in the store, and of the one that the launcher gave them, if it did.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass

from fullshard.comm.messages import record
from fullshard.environment import host_name, run_secret


@record
@dataclass(frozen=True)
class Proposal:
    word: str  # of the first rank alone: ranks of one host then propose the same, which is sent once
    host: str


_agreed: dict[tuple[int, ...], tuple[bytes, list[str]]] = {}


def propose(is_first: bool) -> Proposal:
    return Proposal(os.urandom(16).hex() if is_first else "", host_name())


def remember(members: Sequence[int], proposals: Sequence[Proposal]) -> None:
    """What these ranks have proposed, the same on all of them."""
    secret = hashlib.sha256(f"{proposals[0].word} {run_secret()}".encode()).digest()
    _agreed[tuple(members)] = secret, [proposal.host for proposal in proposals]


def secret(members: Sequence[int]) -> bytes | None:
    """None before these ranks have agreed."""
    agreed = _agreed.get(tuple(members))
    return agreed[0] if agreed is not None else None


def hosts(members: Sequence[int]) -> list[str]:
    """The host of each of these ranks; empty before they have agreed."""
    agreed = _agreed.get(tuple(members))
    return agreed[1] if agreed is not None else []
