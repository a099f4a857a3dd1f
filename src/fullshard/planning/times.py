"""How long one rank's step takes, by what it is spent on. Pure."""

from __future__ import annotations

from dataclasses import dataclass

MOVING = "the link to host memory"


@dataclass(frozen=True)
class Times:
    """Seconds of one rank's step."""

    step_s: float
    compute_s: float  # forward, backward and the optimizer's step, if nothing were waited for
    inside_s: float  # the link inside a node is in use; on a network of one level the only one
    across_s: float  # the link between nodes is in use
    moving_s: float  # the link to host memory, or the disk, is in use
    optimizer_s: float
    host_s: float  # to launch the kernels: the step takes at least that long
    flop: float

    @property
    def exposed_s(self) -> float:
        """Waiting for links."""
        return max(0.0, self.step_s - self.compute_s)

    @property
    def bound(self) -> str:
        """What takes longest."""
        named = {
            "computing": self.compute_s,
            "the link inside a node": self.inside_s,
            "the link between nodes": self.across_s,
            MOVING: self.moving_s,
            "launching kernels": self.host_s,
        }
        return max(named, key=lambda name: named[name])
