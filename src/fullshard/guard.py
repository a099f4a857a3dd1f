"""`fs.Guard`: what follows when a loss is not finite, or jumps."""

from __future__ import annotations

import logging
import math
import os
import statistics
import time
from collections import deque
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn

from fullshard.checkpoint import rollbacks
from fullshard.checkpoint.rollbacks import Rejected
from fullshard.comm.control import gather_from_world
from fullshard.comm.groups import own_rank
from fullshard.data import Batches
from fullshard.errors import GradientError, OptionError, RolledBack
from fullshard.keywords import checked_keywords

_log = logging.getLogger("fullshard")
POLICIES = ("raise", "skip", "rollback")
WINDOW, FEWEST = 64, 8  # losses that a new one is compared with, and how many there must be
MAX_SUSPECT = 3  # checkpoints in a row after which no step was accepted
MAX_SKIPPED = 8  # steps in a row


@checked_keywords(
    {
        **dict.fromkeys(("nan", "on_inf", "on_nonfinite", "policy"), "Write on_nan='rollback'."),
        **dict.fromkeys(("spike_factor", "threshold", "max_ratio"), "Write spike=N."),
        **dict.fromkeys(("path", "folder", "directory", "run"), "Write root=..."),
    }
)
class Guard:
    """Rejects steps whose loss is not finite or jumps, alike on all ranks, and remembers that for restarts.

        guard = fs.Guard(root, batches, on_nan="rollback", on_spike="skip", spike=3.0)
        for step, batch in batches.steps(loader):
            loss = model(batch)
            if guard.rejects(loss):
                continue
            loss.backward()
            ...

    root: the folder of the run's checkpoints, as for fs.latest. Decisions are recorded there, in
        rejected.jsonl. Batches that were rejected are left out after every later start of the run.
    batches: the fs.Batches over whose `steps` the loop runs.
    on_nan, on_spike: what follows. 'raise' is an error that names step and ranks. 'skip' leaves the batch
        out: `rejects` is True, and the loop goes on with the next. 'rollback' ends all ranks with an error,
        RolledBack: started again, by `fullshard launch --elastic` or whoever restarts the script, it goes
        on from the newest checkpoint without that batch. If the first two steps after a checkpoint are
        rejected, it is suspect: the run goes to the one before it, and leaves out all batches in between.
        After three suspect checkpoints, or eight skipped steps, in a row it is an error: the batches are not
        the reason.
    spike: a loss of more than so many times the median of the last 64 is a jump; None never looks. For losses
        above zero, once there were 8 of them.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        batches: Batches,
        *,
        on_nan: str = "raise",
        on_spike: str = "raise",
        spike: float | None = None,
    ) -> None:
        for name, policy in (("on_nan", on_nan), ("on_spike", on_spike)):
            if policy not in POLICIES:
                raise OptionError(f"{name} is {policy!r}", f"Choose one of {', '.join(map(repr, POLICIES))}.")
        if spike is not None and not (isinstance(spike, (int, float)) and spike > 1):
            raise OptionError(f"spike is {spike!r}", "Give a factor above 1, or None.")
        if not isinstance(batches, Batches):
            raise OptionError(f"batches is a {type(batches).__name__}", "Give the fs.Batches of the loop.")
        self._root, self._batches = Path(root), batches
        self._on_nan, self._on_spike, self._spike = on_nan, on_spike, spike
        self._recent: deque[float] = deque(maxlen=WINDOW)
        self._accepted = 0  # steps of this process
        self._skipped = 0  # steps in a row
        [earlier, *_] = gather_from_world(
            [list(self._pair(one)) for one in rollbacks.read(self._root)], "guard"
        )
        for step, suspect in earlier:
            batches.leave_out(int(step), from_start=bool(suspect))

    @staticmethod
    def _pair(rejected: Rejected) -> tuple[int, bool]:
        return rejected.step, rejected.suspect

    def rejects(self, loss: Any, *others: Any) -> bool:
        """Whether to leave this step out, by a loss, and by other numbers that must be finite, such as the
        norm of the gradients. Every rank must call it once per step, before the optimizer's step, with its
        own loss. It waits for the device, and exchanges one small message.
        """
        mine = [float(value.detach() if hasattr(value, "detach") else value) for value in (loss, *others)]
        of_ranks = gather_from_world(mine, "guard")
        problem, policy = self._problem(of_ranks)
        if not problem:
            self._accepted, self._skipped = self._accepted + 1, 0
            self._recent.append(_mean(of_ranks))
            return False
        step = self._batches.current_step
        if policy == "raise":
            raise GradientError(
                f"step {step}: {problem}", "Look at its batch; or choose on_nan or on_spike of fs.Guard."
            )
        rejected = self._decided(step, problem, policy)
        self._record(rejected)
        if policy == "rollback":
            raise RolledBack(
                str(rejected),
                "Start the script again, as `fullshard launch --elastic` does: it goes on there.",
            )
        self._batches.leave_out(step)
        if own_rank() == 0:
            _log.warning("%s", rejected)
        return True

    def _problem(self, of_ranks: list[list[float]]) -> tuple[str, str]:
        """What is wrong with a step, and what is to follow; computed alike on all ranks."""
        bad = [
            (rank, value)
            for rank, values in enumerate(of_ranks)
            for value in values
            if not math.isfinite(value)
        ]
        if bad:
            ranks = ", ".join(str(rank) for rank in dict.fromkeys(rank for rank, _ in bad))
            return f"the loss is {bad[0][1]} on rank {ranks}", self._on_nan
        if self._spike is None or len(self._recent) < FEWEST:
            return "", ""
        usual, loss = statistics.median(self._recent), _mean(of_ranks)
        if usual <= 0 or loss <= self._spike * usual:
            return "", ""
        return f"the loss is {loss:.6g}, and was {usual:.6g} in the median before", self._on_spike

    def _decided(self, step: int, problem: str, policy: str) -> Rejected:
        rejected = Rejected(step, problem, policy, time.time())
        if policy == "skip":
            self._skipped += 1
            if self._skipped >= MAX_SKIPPED:
                self._give_up(step, problem, f"{self._skipped} steps in a row were rejected")
            return rejected
        if self._accepted:
            return rejected
        [tried, *_] = gather_from_world(self._suspects_before(step), "guard")
        if tried < 0:  # one batch may be bad right after a checkpoint
            return rejected
        loaded = rollbacks.loaded_at_ns()
        if loaded is None:
            self._give_up(step, problem, "there is no checkpoint before it")
        if tried >= MAX_SUSPECT:
            self._give_up(step, problem, f"so it was after each of {tried} checkpoints")
        return replace(rejected, suspect=True, saved_from_ns=loaded, saved_to_ns=time.time_ns())

    def _suspects_before(self, step: int) -> int:
        """How many checkpoints in a row were suspect, if the step before this was rejected too; else -1."""
        earlier = rollbacks.read(self._root)
        if not earlier or earlier[-1].step != step - 1:
            return -1
        return len(list(takewhile(lambda one: one.suspect, reversed(earlier))))

    def _give_up(self, step: int, problem: str, why: str) -> NoReturn:
        raise GradientError(
            f"step {step}: {problem}; {why}",
            "So the batch is not the reason. Look at the learning rate, the data and the model.",
        )

    def _record(self, rejected: Rejected) -> None:
        """By the first rank; all have it when this returns."""
        failed = ""
        if own_rank() == 0:
            try:
                rollbacks.add(self._root, rejected)
            except OSError as error:
                failed = str(error)
        [failed, *_] = gather_from_world(failed, "guard")
        if failed:
            raise GradientError(f"{rejected}; that cannot be recorded: {failed}", "See to the folder.")


def _mean(of_ranks: list[list[float]]) -> float:
    return sum(values[0] for values in of_ranks) / len(of_ranks)
