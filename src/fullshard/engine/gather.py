"""Which unit is gathered when: walks along the agreed order, one unit ahead.

A rank that takes another path than the others still passes every entry of the walk. Whether an entry
gathers follows from the order and the strategy alone, never from this rank's path.

Two rules keep ranks on different paths from waiting for each other in a circle: before it waits for a
unit's gather in backward, a rank has sent its gradients of every unit that comes earlier (zeros for
those it skipped); and before it sends a unit's gradients, it has taken part in that unit's gather.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from fullshard.comm.groups import Comm
from fullshard.engine.inference import InferenceSession, Kept, chosen
from fullshard.engine.unit import NO_TASK, LiveUnit, State
from fullshard.errors import RankMismatch, Stalled, StateError
from fullshard.options import Options
from fullshard.plan.schedule import Walk, backward_order, kept_units, one_path, settle

_DONE = -1
current_task: Callable[[], int] = torch._C._current_graph_task_id


# A head tied to its embedding is called at both ends of a pass; below this it is not worth a second gather.
RETURNING_BYTES = 128 * 2**20


def _phase(in_backward: bool) -> str:
    return "backward" if in_backward else "forward"


def _returns(order: Sequence[int], unit: int) -> bool:
    """Called again after others were."""
    first = order.index(unit)
    return unit != 0 and any(
        entry == unit and order[at - 1] != unit for at, entry in enumerate(order) if at > first
    )


class Gathering:
    def __init__(self, units: Sequence[LiveUnit], comm: Comm, options: Options) -> None:
        self.units, self.root = list(units), units[0]
        self._comm, self._options = comm, options
        self.order: list[int] | None = None
        self.diverges = False  # ranks took different paths
        self._paths: list[list[int]] = [[] for _ in range(comm.all_ranks)]  # each rank's first pass
        self._no_need = {unit.index for unit in units if not unit.rereads}
        self._keep: set[int] = set()  # units that stay full from forward to backward
        self._returning: set[int] = set()  # small and called again later in the pass: stays full until then
        self._sticky: set[int] = set()  # called several times in a pass of ranks on different paths
        self.forward: Walk | None = None
        self.backward: Walk | None = None
        self.inference: InferenceSession | None = None  # inside fs.inference
        self.grad_pass = False
        self.keeping = False  # full values stay for the next micro-batch (fs.accumulate)
        self._releasing = True  # this pass lets units go after their forward
        self._fresh: set[int] = set()  # gathered in this pass, or kept full and still valid
        self._ahead: int | None = None  # the unit asked for ahead of its need
        self._not_in_backward: set[int] | None = None  # frozen units that no rank's backward needed
        self._began_backward: set[int] = set()

    # ---- one unit

    def need(self, unit: LiveUnit) -> None:
        """Make a unit full, passing the order up to it, and ask for the next one."""
        if self.inference is not None:
            self.inference.need(unit)
            return
        in_backward = current_task() != NO_TASK
        walk = self.backward if in_backward else self.forward
        if walk is None or unit.is_unsharded:
            if unit.pass_state.depth == 0:
                unit.issue("forward")  # outside any pass: every rank is taken to make the same call
        elif unit.state is State.AT_REST or (walk is self.forward and unit.index not in self._fresh):
            self._ahead = None
            if self.order is None:
                self._gather_what_any_rank_needs(unit.index)
            else:
                self._pass_up_to(unit, walk)
        elif unit.index == self._ahead:
            self._ahead = None
        unit.ready(_phase(in_backward), in_backward)
        if walk is not None and self._ahead is None and self._options.prefetch and walk.next() is not None:
            self._ahead, repeated = walk.take()
            self._take_part(self.units[self._ahead], repeated)

    def _pass_up_to(self, unit: LiveUnit, walk: Walk) -> None:
        passed = walk.up_to(unit.index)
        if passed is None:
            # A call more than the order knows: every rank is taken to make it.
            unit.issue(_phase(walk is self.backward), again=walk is self.backward)
            return
        for index, repeated in passed:
            self._take_part(self.units[index], repeated)

    def _take_part(self, unit: LiveUnit, repeated: bool) -> None:
        unit.pass_state.claims += 1
        releasing = self._releasing and self.backward is None
        stays = not releasing or unit.index in self._returning
        if repeated or (unit.index in self._fresh and stays):
            return
        in_backward = self.backward is not None
        unit.issue(_phase(in_backward), again=in_backward)
        self._fresh.add(unit.index)

    def leave(self, unit: LiveUnit, hooked: bool) -> None:
        """A unit's forward is over: let go what neither backward nor a next call wants."""
        now, walk = unit.pass_state, self.forward
        if now.depth or now.claims or now.unhooked or (now.awaited and walk is not None):
            return
        if walk is None:
            releasing = self._options.releases_after_forward or not hooked
        else:
            releasing = self._releasing and walk.next() != unit.index and not self._kept(unit)
        if releasing and unit.index not in self._sticky and not self._comes_back(unit):
            unit.release()
            for inner in unit.inner:
                inner.release()  # skipped on this rank: nobody can call it any more

    def _comes_back(self, unit: LiveUnit) -> bool:
        walk = self.forward
        return walk is not None and unit.index in self._returning and walk.holds(unit.index)

    def _kept(self, unit: LiveUnit) -> bool:
        return self.grad_pass and unit.index in self._keep

    # ---- a forward pass

    def begin_pass(self, still_valid: bool) -> None:
        if not still_valid:
            self._fresh.clear()
        self.forward, self._ahead = Walk(self.order or ()), None
        self.grad_pass = torch.is_grad_enabled()
        self._releasing = self._options.releases_after_forward or not self.grad_pass
        for unit in self.units:
            # One that runs was called by itself, and uses a parameter of the root. One that only seems to run
            # was called by itself and interrupted.
            if unit.pass_state.depth and not unit.runs():
                unit.drop_pass()
            unit.await_all()
            unit.pass_state.pending = 0  # a forward that never saw its backward does not hold this one up

    def end_pass(self, keep: bool) -> None:
        """`keep`: a backward may follow. Units the walk still lists are somebody else's: take part."""
        walk, self.forward, self._ahead = self.forward, None, None
        walk_known = self.order is not None
        if self.order is None:
            self._gather_what_any_rank_needs(_DONE)
            self._settle()
        elif walk is not None:
            for index, repeated in walk.remaining():
                self._take_part(self.units[index], repeated)
                if self._releasing and not self._kept(self.units[index]):
                    self.units[index].release()
        for unit in self.units:
            root_stays = unit is self.root and unit.policy.stays_full is not False
            stays = root_stays or unit.pass_state.unhooked or (walk_known and self._kept(unit))
            if not keep or (self._releasing and not stays):
                unit.release()
            unit.pass_state.claims = 0
        self._settle_for_profiler()

    def _settle_for_profiler(self) -> None:
        if self._comm.watchdog.profiled:
            for unit in self.units:
                if unit.state is State.GATHERING:
                    unit.ready("forward")

    def abandon_pass(self) -> None:
        """The root's forward was refused before it began, or interrupted."""
        self.forward = self._ahead = None
        for unit in self.units:
            unit.drop_pass()
            unit.release()

    def forget_interrupted(self) -> None:
        """A forward that ended in KeyboardInterrupt seems to run still: torch calls no hooks after it."""
        if self.root.pass_state.depth and current_task() == NO_TASK and not self.root.runs():
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
                if index != needed and unit is not self.root and self._releasing:
                    unit.release()
            if needed != _DONE or set(by_rank) == {_DONE}:
                return

    def _settle(self) -> list[int]:
        parents = [0] * len(self.units)
        for outer in self.units:  # outer units come first: the innermost has the last word
            for inner in outer.inner:
                parents[inner.index] = outer.index
        self.order = settle(self._paths, parents)
        self.diverges = not one_path(self._paths)
        self.choose_kept()
        if self._options.releases_after_forward and not self.diverges:
            self._returning = {
                unit
                for unit in self.order
                if _returns(self.order, unit) and self.units[unit].full_bytes <= RETURNING_BYTES
            }
        if self.diverges:
            self._sticky = {u for path in self._paths for u in path if path.count(u) > 1}
        return self.order

    def choose_kept(self) -> None:
        """Which units stay full from forward to backward; again when somebody changed what he wants."""
        if self._options.releases_after_forward and self.order is not None and not self.diverges:
            sizes = [unit.full_bytes for unit in self.units]
            self._keep = kept_units(self.order, sizes, *self._options.keeps, self._no_need)
            self._keep |= {unit.index for unit in self.units[1:] if unit.policy.stays_full}

    # ---- fs.inference

    @contextmanager
    def stay_full(self, budget_bytes: int, among: set[int]) -> Iterator[Kept]:
        """Of the units `among`, those within the smallest budget of any rank are gathered and stay full."""
        if self.forward is not None or self.backward is not None or current_task() != NO_TASK:
            raise StateError("fs.inference inside a forward or backward", "Open it between steps.")
        if self.inference is not None:
            yield self.inference.kept  # the outer one decides, and ends it
            return
        if any(unit.is_unsharded for unit in self.units) and not all(
            unit.is_unsharded for unit in self.units
        ):
            raise StateError(
                "fs.inference where fs.full is open for a part of the model",
                "Open fs.full for the whole model, or leave it first.",
            )
        self.inference = staying = InferenceSession(
            self.units, self._comm, self._staying(budget_bytes, among)
        )
        try:
            yield staying.kept
        except BaseException as error:
            self.inference = None
            if isinstance(error, Exception) and not isinstance(error, Stalled | RankMismatch):
                staying.close(failed=True)
            else:
                staying.let_go()  # nobody to wait for, or no time to
            raise
        self.inference = None
        staying.close(failed=False)

    def _staying(self, budget_bytes: int, among: set[int]) -> set[int]:
        """Agreed by all ranks, except inside fs.full: there all values are here already."""
        if self.root.is_unsharded:
            return {unit.index for unit in self.units}
        full = [int(not unit.releasable or unit.state is not State.AT_REST) for unit in self.units]
        least = self._comm.all_gather_ints([budget_bytes, *full], "inference").amin(0).tolist()
        free = {index for index, flag in enumerate(least[1:]) if flag}
        return chosen([unit.full_bytes for unit in self.units], among, free, least[0])

    # ---- a backward

    def begin_backward(self) -> list[int]:
        """Returns the order in which units are gathered in forward."""
        if self.inference is not None:
            raise StateError("backward inside fs.inference", "Leave `with fs.inference(model):` before it.")
        order = self.order or self._settle()
        kept = {unit.index for unit in self.units if unit.state is not State.AT_REST}
        if self._options.releases_after_forward:
            kept &= self._keep
            self._fresh = {0}
        else:
            self._fresh, kept = kept, set()
        inside = [unit.inner_indices for unit in self.units]
        left_out = self._no_need | kept | (self._not_in_backward or set())
        self.backward = Walk(backward_order(order, inside, left_out))
        self._ahead = None
        self.root.ready("backward", again=True)  # an evaluation since forward may have released it
        return order

    def began(self, unit: LiveUnit) -> None:
        self._began_backward.add(unit.index)

    def pass_backward_to(self, index: int) -> None:
        """This rank skipped a unit and is about to send zeros for it: take part in its gather first."""
        if self.backward is not None:
            for passed, repeated in self.backward.up_to(index) or ():
                self._take_part(self.units[passed], repeated)

    def pass_rest_of_backward(self) -> None:
        if self.backward is not None:
            for index, repeated in self.backward.remaining():
                self._take_part(self.units[index], repeated)

    def end_backward(self) -> None:
        for unit in self.units:
            if not self.keeping:
                unit.release()
            unit.end_backward()
        self._settle_for_profiler()
        self.backward = None
        self._learn_backward()

    def _learn_backward(self) -> None:
        """Frozen units that no rank needed in the first backward are left out of the next ones."""
        if self._not_in_backward is not None or self._options.replicated:
            return
        frozen = [u.index for u in self.units if not any(any(lane.trainable) for lane in u.lanes)]
        began = [int(i in self._began_backward) for i in frozen]
        needs = self._comm.all_gather_ints(began, "backward") if frozen else None
        needed = needs.amax(0).tolist() if needs is not None else []
        self._not_in_backward = {i for i, need in zip(frozen, needed, strict=True) if not need}

    def trainability_changed(self) -> None:
        self._not_in_backward = None

    def recover(self) -> None:
        """A backward that raised left its marks: forget it."""
        for unit in self.units:
            unit.drop_pass()
            unit.release()
        self._fresh.clear()
        self.backward = None
