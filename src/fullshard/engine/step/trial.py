"""Whether an optimizer works element by element, found out by trying a copy of it.

A copy with the same settings steps on small synthetic parameters, once as one process holds them and once cut
into shards as our ranks hold them (any cut, shards of one element and empty ones, rows gone), with the same
gradients. Both must make the same values at every step. What a statistic over a tensor, over all parameters
or over a row does shows there, whatever its name:

    gradients   vary in scale from step to step and from element to element, and are partly zero; on shards
                they are gradient shards, whose norms and sums are finished over the ranks of the trial
    steps       some dozens; then all counters of the copy are set forward, past 100, 500, 1000, 10 000 and
                100 000, and to powers of two: a rule that begins late, or holds now and then, is seen as well
    sizes       a few parameters at their real size and cut (shortened if they are large), because
                optimizers that keep states in blocks do so from some size on

What is not element-wise is tried once more, as owners of tensors would run it (`owned`): on entire tensors,
on some of the parameters only, the others without gradients, in several calls per step. If that makes the
same values, and numbers, it looks at each tensor by itself.

What is element-wise, and is to step in chunks (`streamed`), is tried in these: several calls per step, in
which all other parameters have no gradient, and a tensor is cut.

Neither the optimizer nor random number generators are changed. The result is the same on every rank: it
depends on the optimizer's class, its settings and the layout alone.
"""

from __future__ import annotations

import contextlib
import copy
import random
import sys
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fullshard.comm.groups import Comm
from fullshard.engine.gradients import GradShard
from fullshard.engine.norms import PartialNorm
from fullshard.engine.step.chunks import Part
from fullshard.engine.step.element_state import ElementState, put_in_place
from fullshard.engine.step.numbers import Numbers
from fullshard.errors import FullshardError
from fullshard.plan.layout import shard_shape

_RANKS = 3  # of a trial
_STEPS = 40
_REAL_STEPS, _REAL_JUMPS = 3, (98, 998)  # on parameters of real size
# Counters are set to these, for _AFTER_JUMP steps each.
_JUMPS = (62, 98, 126, 254, 498, 510, 998, 1022, 9_998, 99_998)
_AFTER_JUMP = 3
_SAMPLES, _PER_GROUP, _REAL_SAMPLES = 9, 3, 4
_BLOCK = 256  # elements; lanes align parameters to it where that pads little
_LARGE, _RESIDUE = 16_384, 2_048  # a shard above _LARGE is shortened; its size modulo _RESIDUE is kept
_VISIBLE_RATE = 1e-4  # a smaller learning rate, as at the start of a warm-up, would hide what a step does
_SCALES = (1.0, 0.01, 20.0, 0.3, 3.0)  # of gradients, step by step
# Roundings of a value in its dtype, and of the way it has come in fp32.
_VALUE_ROUNDINGS, _PATH_ROUNDINGS = 4, 64
_CALLS = 200  # of functions, in which it is seen whether they are in a compiled part of a step
_SAME_NUMBER = 1e-3  # relative; a sum over a part differs by much more
_mixes = """
addmm addmv addr all amax amin aminmax any argmax argmin argsort baddbmm bincount bmm cholesky
cosine_similarity count_nonzero cumprod cumsum dot eig eigh einsum ger histc inner inv kthvalue
log_softmax logsumexp matmul matrix_norm max mean median min mm mode mv nanmean nanmedian nansum
norm normalize outer pinv prod qr quantile softmax solve sort std std_mean sum svd tensordot topk
trace unique var var_mean vdot vector_norm
"""
_MIXES = frozenset(_mixes.split())  # functions whose result for an element depends on others
_WORDS = {"vector_norm": "the norm", "dot": "the dot product", "amax": "the maximum", "amin": "the minimum"}
_WORDS |= dict.fromkeys(("matmul", "mm", "bmm", "mv", "einsum", "tensordot", "addmm"), "a matrix product")
_WORDS |= {word: f"the {word}" for word in ("norm", "sum", "mean", "max", "min", "std", "var", "median")}


@dataclass(frozen=True)
class Placed:
    """A sharded parameter: shape, dimensions in memory order, and how many elements each rank keeps."""

    shape: tuple[int, ...]
    order: tuple[int, ...]
    kept: tuple[int, ...]


@dataclass(frozen=True)
class _Sample:
    """A synthetic parameter in place of a real one, and what each rank of the trial keeps of it."""

    like: nn.Parameter
    shape: tuple[int, ...]
    order: tuple[int, ...]
    sizes: tuple[int, ...]


_Copying = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]  # a copy that holds these parameters


class _Untried(Exception):
    """The copy does not run at all."""


class _Incomparable(Exception):
    """The copy runs, but its values show nothing."""


@dataclass(frozen=True)
class Verdict:
    """`finding` is why an optimizer is not known to be element-wise; None if it is.

    `tried` is False if its copy does not run, or makes values that cannot be compared. One with
    `plain_gradients` is element-wise, but needs plain tensors in place of gradient shards: it hands them to
    kernels that are not torch's. One that is `bucketed` may be called several times per step, each time for
    some of its parameters.
    """

    finding: str | None
    tried: bool = True
    plain_gradients: bool = False
    sums: bool = False  # it needs sums over ranks for norms of gradients, which are rounded
    in_blocks: bool = False  # it is right on these shards, and not on any: states are kept in blocks, say
    bucketed: bool = False
    random: bool = False  # it draws random numbers


def try_on_shards(
    optimizer: torch.optim.Optimizer,
    placed: Mapping[int, Placed],
    closure: bool,
    modules: Iterable[nn.Module] = (),
) -> Verdict:
    """Try a copy. `placed` has the sharded parameters by identity; `modules` are not copied."""
    return _tried(_Trial(optimizer, placed, closure, list(modules)), _on_shards)


def try_owned(
    optimizer: torch.optim.Optimizer,
    placed: Mapping[int, Placed],
    closure: bool,
    modules: Iterable[nn.Module] = (),
) -> Verdict:
    """Try a copy as owners of tensors would run it. `finding`: why that is not right."""
    return _tried(_Trial(optimizer, placed, closure, list(modules)), _by_owners)


def try_in_chunks(
    optimizer: torch.optim.Optimizer,
    placed: Mapping[int, Placed],
    closure: bool,
    modules: Iterable[nn.Module] = (),
) -> Verdict:
    """Try a copy of one that is element-wise as a step in chunks would run it. `finding`: why that is not
    right."""
    return _tried(_Trial(optimizer, placed, closure, list(modules)), _in_chunks)


def _tried(trial: _Trial, judge: Callable[[_Trial], Verdict]) -> Verdict:
    with _undisturbed(trial.optimizer), _without_compilation():
        try:
            return judge(trial)
        except _Untried as error:
            return Verdict(f"it could not be tried on synthetic parameters ({error})", tried=False)


def _on_shards(trial: _Trial) -> Verdict:
    found = trial.finding()
    if trial.compiles if found is None else found.raised:
        trial.plain_gradients = True
        found = trial.finding()
    text = None if found is None else found.text
    in_blocks = found is None and trial.is_wrong_elsewhere()
    return Verdict(text, plain_gradients=trial.plain_gradients, sums=trial.sums, in_blocks=in_blocks)


def _by_owners(trial: _Trial) -> Verdict:
    try:
        if not trial.closure and trial.of_owners(bucketed=True) is None:
            return Verdict(None, bucketed=True)
        found = trial.of_owners(bucketed=False)
    except _Incomparable as error:
        return Verdict(str(error), tried=False)
    return Verdict(None) if found is None else Verdict(found.text, random=found.random)


def _in_chunks(trial: _Trial) -> Verdict:
    try:
        found = trial.of_chunks()
    except _Incomparable as error:
        return Verdict(str(error), tried=False)
    return Verdict(None if found is None else found.text)


@dataclass(frozen=True)
class _Finding:
    text: str
    raised: bool = False
    random: bool = False


@dataclass
class _Trial:
    optimizer: torch.optim.Optimizer
    placed: Mapping[int, Placed]
    closure: bool
    modules: list[nn.Module]
    plain_gradients: bool = False
    compiles: bool = False  # a part of its step, which cannot have gradient shards
    sums: bool = False  # ranks had to sum
    in_blocks: bool = False  # cut within a block, it is wrong

    def finding(self) -> _Finding | None:
        """The first difference between one process and shards; None if there is none."""
        chosen = _chosen(self.optimizer, self.placed)
        found = self._compare([_small(p, self.placed, i) for i, p in enumerate(chosen)])
        if found is not None and self._is_right_in_blocks(chosen):
            found, self.in_blocks = None, True
        if found is None:
            found = self._compare(_at_real_size(self.optimizer, self.placed), _REAL_STEPS, _REAL_JUMPS)
        return found

    def is_wrong_elsewhere(self) -> bool:
        """Whether other ranks would cut it so that it is wrong: within a block, or below some size."""
        return self.in_blocks or self._compare(_cut_anywhere(self), _REAL_STEPS, _REAL_JUMPS) is not None

    def of_owners(self, bucketed: bool) -> _Finding | None:
        """The first difference between one process and ranks that step on their own tensors alone."""
        chosen = _chosen(self.optimizer, self.placed)
        samples = [_small(p, self.placed, i) for i, p in enumerate(chosen)]
        course, single, copying, seeds = self._course(samples, _STEPS, _JUMPS)
        if not torch.equal(seeds, torch.get_rng_state()):
            text = "it draws random numbers: an owner's are other ones than those of one process"
            return _Finding(text, random=True)
        even, odd = (list(range(first, len(samples), 2)) for first in (0, 1))
        for mine in (even, odd, []):
            player = _Owner(copying, samples, course, mine, bucketed)
            player.play()
            found = _difference_of_owner(course, single, player)
            if found is not None:
                return found
        return None

    def of_chunks(self) -> _Finding | None:
        """The first difference between one process and steps on chunks of its parameters."""
        chosen = _chosen(self.optimizer, self.placed)
        samples = [_small(p, self.placed, i) for i, p in enumerate(chosen)]
        course, single, copying, _ = self._course(samples, _STEPS, _JUMPS)
        player = _Chunks(copying, samples, course)
        player.play()
        return _difference_in_chunks(course, single, player)

    def _is_right_in_blocks(self, chosen: Sequence[nn.Parameter]) -> bool:
        """Whether it is right as long as no block is cut, and the layout cuts none."""
        if not all(_is_aligned(self.placed[id(p)]) for p in _held(self.optimizer, self.placed)):
            return False
        return self._compare([_in_blocks(p, self.placed, i) for i, p in enumerate(chosen)]) is None

    def _compare(
        self, samples: Sequence[_Sample], steps: int = _STEPS, jumps: Sequence[int] = _JUMPS
    ) -> _Finding | None:
        try:
            course, single, copying, seeds = self._course(samples, steps, jumps)
        except _Incomparable as error:
            return _Finding(str(error))
        self.compiles = self.compiles or single.watch.compiled
        players = _play_ranks(copying, samples, course, self.plain_gradients)
        self.sums = self.sums or any(player.exchanges for player in players)
        random = not torch.equal(seeds, torch.get_rng_state())
        return _difference(course, single, players, random)

    def _course(
        self, samples: Sequence[_Sample], steps: int, jumps: Sequence[int]
    ) -> tuple[_Course, _Player, _Copying, torch.Tensor]:
        """What the copies are given, what one process makes of it, and the random state before that."""
        for gentle in (False, True):
            course = _Course.of(samples, steps, jumps, self.closure, gentle)
            seeds = torch.get_rng_state()
            single, copying = self._in_one_process(samples, course)
            if all(bool(torch.isfinite(v).all()) for v in single.trace[-1]):
                break
        else:
            raise _Incomparable(
                "its values do not stay finite on synthetic parameters, so nothing can be compared"
            )
        if len(single.trace) < steps:
            raise _Untried(f"{type(single.error).__name__} at step {len(single.trace) + 1}: {single.error}")
        del course.noise[len(single.trace) :]  # set forward, a counter may leave what the class provides for
        if steps == _STEPS and all(
            torch.equal(v, p) for v, p in zip(course.values, map(_on_host, single.trace[-1]), strict=True)
        ):
            raise _Incomparable(
                "it did not change any of the synthetic parameters, so nothing can be compared"
            )
        return course, single, copying, seeds

    def _in_one_process(self, samples: Sequence[_Sample], course: _Course) -> tuple[_Player, _Copying]:
        """Without state, as before the first step, or with the state that the constructor made."""
        for with_state in (False, True):
            copying = partial(_copied, self.optimizer, samples, modules=self.modules, with_state=with_state)
            player = _Player(copying, samples, course, None)
            player.play()
            if len(player.trace) >= course.steps:
                return player, copying
        if player.trace:
            return player, copying
        raise _Untried(f"{type(player.error).__name__}: {player.error}")


# ---- what is tried


def _held(optimizer: torch.optim.Optimizer, placed: Mapping[int, Placed]) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"] if id(p) in placed]


def _chosen(optimizer: torch.optim.Optimizer, placed: Mapping[int, Placed]) -> list[nn.Parameter]:
    """A few parameters of every kind of group: of different dimensions first."""
    by_settings: dict[str, list[nn.Parameter]] = {}
    for group in optimizer.param_groups:
        mine = [p for p in group["params"] if id(p) in placed]
        by_settings.setdefault(_settings(group), []).extend(mine)
    groups = [_different(mine, placed) for mine in by_settings.values() if mine]
    each = (
        [groups[i * len(groups) // _SAMPLES] for i in range(_SAMPLES)] if len(groups) > _SAMPLES else groups
    )
    counts = [max(_PER_GROUP, len({_kind(p, placed) for p in mine})) for mine in each]
    rounds = [
        mine[i]
        for i in range(max(counts, default=0))
        for mine, count in zip(each, counts, strict=True)
        if i < min(count, len(mine))
    ]
    return rounds[:_SAMPLES]


def _settings(group: Mapping[str, Any]) -> str:
    changing = ("params", "lr", "param_names")
    return repr(sorted((k, repr(v)) for k, v in group.items() if k not in changing and not _has_tensor(v)))


def _has_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or (
        isinstance(value, list | tuple) and any(isinstance(v, torch.Tensor) for v in value)
    )


def _different(parameters: list[nn.Parameter], placed: Mapping[int, Placed]) -> list[nn.Parameter]:
    """One of each number of dimensions first, and of these a matrix; then those with other attributes."""
    firsts: dict[tuple[int, str], nn.Parameter] = {}
    for parameter in parameters:
        firsts.setdefault(_kind(parameter, placed), parameter)
    ordered = [
        firsts[kind] for kind in sorted(firsts, key=lambda kind: (kind[0] != 2, kind[0] != 1, -kind[0]))
    ]
    chosen = {id(p) for p in ordered}
    return [*ordered, *(p for p in parameters if id(p) not in chosen)]


def _kind(parameter: nn.Parameter, placed: Mapping[int, Placed]) -> tuple[int, str]:
    """By what an optimizer may distinguish the parameters of a group."""
    return len(placed[id(parameter)].shape), repr(sorted(_marks(parameter).items()))


def _small(parameter: nn.Parameter, placed: Mapping[int, Placed], index: int) -> _Sample:
    """The same number of dimensions, equal ones equal and larger ones larger, cut anywhere."""
    shape, order = placed[id(parameter)].shape, placed[id(parameter)].order
    large = sorted({d for d in shape if d > 4})
    small = tuple(d if d <= 4 else 6 + 3 * large.index(d) for d in shape)
    total = prod(small)
    one = min(1, total)
    cuts = [(total // 3 + one, 0), (0, one), (total - total // 2, total // 2 - (total > 2))]
    first, second = (min(c, total) for c in cuts[index % 3])
    second = min(second, total - first)
    return _Sample(parameter, small, order, (first, second, total - first - second))


def _in_blocks(parameter: nn.Parameter, placed: Mapping[int, Placed], index: int) -> _Sample:
    """Large enough to be cut at multiples of a block."""
    shape = placed[id(parameter)].shape
    total = 4 * _BLOCK + 128 * (index % 3)
    cuts = [(_BLOCK, 2 * _BLOCK), (0, _BLOCK), (2 * _BLOCK, 0)]
    first, second = cuts[index % 3]
    return _Sample(parameter, _shape_of(total, len(shape)), tuple(range(len(shape))) or (0,),
                   (first, second, total - first - second))  # fmt: skip


def _shape_of(total: int, dims: int) -> tuple[int, ...]:
    return (total,) if dims < 2 else (total // 128, 128) + (1,) * (dims - 2)


def _is_aligned(place: Placed) -> bool:
    """Whether this parameter is cut at multiples of a block only."""
    at = 0
    for size in place.kept[:-1]:
        at += size
        if at % _BLOCK and at < sum(place.kept):
            return False
    return True


def _at_real_size(optimizer: torch.optim.Optimizer, placed: Mapping[int, Placed]) -> list[_Sample]:
    """Those with the smallest shards, the most elements, and the most elements on one rank."""
    kinds = [(placed[id(p)].shape, placed[id(p)].kept, _kind(p, placed)) for p in _held(optimizer, placed)]
    held = dict(zip(kinds, _held(optimizer, placed), strict=True))
    parameters = list(held.values())
    cut = [p for p in parameters if sum(size > 0 for size in placed[id(p)].kept) > 1]
    smallest = sorted(cut, key=lambda p: min(size for size in placed[id(p)].kept if size))[
        : _REAL_SAMPLES - 2
    ]
    largest = sorted(parameters, key=lambda p: sum(placed[id(p)].kept))[-2:]
    return [_shortened(p, placed[id(p)]) for p in {id(p): p for p in (*smallest, *largest)}.values()]


def _cut_anywhere(trial: _Trial) -> list[_Sample]:
    """Those with the most elements, cut where no block ends, and a few elements on one rank."""
    placed = trial.placed
    largest = sorted(_held(trial.optimizer, placed), key=lambda p: prod(placed[id(p)].shape))[-2:]
    samples = []
    for parameter in largest:
        shape, order = placed[id(parameter)].shape, placed[id(parameter)].order
        sample = _shortened(parameter, Placed(shape, order, (prod(shape),)))
        total = prod(sample.shape)
        few = min(7, total)
        half = min(total - few, total // 2 + 1)
        samples.append(_Sample(parameter, sample.shape, sample.order, (few, half, total - few - half)))
    return samples


def _shortened(parameter: nn.Parameter, place: Placed) -> _Sample:
    """At most three shards, the smallest among them; large ones shortened, at the same place in a block."""
    kept = [size for size in place.kept if size]
    if len(kept) > _RANKS:
        middle = min(kept[1:-1])
        kept = [kept[0], middle, kept[-1]]
    short = [size if size <= _LARGE else _LARGE + size % _RESIDUE for size in kept]
    shape, order = place.shape, place.order
    if short != [size for size in place.kept if size]:
        short[0] += -sum(short) % 128 if short[0] >= _LARGE else 0
        total = sum(short)
        shape = _shape_of(total, len(shape)) if total % 128 == 0 else (total,) + (1,) * (len(shape) - 1)
        order = tuple(range(len(shape)))
    return _Sample(parameter, shape, order, tuple(short + [0] * (_RANKS - len(short))))


# ---- the copy


class _Absent:
    """In place of what a copy must not touch: any use of it raises."""

    def __getattr__(self, name: str) -> Any:
        raise _Untried(f"it uses {name!r} of a module or of an object that cannot be copied")

    def __deepcopy__(self, memo: Any) -> _Absent:
        return self


_COPIED = {"builtins", "collections", "torch", "numpy", "types", "functools", "enum", "_thread"}


def _copied(
    optimizer: torch.optim.Optimizer,
    samples: Sequence[_Sample],
    stand_ins: Sequence[nn.Parameter],
    modules: Iterable[nn.Module],
    with_state: bool,
) -> torch.optim.Optimizer:
    """The optimizer with its settings, holding `stand_ins` in place of the parameters of the samples."""
    memo: dict[int, Any] = {id(module): _Absent() for module in modules}
    nothing = nn.Parameter(torch.zeros(0), requires_grad=False)
    for group in optimizer.param_groups:
        memo.update((id(p), nothing) for p in group["params"])
    memo.update((id(s.like), stand_in) for s, stand_in in zip(samples, stand_ins, strict=True))
    packages = _COPIED | {c.__module__.split(".")[0] for c in type(optimizer).__mro__}
    return _Copier(memo, {id(sample.like) for sample in samples}, with_state, packages).optimizer(optimizer)


@dataclass(frozen=True)
class _Copier:
    memo: dict[int, Any]  # by identity: the copies, of deepcopy
    chosen: set[int]  # identities of the parameters that have a stand-in
    with_state: bool
    packages: set[str]  # objects of other packages are not copied: they may hold a data set, or all of a run

    def optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        new = object.__new__(type(optimizer))
        self.memo[id(optimizer)] = new
        own, groups = vars(optimizer), optimizer.param_groups
        if id(groups) not in self.memo:  # a wrapper shares them with the optimizer inside
            copies = [self.memo.get(id(group)) or self._group(group) for group in groups]
            self.memo[id(groups)] = [group for group in copies if group["params"]]
        state = own.get("state")
        if state is not None and id(state) not in self.memo:
            copied: defaultdict[Any, Any] = defaultdict(dict)
            self.memo[id(state)] = copied
            copied.update((k, self._value(v)) for k, v in state.items() if not isinstance(k, torch.Tensor))
            held = [(p, s) for p, s in state.items() if self.with_state and id(p) in self.chosen]
            copied.update((self.memo[id(p)], self._state(p, s)) for p, s in held)
        for key, value in own.items():
            if key == "step" and not hasattr(value, "__self__"):
                continue  # a scheduler's wrapper, or a compiled step: it would step the original
            if key.startswith("_optimizer_") and isinstance(value, dict):
                new.__dict__[key] = OrderedDict()  # hooks
            else:
                new.__dict__[key] = self._value(value)
        return new

    def _value(self, value: Any) -> Any:
        if id(value) in self.memo:
            return self.memo[id(value)]
        if isinstance(value, torch.optim.Optimizer):
            return self.optimizer(value)
        package = type(value).__module__.split(".")[0]
        if isinstance(value, nn.Module | torch.utils.data.DataLoader) or package not in self.packages:
            return _Absent()
        try:
            return copy.deepcopy(value, self.memo)
        except Exception:  # noqa: BLE001  whatever its class raises: the copy goes on without it
            return _Absent()

    def _group(self, group: dict[str, Any]) -> dict[str, Any]:
        parameters = group["params"]
        kept = [i for i, p in enumerate(parameters) if id(p) in self.chosen]
        new: dict[str, Any] = {}
        self.memo[id(group)] = new
        for key, value in group.items():
            if isinstance(value, list) and len(value) == len(parameters):
                new[key] = [copy.deepcopy(value[i], self.memo) for i in kept]  # "params", names, and the like
            elif key == "lr":
                new[key] = _visible_rate(value, group)
            else:
                new[key] = self._value(value)
        return new

    def _state(self, parameter: nn.Parameter, state: Any) -> Any:
        """State that the constructor made: of the stand-in's shape, with the first of its values."""
        if not isinstance(state, dict):
            return self._value(state)
        stand_in = self.memo[id(parameter)]
        return {
            key: torch.full_like(stand_in, _first(value), dtype=value.dtype)
            if _is_of_elements(value, parameter)
            else self._value(value)
            for key, value in state.items()
        }


def _is_of_elements(value: Any, parameter: nn.Parameter) -> bool:
    """Also as a state dict has it, whose values know their unsharded shape."""
    is_tensor = isinstance(value, torch.Tensor) and value.dim() > 0
    return is_tensor and (value.shape == parameter.shape or hasattr(value, "local"))


def _first(value: torch.Tensor) -> float:
    own = getattr(value, "local", value)
    return float(own.flatten()[0].item()) if own.numel() else 0.0


def _visible_rate(rate: Any, group: Mapping[str, Any]) -> Any:
    if isinstance(rate, torch.Tensor):
        return torch.full_like(rate, 1e-2)  # its value is not read: that would wait for the device
    for value in (rate, group.get("initial_lr")):
        if isinstance(value, int | float) and abs(value) >= _VISIBLE_RATE:
            return value
    return 1e-2 if isinstance(rate, int | float) else rate


# ---- the steps


class _Exchange:
    """Sums over ranks of the trial, each in a thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._rounds: list[dict[int, torch.Tensor]] = []
        self._at = [0] * _RANKS
        self._over = [False] * _RANKS

    def all(self, rank: int, values: torch.Tensor) -> list[torch.Tensor]:
        with self._changed:
            number, self._at[rank] = self._at[rank], self._at[rank] + 1
            if number == len(self._rounds):
                self._rounds.append({})
            mine = self._rounds[number]
            mine[rank] = values.detach().clone()
            self._changed.notify_all()
            self._changed.wait_for(lambda: len(mine) == _RANKS or self._one_missing(mine))
            if len(mine) < _RANKS:
                raise _Untried("ranks make different numbers of sums over gradients")
            return [mine[r] for r in range(_RANKS)]

    def _one_missing(self, mine: Mapping[int, Any]) -> bool:
        return any(over and r not in mine for r, over in enumerate(self._over))

    def end(self, rank: int) -> None:
        with self._changed:
            self._over[rank] = True
            self._changed.notify_all()


class _TrialComm:
    """What gradient shards need of a Comm."""

    fixed_sums = False

    def __init__(self, exchange: _Exchange | None, rank: int) -> None:
        self._exchange, self.rank, self.ranks = exchange, rank, _RANKS
        self.world = self
        self.exchanges = exchange is not None
        self.needs_others = False

    def _all(self, values: torch.Tensor) -> torch.Tensor:
        if self._exchange is None:
            self.needs_others = True
            raise _Untried("it takes part in a sum over ranks")
        return torch.stack(self._exchange.all(self.rank, values))

    def sum_shards(self, values: torch.Tensor) -> torch.Tensor:
        return values.copy_(self._all(values).sum(0))

    def max_shards(self, values: torch.Tensor) -> torch.Tensor:
        return values.copy_(self._all(values).amax(0))

    def min_shards(self, values: torch.Tensor) -> torch.Tensor:
        return values.copy_(self._all(values).amin(0))

    def __deepcopy__(self, memo: Any) -> _TrialComm:
        return self


@dataclass
class _Course:
    """What the copies are given: initial values and gradients by sample, in memory order."""

    values: list[torch.Tensor]
    noise: list[list[torch.Tensor]]  # by step, then by sample
    steps: int  # before the first jump of the counters
    jumps: Sequence[int]
    closure: bool

    @staticmethod
    def of(
        samples: Sequence[_Sample], steps: int, jumps: Sequence[int], closure: bool, gentle: bool
    ) -> _Course:
        generator = torch.Generator().manual_seed(0)
        draw = partial(torch.randn, generator=generator)
        totals = [prod(sample.shape) for sample in samples]
        values = [
            (draw(n) * 10 ** draw(n)).clamp(-3, 3).to(s.like.dtype).float()
            for n, s in zip(totals, samples, strict=True)
        ]
        factors, drifts = [torch.exp(draw(n)) for n in totals], [draw(n) for n in totals]
        noise = []
        for step in range(steps + len(jumps) * _AFTER_JUMP):
            scale = _SCALES[step % len(_SCALES)] * (1e-3 if gentle else 1.0)
            noise.append([(draw(n) + d) * f * scale for n, f, d in zip(totals, factors, drifts, strict=True)])
            if step % 8 == 6:
                for each in noise[-1]:
                    each[: len(each) // 3] = 0.0
        return _Course(values, noise, steps, jumps, closure)


class _Player:
    """One copy of the optimizer, with the parameters of one process or of one rank of the trial."""

    def __init__(
        self,
        copying: _Copying,
        samples: Sequence[_Sample],
        course: _Course,
        comm: _TrialComm | None,
        plain_gradients: bool = True,
        as_shards: bool = False,  # one process has all elements, in the shape of shards
    ) -> None:
        self._course, self._comm, self._plain = course, comm, plain_gradients
        rank = None if comm is None else comm.rank
        self._parts = [_part(sample, rank) for sample in samples]
        rank = 0 if as_shards else rank
        self.parameters = [
            _stand_in(s, v, part, rank)
            for s, v, part in zip(samples, course.values, self._parts, strict=True)
        ]
        self._orders = [s.order if rank is None else None for s in samples]
        self.optimizer = copying(self.parameters)
        self.trace: list[list[torch.Tensor]] = []  # by step: the values, in memory order
        self.numbers: dict[tuple[Any, ...], float] = {}  # that the copy keeps after the course
        self.settings: dict[tuple[Any, ...], float] = {}  # all that it keeps beside states of parameters
        self.error: Exception | None = None
        self.watch = _Watch(self.parameters)

    @property
    def exchanges(self) -> bool:
        return self._comm is not None and self._comm.exchanges

    def play(self) -> None:
        """Take all steps of the course. What a step raises is kept: collectives of its own as well."""
        with self.watch:
            self._play()

    def _play(self) -> None:
        steps, jumps = self._course.steps, self._course.jumps
        before: dict[tuple[Any, ...], float] = {}
        counters: list[tuple[Any, ...]] = []
        try:
            for number in range(len(self._course.noise)):
                if number == steps - 1 and jumps:
                    before = _numbers(self.optimizer)
                elif number == steps:
                    now = _numbers(self.optimizer)
                    counters = [place for place, value in now.items() if before.get(place) == value - 1]
                    self.numbers = {
                        place: value for place, value in now.items() if place not in set(counters)
                    }
                    self.settings = {place: v for place, v in now.items() if "state" not in place}
                if number >= steps and (number - steps) % _AFTER_JUMP == 0:
                    _set_numbers(self.optimizer, counters, jumps[(number - steps) // _AFTER_JUMP])
                if number:
                    self._step(number)
                else:
                    with _NoCollectives():  # type: ignore[no-untyped-call, unused-ignore]
                        self._step(number)
                self.trace.append([self._flat(i) for i in range(len(self.parameters))])
        except Exception as error:  # noqa: BLE001  code of others, on parameters that it has never seen
            self.error = error

    def _flat(self, index: int) -> torch.Tensor:
        value, order = self.parameters[index].detach(), self._orders[index]
        return (value if order is None or value.dim() == 0 else value.permute(order)).flatten().clone()

    def _step(self, number: int) -> None:
        step = _plain_step(self.optimizer)
        if not self._course.closure:
            self._set_gradients(number)
            step()
            return

        def closure() -> torch.Tensor:
            self._set_gradients(number)
            rank = 0.0 if self._comm is None else self._comm.rank - 1.0  # each rank has a loss of its own
            return torch.tensor(2.0 + 0.1 * rank, device=self.parameters[0].device)

        step(closure)

    def _gradient_of(self, index: int) -> bool:
        """Whether this one is given."""
        return True

    def _set_gradients(self, number: int) -> None:
        for i, stand_in in enumerate(self.parameters):
            if not self._gradient_of(i):
                continue
            noise = self._course.noise[number][i][self._parts[i]].clone().to(stand_in.device, stand_in.dtype)
            order = self._orders[i]
            if order is not None and stand_in.dim():
                gradient = _with_order(noise, tuple(stand_in.shape), order)
            else:
                gradient = noise.view(stand_in.shape)
            if self._course.closure:
                gradient = gradient + 0.1 * stand_in.detach()
            if self._comm is not None and not self._plain:
                gradient = GradShard.make(gradient, cast(Comm, self._comm))
            stand_in.grad = gradient


class _Owner(_Player):
    """A copy that has entire tensors of some parameters at a time, and shards of the others, as `owned`
    shows them: values in new memory, and no gradients of what it does not own."""

    def __init__(
        self,
        copying: _Copying,
        samples: Sequence[_Sample],
        course: _Course,
        mine: Sequence[int],
        bucketed: bool,
    ) -> None:
        super().__init__(copying, samples, course, None)
        self.mine = list(mine)
        half = len(self.mine) // 2 if bucketed else 0
        self._buckets = [b for b in (self.mine[:half], self.mine[half:]) if b] or [[]]
        self._entire = {i: self.parameters[i].data for i in self.mine}
        self._shards = [p.data.flatten()[: 1 + p.numel() // 2].clone() for p in self.parameters]
        self._initial = [shard.clone() for shard in self._shards]
        self._old: dict[int, torch.Tensor] = {}
        self._shown: list[int] = []
        for i in range(len(self.parameters)):
            self._hide(i)

    def shard(self, index: int) -> torch.Tensor:
        """What another owner's parameter has held from the start."""
        return self._initial[index]

    def _hide(self, index: int) -> None:
        stand_in, shard = self.parameters[index], self._shards[index]
        stand_in.grad = None
        stand_in.data = shard.view((len(shard),) + (1,) * (len(self._shape(index)) - 1))

    def _shape(self, index: int) -> tuple[int, ...]:
        entire = self._entire.get(index)
        return tuple(self.parameters[index].shape if entire is None else entire.shape)

    def _show(self, bucket: Sequence[int]) -> None:
        for i in bucket:
            self.parameters[i].data = self._entire[i].clone(memory_format=torch.preserve_format)
            self.parameters[i].grad = self._old.get(i)
        self._shown = list(bucket)

    def _return(self) -> None:
        for i in self._shown:
            self._entire[i] = self.parameters[i].data
            self._hide(i)
        self._shown = []

    def _step(self, number: int) -> None:
        step, before = _plain_step(self.optimizer), Numbers(self.optimizer)
        if self._course.closure:
            self._show(self.mine)

            def closure() -> torch.Tensor:
                self._return()
                self._show(self.mine)
                self._set_gradients(number)
                return torch.tensor(2.0, device=self.parameters[0].device)

            step(closure)
            self._return()
            return
        for bucket in self._buckets:
            if bucket is not self._buckets[0]:
                before.restore()
            self._show(bucket)
            self._set_gradients(number)
            step()
            self._return()

    def _set_gradients(self, number: int) -> None:
        super()._set_gradients(number)
        for i, stand_in in enumerate(self.parameters):
            if i in self._shown:
                self._old[i] = cast(torch.Tensor, stand_in.grad)
            else:
                stand_in.grad = None

    def _gradient_of(self, index: int) -> bool:
        return index in self._shown

    def _flat(self, index: int) -> torch.Tensor:
        if index not in self._entire:
            return self.parameters[index].detach().flatten().clone()
        value, order = self._entire[index], self._orders[index]
        return (value if order is None or value.dim() == 0 else value.permute(order)).flatten().clone()


class _Chunks(_Player):
    """A copy that steps in several calls, each on a range of the elements of some parameters, with the states
    of these elements; a last call, on parameters that rest elsewhere, follows: see `streamed`."""

    def __init__(self, copying: _Copying, samples: Sequence[_Sample], course: _Course) -> None:
        super().__init__(copying, samples, course, None, as_shards=True)
        self._entire = [p.data for p in self.parameters]
        self._spans = [_TrialSpan(p) for p in self.parameters]
        self._kept: dict[int, ElementState] = {}
        sizes = [p.numel() for p in self.parameters]
        half = sizes[0] // 2
        first = [Part(0, 0, half, True, False), Part(0, half, sizes[0], False, True)]
        others = [Part(i, 0, size, True, True) for i, size in enumerate(sizes) if i]
        middle = len(others) // 2
        self._calls = [first[:1], [*first[1:], *others[:middle]], others[middle:]]

    def _step(self, number: int) -> None:
        step = _plain_step(self.optimizer)
        if not self._course.closure:
            counted = self._run(number, step)
            step()
            counted.restore()
            return
        counted = Numbers(self.optimizer)

        def closure() -> torch.Tensor:
            nonlocal counted
            counted = self._run(number, step)
            return torch.tensor(2.0, device=self.parameters[0].device)

        step(closure)
        counted.restore()

    def _run(self, number: int, step: Callable[..., Any]) -> Numbers:
        """All calls on chunks. Returns what they have counted: it is set back for the call that follows."""
        before = Numbers(self.optimizer)
        for stand_in in self.parameters:
            stand_in.grad = None
        for call in self._calls:
            before.restore()
            for part in call:
                self._show(number, part)
            step()
            for part in call:
                self._take(part)
        counted = Numbers(self.optimizer)
        before.restore()
        return counted

    def _show(self, number: int, part: Part) -> None:
        i, own = part.index, slice(part.start, part.stop)
        stand_in, span = self.parameters[i], self._spans[i]
        if part.is_first:
            put_in_place(self.optimizer, span, 0, stand_in)
            self._kept[i] = ElementState(self.optimizer, span, 0, stand_in)
        shape = shard_shape(tuple(self._entire[i].shape), part.stop - part.start)
        stand_in.data = self._entire[i].view(-1)[own].view(shape)
        gradient = self._course.noise[number][i][own].to(stand_in.device, stand_in.dtype).view(shape)
        if self._course.closure:
            gradient = gradient + 0.1 * stand_in.detach()
        stand_in.grad = gradient.clone()
        self._kept[i].show({key: flat[own].view(shape) for key, flat in span.states.items()})

    def _take(self, part: Part) -> None:
        i, own = part.index, slice(part.start, part.stop)
        stand_in, span = self.parameters[i], self._spans[i]
        self._entire[i].view(-1)[own].copy_(stand_in.data.flatten())
        for key, value in self._kept[i].take(part).items():
            span.state(key)[own].copy_(value.flatten())
        stand_in.grad, stand_in.data = None, self._entire[i]
        if part.is_last:
            self._kept[i].rest()


class _TrialSpan:
    """What a chunk's state needs of the span of a lane, for one synthetic parameter."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self._entire = parameter.data
        piece = SimpleNamespace(name="a synthetic parameter")
        self.lane: Any = SimpleNamespace(
            shard_views=[parameter.data], unit="", layout=SimpleNamespace(pieces=[piece])
        )
        self.states: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def state(self, key: tuple[str, torch.dtype]) -> torch.Tensor:
        made = partial(torch.zeros, self._entire.numel(), dtype=key[1], device=self._entire.device)
        return self.states[key] if key in self.states else self.states.setdefault(key, made())

    def at_rest(self, key: tuple[str, torch.dtype], index: int) -> torch.Tensor:
        return self.state(key).view(self._entire.shape)

    def put(self, values: Mapping[tuple[str, torch.dtype], torch.Tensor], index: int) -> None:
        for key, value in values.items():
            self.at_rest(key, index).copy_(value)


def _plain_step(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """Its step without the hooks of optimizers, which are for real ones."""
    own = optimizer.__dict__.get("step")
    function = type(optimizer).step if own is None else own.__func__
    if getattr(function, "hooked", False):
        function = getattr(function, "__wrapped__", function)
    return partial(function, optimizer)


def _part(sample: _Sample, rank: int | None) -> slice:
    if rank is None:
        return slice(None)
    start = sum(sample.sizes[:rank])
    return slice(start, start + sample.sizes[rank])


def _stand_in(sample: _Sample, values: torch.Tensor, part: slice, rank: int | None) -> nn.Parameter:
    own = values[part].to(sample.like.device, sample.like.dtype)
    if rank is None:
        data = _with_order(own, sample.shape, sample.order) if sample.shape else own.view(())
    else:
        data = own.view(shard_shape(sample.shape, own.numel())) if sample.shape else own
    new = nn.Parameter(data.clone(memory_format=torch.preserve_format))
    new.__dict__.update(_marks(sample.like))
    return new


def _marks(parameter: nn.Parameter) -> dict[str, Any]:
    """Attributes by which an optimizer may treat a parameter in its own way."""
    return {k: v for k, v in vars(parameter).items() if _is_plain(v) and not k.startswith("_fullshard")}


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return isinstance(value, bool | int | float | str)


def _with_order(flat: torch.Tensor, shape: tuple[int, ...], order: tuple[int, ...]) -> torch.Tensor:
    dense = flat.view([shape[d] for d in order])
    return dense.permute([order.index(d) for d in range(len(shape))])


def _numbers(optimizer: torch.optim.Optimizer) -> dict[tuple[Any, ...], float]:
    """The numbers anywhere in an optimizer, by their place."""
    return {place: number for place, number, _ in _walk(optimizer, vars(optimizer), (), 5)}


def _set_numbers(optimizer: torch.optim.Optimizer, places: Iterable[tuple[Any, ...]], value: int) -> None:
    chosen = set(places)
    for place, _, setter in list(_walk(optimizer, vars(optimizer), (), 5)):
        if place in chosen:
            setter(value)


def _set_item(container: Any, key: Any, kind: type, value: int) -> None:
    container[key] = kind(value)


def _walk(
    root: Any, container: Any, place: tuple[Any, ...], depth: int
) -> Iterator[tuple[tuple[Any, ...], float, Callable[[int], Any]]]:
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(container, dict):
        items = list(container.items())
    elif isinstance(container, list):
        items = list(enumerate(container))
    for position, (key, value) in enumerate(items):
        where = (*place, position if isinstance(key, torch.Tensor) else key)
        if isinstance(value, bool | nn.Parameter):
            continue
        if isinstance(value, int | float):
            yield where, float(value), partial(_set_item, container, key, type(value))
        elif (
            isinstance(value, torch.Tensor)
            and value.numel() == 1
            and value.dim() <= 1
            and not value.is_complex()
        ):
            yield where, float(value.item()), value.fill_
        elif depth and isinstance(value, dict | list):
            yield from _walk(root, value, where, depth - 1)
        elif depth and isinstance(value, torch.optim.Optimizer) and value is not root:
            yield from _walk(root, vars(value), where, depth - 1)


def _play_ranks(
    copying: _Copying, samples: Sequence[_Sample], course: _Course, plain_gradients: bool
) -> list[_Player]:
    """One after the other, or in threads if they exchange anything."""
    comms = [_TrialComm(None, rank) for rank in range(_RANKS)]
    players = [_Player(copying, samples, course, comm, plain_gradients) for comm in comms]
    for player in players:
        player.play()
    if not any(comm.needs_others for comm in comms):
        return players
    exchange = _Exchange()
    comms = [_TrialComm(exchange, rank) for rank in range(_RANKS)]
    players = [_Player(copying, samples, course, comm, plain_gradients) for comm in comms]
    device = samples[0].like.device

    def play(rank: int) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(exchange.end, rank)
            if device.type == "cuda":
                stack.enter_context(torch.cuda.device(device))
            players[rank].play()

    threads = [threading.Thread(target=play, args=(rank,), daemon=True) for rank in range(_RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return players


# ---- the finding


def _paths(course: _Course, single: _Player) -> Iterator[tuple[int, list[torch.Tensor], list[torch.Tensor]]]:
    """By step: the values of one process, and how far each of them has come in all steps so far."""
    before = [v.to(t.device, t.dtype) for v, t in zip(course.values, single.trace[0], strict=True)]
    paths = [torch.zeros_like(v) for v in before]
    for number, expected in enumerate(single.trace):
        for path, value, old in zip(paths, expected, before, strict=True):
            path += (value - old).abs()
        yield number, expected, paths
        before = expected


def _difference(course: _Course, single: _Player, players: list[_Player], random: bool) -> _Finding | None:
    done = single.watch.found or "treats an element differently when its tensor is cut"
    if random:
        done = "draws random numbers: an element of a shard gets another one than in one process"
    for number, expected, paths in _paths(course, single):
        for player in players:
            if len(player.trace) <= number and player.error is not None:
                error = player.error
                what = error.what if isinstance(error, FullshardError) else error
                return _Finding(f"on shards it raises {type(error).__name__}: {what}", raised=True)
        for i, full in enumerate(expected):
            cut = torch.cat([player.trace[number][i] for player in players])
            if not _same(cut, full, paths[i]):
                return _Finding(f"it {done} (other values than in one process from step {number + 1} on)")
    if any(_differs(single.numbers, player.numbers) for player in players):
        return _Finding(f"it {done}, and keeps a number that follows from it")
    mixing = next((player.watch.found for player in players if player.watch.found), None)
    return None if mixing is None else _Finding(f"it {mixing}, of which a rank has a part")


def _difference_of_owner(course: _Course, single: _Player, owner: _Owner) -> _Finding | None:
    for number, expected, paths in _paths(course, single):
        if len(owner.trace) <= number and owner.error is not None:
            error = owner.error
            alone = "without a parameter of its own " if not owner.mine else ""
            return _Finding(f"{alone}it raises {type(error).__name__}: {error}", raised=True)
        for i, full in enumerate(expected):
            value = owner.trace[number][i]
            if i not in owner.mine:
                if not torch.equal(value, owner.trace[0][i]) or not torch.equal(value, owner.shard(i)):
                    return _Finding("it changes parameters that have no gradient")
            elif not _same(value, full, paths[i]):
                return _Finding(
                    f"it treats a tensor differently when others have no gradient (from step {number + 1} on)"
                )
    if owner.settings.keys() != single.settings.keys() or _differs(single.settings, owner.settings):
        return _Finding("it keeps a number that follows from all its parameters")
    return None


def _difference_in_chunks(course: _Course, single: _Player, chunks: _Chunks) -> _Finding | None:
    for number, expected, paths in _paths(course, single):
        if len(chunks.trace) <= number:
            error = chunks.error
            what = error.what if isinstance(error, FullshardError) else error
            return _Finding(f"it raises {type(error).__name__}: {what}", raised=True)
        for i, full in enumerate(expected):
            if not _same(chunks.trace[number][i], full, paths[i]):
                return _Finding(
                    "it keeps something from one call to the next, or changes parameters that have no "
                    f"gradient (other values than in one process from step {number + 1} on)"
                )
    if chunks.settings.keys() != single.settings.keys() or _differs(single.settings, chunks.settings):
        return _Finding("it keeps a number that follows from the calls")
    return None


def _same(cut: torch.Tensor, full: torch.Tensor, path: torch.Tensor) -> bool:
    if torch.equal(cut, full):
        return True
    roundings = _VALUE_ROUNDINGS * torch.finfo(full.dtype).eps * full.abs()
    allowed = roundings + _PATH_ROUNDINGS * torch.finfo(torch.float32).eps * path
    return bool(((cut - full).abs() <= allowed).all())


def _differs(expected: Mapping[Any, float], numbers: Mapping[Any, float]) -> bool:
    """Whether a number that both keep, such as a learning rate that they estimate, is not the same."""
    both = [(expected[place], numbers[place]) for place in expected.keys() & numbers.keys()]
    return any(abs(a - b) > _SAME_NUMBER * max(abs(a), abs(b)) for a, b in both)


def _on_host(values: torch.Tensor) -> torch.Tensor:
    return values.cpu().float()


def is_compiled_call() -> bool:
    """Whether a function that torch.compile returned is among the callers, compiled or not."""
    frame = sys._getframe()
    while (frame := frame.f_back) is not None:  # type: ignore[assignment]
        if frame.f_code.co_name == "compile_wrapper" and "_dynamo" in frame.f_code.co_filename:
            return True
    return False


class _NoCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """An optimizer that shares its work among ranks itself would do so on copies, and then on shards."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "namespace", "") in ("c10d", "_c10d_functional"):
            name = func.name().split("::")[1].strip("_")
            raise RuntimeError(
                f"it calls {name} of torch.distributed: it shares its work among ranks itself; use the "
                "version for one process"
            )
        return func(*args, **(kwargs or {}))


class _Watch(TorchFunctionMode):
    """Notes the first function that mixes the elements of a plain tensor as large as a parameter.

    Functions of gradient shards are finished over ranks, or refused, and count as neither.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self._parameters = parameters
        sizes = [p.numel() for p in parameters]
        self._sizes = {n for n in (*sizes, sum(sizes)) if n > 1 and n != len(sizes)}
        self.found: str | None = None
        self.calls = 0
        self.compiled = False  # it compiles a part of its step

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.calls < _CALLS:
            self.calls += 1
            self.compiled = self.compiled or is_compiled_call()
        if self.found is None:
            name = getattr(func, "__name__", "")
            if name.strip("_").removeprefix("foreach_").removeprefix("linalg_") in _MIXES:
                self._note(name, list(_tensors((*args, *kwargs.values()))))
        return func(*args, **kwargs)

    def _note(self, name: str, tensors: list[torch.Tensor]) -> None:
        if any(isinstance(t, GradShard | PartialNorm) for t in tensors):
            return
        word = name.strip("_").removeprefix("foreach_").removeprefix("linalg_")
        if word in ("max", "min") and len(tensors) == 2:
            return  # of two tensors, element by element
        mixed = next((t for t in tensors if t.numel() in self._sizes), None)
        if mixed is not None:
            self.found = f"takes {_WORDS.get(word, word)} of {self._owner(mixed)}"

    def _owner(self, tensor: torch.Tensor) -> str:
        at = tensor.untyped_storage().data_ptr()
        for parameter in self._parameters:
            if parameter.untyped_storage().data_ptr() == at:
                return "a parameter over its entire tensor"
            if parameter.grad is not None and parameter.grad.untyped_storage().data_ptr() == at:
                return "a gradient over its entire tensor"
        return "what it computes or keeps over an entire tensor"


def _tensors(args: Iterable[Any]) -> Iterator[torch.Tensor]:
    for arg in args:
        if isinstance(arg, torch.Tensor):
            yield arg
        elif isinstance(arg, list | tuple):
            yield from _tensors(arg)


# ---- no traces


@contextlib.contextmanager
def _undisturbed(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Random number generators and attributes of the optimizer's classes are afterwards what they were."""
    classes = [c for c in type(optimizer).__mro__ if not c.__module__.startswith(("torch.", "builtins"))]
    kept = [(c, {k: v for k, v in vars(c).items() if not k.startswith("__")}) for c in classes]
    contents = [
        (v, copy.copy(v)) for _, held in kept for v in held.values() if isinstance(v, dict | list | set)
    ]
    numpy = sys.modules.get("numpy")
    states = random.getstate(), numpy.random.get_state() if numpy is not None else None
    devices = {p.device for g in optimizer.param_groups for p in g["params"] if p.device.type == "cuda"}
    try:
        with torch.random.fork_rng(devices=sorted(devices, key=str)):
            yield
    finally:
        random.setstate(states[0])
        if numpy is not None:
            numpy.random.set_state(states[1])
        for c, held in kept:
            for key, value in held.items():
                if vars(c).get(key) is not value:
                    setattr(c, key, value)
        for live, old in contents:
            if live != old:
                live.clear()
                live.extend(old) if isinstance(live, list) else live.update(old)


def _without_compilation() -> contextlib.AbstractContextManager[Any]:
    """Compiled steps run as they are written: compiling for synthetic parameters would take many seconds."""
    stance = getattr(torch.compiler, "set_stance", None)
    return contextlib.nullcontext() if stance is None else stance("force_eager")
