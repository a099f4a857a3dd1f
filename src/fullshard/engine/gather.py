"""Which unit is gathered when: executes the schedule, one unit ahead.

A rank that takes another path than the others still passes every entry of the walk. Whether an entry
gathers follows from the schedule alone, never from this rank's path.

Two rules keep ranks on different paths from waiting for each other in a circle: before it waits for a
unit's gather in backward, a rank has sent its gradients of every unit that comes earlier (zeros for
those it skipped); and before it sends a unit's gradients, it has taken part in that unit's gather.

On several nodes a gather has two legs, each in groups of its own: between nodes, then inside each. The first
leg of a unit is issued when the walk comes within CROSS_AHEAD entries of it, so in the order of the walk, at
the same place of it on every rank. The second one is issued in the order of the walk, too: on a GPU one entry
ahead, behind a stream that waits for the first leg; on a CPU when that is over, or when the unit is needed.
So the host waits for a first leg only where it would wait for the unit's gather, and both rules hold. A rank
that does not need a unit has taken part in its gather when it has issued both legs: it does so before it
sends zeros for it, and at the end of a pass, where a unit that stays full is not waited for.

A unit is released in `leave` (after its forward), in `end_pass` (what the walk still lists, and what is not
kept for backward), in `Runtime._end_unit` (its gradients are complete) and in `end_backward` (everything).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from fullshard.comm.groups import Comm
from fullshard.engine.graph_tasks import NO_TASK, current_task
from fullshard.engine.inference import InferenceSession, Kept, chosen
from fullshard.engine.unit import LiveUnit, State
from fullshard.errors import RankMismatch, Stalled, StateError
from fullshard.options import Options
from fullshard.plan.schedule import CROSS_AHEAD, Schedule, ScheduledUnit, Walk, make_schedule

_DONE = -1


def _phase(in_backward: bool) -> str:
    return "backward" if in_backward else "forward"


@dataclass(slots=True)
class Pass:
    """One forward or one backward of the model, from its begin to its end."""

    walk: Walk
    grads: bool = True  # of a forward: a backward may follow
    releasing: bool = False  # units are released after their forward
    ahead: int | None = None  # the unit that was gathered ahead of its need
    crossed: int = 0  # entries of the walk that were gathered between nodes, or will be with their unit


class Gathering:
    def __init__(self, units: Sequence[LiveUnit], comm: Comm, options: Options) -> None:
        self.units, self.root = list(units), units[0]
        self._comm, self._options = comm, options
        self.schedule: Schedule | None = None  # None until the first pass is over
        self._paths: list[list[int]] = [[] for _ in range(comm.all_ranks)]  # each rank's first pass
        self.forward: Pass | None = None
        self.interrupted = False  # as the root's forward began: what is in flight is waited for later
        self.backward: Pass | None = None
        self.inference: InferenceSession | None = None  # inside fs.inference
        self.keeping = False  # full values stay for the next micro-batch (fs.accumulate)
        self.keeping_shares = False  # so does what came from other nodes
        self._fresh: set[int] = set()  # gathered in this pass, or kept full and still valid
        self._not_in_backward: frozenset[int] | None = None  # frozen units that no rank's backward needed
        self._began_backward: set[int] = set()
        self.settle_writes: Callable[[], None] = lambda: None  # before anything that was written is released

    # ---- one unit

    def need(self, unit: LiveUnit) -> None:
        """Make a unit full, passing the walk up to it, and gather the next one."""
        if self.inference is not None:
            self.inference.need(unit)
            return
        self._comm.progress()
        in_backward = current_task() != NO_TASK
        running = self.backward if in_backward else self.forward
        if running is None or unit.is_unsharded:
            if unit.pass_state.depth == 0:
                unit.issue("forward")  # outside any pass: every rank is taken to make the same call
        elif unit.state is State.AT_REST or (not in_backward and unit.index not in self._fresh):
            running.ahead = None
            if self.schedule is None:
                self._gather_what_any_rank_needs(unit.index)
            else:
                self._pass_up_to(unit, running)
        elif unit.index == running.ahead:
            running.ahead = None
        unit.ready(_phase(in_backward), in_backward)
        prefetches = running is not None and running.ahead is None and self._options.prefetch
        if running is not None and prefetches and running.walk.next() is not None:
            running.ahead, repeated = running.walk.take()
            self._take_part(self.units[running.ahead], repeated)

    def _pass_up_to(self, unit: LiveUnit, running: Pass) -> None:
        passed = running.walk.up_to(unit.index)
        if passed is None:
            in_backward = running is self.backward
            unit.issue(_phase(in_backward), again=in_backward)  # not in the walk: every rank makes this call
            return
        for index, repeated in passed:
            self._take_part(self.units[index], repeated)

    def _take_part(self, unit: LiveUnit, repeated: bool) -> None:
        unit.pass_state.claims += 1
        in_backward, running = self.backward is not None, self.forward
        releasing = not in_backward and running is not None and running.releasing
        stays = not releasing or (self.schedule is not None and unit.index in self.schedule.returning)
        if not repeated and not (unit.index in self._fresh and stays):
            unit.issue(_phase(in_backward), again=in_backward, keep=self._copied(unit))
            self._fresh.add(unit.index)
        if self._comm.two_level and self.schedule is not None:
            self._cross_ahead(self.backward or running)

    def _cross_ahead(self, running: Pass | None) -> None:
        """On several nodes: what is gathered next goes between them already."""
        if running is None or self.schedule is None:
            return
        walk, in_backward = running.walk, running is self.backward
        for at in range(max(running.crossed, walk.at), walk.at + CROSS_AHEAD):
            index = walk.entry(at)
            if index is None:
                break
            if index in self.schedule.crossed_ahead and index not in self._fresh:
                self.units[index].cross_ahead(_phase(in_backward), again=in_backward)
        running.crossed = walk.at + CROSS_AHEAD

    def _copied(self, unit: LiveUnit) -> bool:
        """Whether what comes from other nodes in this forward stays for its backward, or longer."""
        running, schedule = self.forward, self.schedule
        if schedule is None or unit.index not in schedule.node_copies:
            return False
        return self.keeping_shares if running is None else running.grads

    def leave(self, unit: LiveUnit, hooked: bool) -> None:
        """A unit's forward is over: release it, unless backward or a later call needs it."""
        self._comm.progress()
        now, running, schedule = unit.pass_state, self.forward, self.schedule
        if now.depth or now.claims or now.unhooked or (now.awaited and running is not None):
            return
        if running is None:
            releasing = self._options.releases_after_forward or not hooked
        else:
            releasing = running.releasing and running.walk.next() != unit.index
            releasing = releasing and not self._kept(unit, running)
        if schedule is not None and releasing:
            returns = running is not None and unit.index in schedule.returning
            releasing = unit.index not in schedule.held and not (returns and self._is_ahead(unit))
        if releasing:
            unit.release()
            for inner in unit.inner:
                inner.release()  # skipped on this rank: nobody can call it any more

    def _is_ahead(self, unit: LiveUnit) -> bool:
        return self.forward is not None and self.forward.walk.holds(unit.index)

    def _kept(self, unit: LiveUnit, running: Pass) -> bool:
        return running.grads and self.schedule is not None and unit.index in self.schedule.kept

    # ---- a forward pass

    def begin_pass(self, still_valid: bool) -> None:
        if not still_valid or self._options.releases_after_forward:
            self._fresh.clear()
        if not still_valid:
            self._forget_shares()
        grads = torch.is_grad_enabled()
        releasing = self._options.releases_after_forward or not grads
        self.forward = Pass(Walk(self.schedule.forward if self.schedule else ()), grads, releasing)
        for unit in self.units:
            # One that runs was called by itself, and uses a parameter of the root. One that only seems to run
            # was called by itself and interrupted.
            if unit.pass_state.depth and not unit.runs():
                unit.drop_pass()
            unit.await_all()
            unit.pass_state.pending = 0  # a forward that never saw its backward does not hold this one up

    def end_pass(self, keep: bool) -> None:
        """`keep`: a backward may follow. Units that the walk still lists are other ranks': take part."""
        running = self.forward or Pass(Walk(()), keep, self._options.releases_after_forward)
        first_pass = self.schedule is None
        try:
            if first_pass:
                self._gather_what_any_rank_needs(_DONE)
                self._settle()
            else:
                for index, repeated in running.walk.remaining():
                    unit = self.units[index]
                    self._take_part(unit, repeated)
                    if running.releasing and not self._kept(unit, running):
                        unit.release()
                self._comm.enter_all()
            self.settle_writes()
        finally:
            self.forward = None
        for unit in self.units:
            root_stays = unit is self.root and unit.policy.stays_full is not False
            stays = root_stays or unit.pass_state.unhooked or (not first_pass and self._kept(unit, running))
            if not keep or (running.releasing and not stays):
                unit.release(even_if_read=not keep)
            unit.pass_state.claims = 0
        self._settle_for_profiler()

    def _settle_for_profiler(self) -> None:
        if self._comm.watchdog.profiled:
            for unit in self.units:
                if unit.state is State.GATHERING:
                    unit.ready("forward")

    def abandon_pass(self) -> None:
        """The root's forward was refused before it began, or interrupted."""
        self.forward = None
        if self._comm.stalled:
            return  # what is in flight stays: nothing is waited for twice, and nothing runs any more
        for unit in self.units:
            unit.drop_pass()
            unit.release()
            unit.forget_share()

    def forget_interrupted(self) -> None:
        """A forward that ended in KeyboardInterrupt seems to run still: torch calls no hooks after it."""
        left = self.root.pass_state.depth and not self.root.runs()
        if (left or self.interrupted) and current_task() == NO_TASK:
            self.interrupted = False
            self.abandon_pass()

    def _gather_what_any_rank_needs(self, needed: int) -> None:
        """First pass: ranks exchange which unit each needs, and all gather these. Right for any path."""
        while True:
            by_rank = self._comm.all_gather_int(needed, "forward")
            for path, index in zip(self._paths, by_rank, strict=True):
                if index != _DONE:
                    path.append(index)
            for index in sorted(set(by_rank) - {_DONE}):
                unit = self.units[index]
                unit.issue("forward")
                unit.ready("forward")
                self._fresh.add(index)
                releasing = self.forward is not None and self.forward.releasing
                if index != needed and unit is not self.root and releasing:
                    unit.release()
            if needed != _DONE or set(by_rank) == {_DONE}:
                return

    def _settle(self) -> Schedule:
        units = [
            ScheduledUnit(
                unit.full_bytes,
                unit.inner_indices,
                unit.rereads,
                unit.policy.stays_full,
                unit.share_bytes,
                unit.training_bytes,
            )
            for unit in self.units
        ]
        self.schedule = make_schedule(self._paths, units, self._options)
        return self.schedule

    def policy_changed(self) -> None:
        """What stays full from forward to backward depends on it."""
        if self.schedule is not None:
            self._settle()

    # ---- fs.inference

    @contextmanager
    def stay_full(self, budget_bytes: int, among: set[int]) -> Iterator[Kept]:
        """Of the units `among`, those within the smallest budget of any rank are gathered and stay full."""
        if self.forward is not None or self.backward is not None or current_task() != NO_TASK:
            raise StateError("fs.inference inside a forward or backward", "Open it between steps.")
        if self.inference is not None:
            yield self.inference.kept  # the outer one decides, and ends it
            return
        unsharded = [unit.is_unsharded for unit in self.units]
        if any(unsharded) and not all(unsharded):
            raise StateError(
                "fs.inference where fs.full is open for a part of the model",
                "Open fs.full for the entire model, or leave it first.",
            )
        self.inference = session = InferenceSession(
            self.units, self._comm, self._staying(budget_bytes, among)
        )
        try:
            yield session.kept
        except BaseException as error:
            self.inference = None
            if isinstance(error, Exception) and not isinstance(error, Stalled | RankMismatch):
                session.close(failed=True)
            else:
                session.let_go()  # nobody to wait for, or no time to
            raise
        self.inference = None
        session.close(failed=False)

    def _staying(self, budget_bytes: int, among: set[int]) -> set[int]:
        """Agreed by all ranks, except inside fs.full: there all values are here already."""
        if self.root.is_unsharded:
            return {unit.index for unit in self.units}
        full = [int(not unit.releasable or unit.state is not State.AT_REST) for unit in self.units]
        least = self._comm.all_gather_ints([budget_bytes, *full], "inference").amin(0).tolist()
        free = {index for index, flag in enumerate(least[1:]) if flag}
        return chosen([unit.full_bytes for unit in self.units], among, free, least[0])

    # ---- a backward pass

    def begin_backward(self) -> Schedule:
        if self.inference is not None:
            raise StateError("backward inside fs.inference", "Leave `with fs.inference(model):` before it.")
        schedule = self.schedule or self._settle()
        full = {unit.index for unit in self.units if unit.state is not State.AT_REST}
        self._fresh = {0} if schedule.releases else full
        self.backward = Pass(Walk(schedule.backward_walk(full, self._not_in_backward or frozenset())))
        for unit in self.units:
            # An evaluation since forward may have released it.
            if unit is self.root or unit.pass_state.read:
                unit.ready("backward", again=True)
        return schedule

    def began(self, unit: LiveUnit) -> None:
        self._began_backward.add(unit.index)

    def pass_backward_to(self, index: int) -> None:
        """This rank skipped a unit and is about to send zeros for it: take part in its gather first."""
        if self.backward is not None:
            for passed, repeated in self.backward.walk.up_to(index) or ():
                self._take_part(self.units[passed], repeated)
            if self.units[index].state is State.GATHERING:
                self._comm.enter_all()

    def pass_rest_of_backward(self) -> None:
        if self.backward is not None:
            for index, repeated in self.backward.walk.remaining():
                self._take_part(self.units[index], repeated)

    def end_backward(self) -> None:
        self._comm.enter_all()
        for unit in self.units:
            unit.end_backward()
            if not self.keeping:
                unit.release()
        if not self.keeping_shares:
            self._forget_shares()
        self._settle_for_profiler()
        self.backward = None
        self._learn_backward()

    def _forget_shares(self) -> None:
        if self._comm.two_level:
            for unit in self.units:
                unit.forget_share()

    def _learn_backward(self) -> None:
        """Frozen units that no rank needed in the first backward are left out of the next ones."""
        if self._not_in_backward is not None or self._options.replicated:
            return
        frozen = [u.index for u in self.units if not any(any(lane.trainable) for lane in u.lanes)]
        began = [int(i in self._began_backward) for i in frozen]
        needed = self._comm.all_gather_ints(began, "backward").amax(0).tolist() if frozen else []
        self._not_in_backward = frozenset(i for i, flag in zip(frozen, needed, strict=True) if not flag)

    def trainability_changed(self) -> None:
        self._not_in_backward = None

    def recover(self) -> None:
        """A backward raised: drop it."""
        if self._comm.stalled:
            return
        for unit in self.units:
            unit.drop_pass()
            unit.release()
            unit.forget_share()
        self._fresh.clear()
        self.backward = None  # the last: if something raises here, the next call begins again

    def copy_schedule(self, other: Gathering) -> None:
        """A copied model takes the same path: it need not learn it."""
        self.schedule, self._paths = other.schedule, [list(path) for path in other._paths]
