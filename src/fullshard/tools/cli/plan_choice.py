"""`fullshard plan` where it chooses: settings, the fewest ranks, the largest batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from math import floor, isqrt
from typing import Any

from fullshard.byte_sizes import size
from fullshard.errors import OptionError
from fullshard.plan.homes import first_fitting
from fullshard.planning.answers import Answer, Question, answer, need_of, step_of
from fullshard.planning.choosing import WIRES, Disk, NothingFits, Scope, Traced, anything_fits, search
from fullshard.planning.needs import Need
from fullshard.planning.runs import run_of
from fullshard.planning.settings import Choice
from fullshard.planning.subjects import Subject
from fullshard.tools.cli.printing import as_json_text, table

_MOST_RANKS, _MOST_BATCH = 2**17, 2**16
_MOST_OF_A_HOST = 16  # ranks, where all share one
_SHOWN = 24  # rejected settings
_FOLDER = "fullshard-offload"  # for --disk, in records: on a disk of each node's own


@dataclass(frozen=True)
class Request:
    question: Question
    subject: Callable[[int | None, int | None], Subject]  # by batch and sequence
    batch: int | None
    sequence: int | None
    strategies: tuple[str, ...] | None
    allowed: tuple[str, ...]
    global_batch: int | None
    train_tokens: float | None

    def __post_init__(self) -> None:
        for wire in self.allowed:
            if wire not in WIRES:
                raise OptionError(f"--allow is {wire!r}", f"Choose one of {', '.join(WIRES)}.")
        if self.question.adapters is not None:
            raise OptionError("--lora and a choice of settings", "Leave out one of them.")
        if self.global_batch is not None and self.batch is not None:
            raise OptionError("--batch and --global-batch", "Give one of them.")
        ranks = self.question.ranks
        if self.global_batch is not None and (self.global_batch < 1 or self.global_batch % ranks):
            raise OptionError(
                f"--global-batch is {self.global_batch}, and there are {ranks} ranks",
                "Give a multiple of the ranks.",
            )

    def at(self, batch: int | None) -> Subject:
        return self.subject(batch, self.sequence)

    @property
    def recomputes(self) -> tuple[Any, ...]:
        given = self.question.recompute
        return (given,) if given else (False, True, "offload")

    @property
    def scope(self) -> Scope:
        question = self.question
        assert question.machine is not None
        machine, host, disk = question.machine, None, None
        offloads: tuple[str | None, ...] = (None,)  # no host memory was given
        if question.offload is not None:
            machine = replace(machine, host=question.offload.rates)
            host = question.offload.host_bytes
            if question.offload.disk_bytes is not None:
                disk = Disk(_FOLDER, question.offload.disk_bytes)
            how = question.offload.how
            offloads = (None, "optimizer", "auto") if how == "auto" else (how,)
        return Scope(
            self.at(self.batch).name,
            question.ranks,
            question.node_ranks,
            machine,
            question.memory_bytes,
            host,
            disk,
            question.precision,
            question.optimizer,
            question.spare,
            question.on_gpu,
            self.strategies or (),
            self.recomputes if question.offload is not None else self.recomputes[:2],
            offloads,
            ("exact", *self.allowed),
            state=question.state,
        )

    def traces(self) -> Iterator[Traced]:
        """The batch as given, or micro-batches of growing size."""
        ranks = self.question.ranks
        if self.global_batch is not None:
            each = self.global_batch // ranks
            for count in _divisors(each):
                yield self._traced(count, each // count)
        elif not self.grows:
            yield self._traced(self.batch, 1)
        else:
            count = 1
            while count <= _MOST_BATCH:
                yield self._traced(count, 1)
                count *= 2

    def _traced(self, batch: int | None, accumulate: int) -> Traced:
        subject = self.at(batch)
        steps = {
            again: step_of(subject, replace(self.question, recompute=again))[0]
            for again in self.scope.recomputes
        }
        tokens = None if subject.tokens is None else subject.tokens * accumulate
        return Traced(steps, batch, tokens, accumulate)

    @property
    def grows(self) -> bool:
        """Whether micro-batches of growing size are tried."""
        return self.batch is None and self.at(None).source != "function"


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def choose(request: Request, save: str | None, json: bool) -> int:
    choice = search(request.scope, request.traces(), until_worse=request.grows)
    if isinstance(choice, NothingFits):
        return _nothing_fits(request, choice, json)
    if save is not None:
        choice.save(save)
    if json:
        as_json_text(choice.to_dict() | {"run": _run(request, choice)[1].as_values()} | _note_json(request))
        return 0
    _print_note(request)
    print(choice.line)
    rows = choice.table()[1:]
    table(("rejected", "peak", "step", "because"), rows[:_SHOWN], left=(0, 3))
    if len(rows) > _SHOWN:
        print(f"and {len(rows) - _SHOWN} more, which --json lists.")
    result, run = _run(request, choice)
    print(f"\n{choice.machine}; {result.question.network}.")
    print("\n".join(run.lines))
    print(f"\nIn a script: fs.shard(model, {_arguments(choice)}{_state(request)})")
    if save is not None:
        print(f"Written to {save}: fs.shard(model, plan={save!r}{_state(request)})")
    return 0


def _nothing_fits(request: Request, found: NothingFits, json: bool) -> int:
    question = request.question
    if json:
        as_json_text(
            {
                "model": request.scope.model,
                "ranks": question.ranks,
                "node_ranks": question.node_ranks,
                "memory_bytes": question.memory_bytes,
                "settings": None,
                "why": found.what,
                "advice": [_advice(request, found)],
                "rejected": [asdict(one) for one in found.rejected],
            }
            | _note_json(request)
        )
    else:
        _print_note(request)
        print(f"{found.what[0].upper()}{found.what[1:]}.\n{_advice(request, found)}")
    return 1


def _advice(request: Request, found: NothingFits) -> str:
    offers = "" if request.question.offload is not None else " With --host-memory SIZE, offload is tried."
    return found.remedy + offers


def _note_json(request: Request) -> dict[str, str]:
    note = request.at(request.batch).note
    return {"note": note} if note else {}


def _print_note(request: Request) -> None:
    for note in _note_json(request).values():
        print(note)


def _state(request: Request) -> str:
    """It is no part of a choice: as given."""
    state = request.question.state
    return "" if state == "exact" else f", state={state!r}"


def _arguments(choice: Choice) -> str:
    from fullshard.precision import Precision

    given = choice.settings.arguments(Precision())
    shown = {name: repr(value) for name, value in given.items() if value not in (None, False)}
    offload = choice.settings.offload
    if isinstance(offload, Mapping):
        fields = ", ".join(f"{name}={value!r}" for name, value in offload.items())
        shown["offload"] = f"fs.Offload({fields})"
    return ", ".join(f"{name}={value}" for name, value in shown.items())


def _run(request: Request, choice: Choice) -> tuple[Answer, Any]:
    settings = choice.settings
    question = replace(
        request.question,
        strategies=(settings.strategy,),
        recompute=settings.checkpoint_activations,
        offload=None,
    )
    subject = request.at(settings.micro_batch)
    found = answer(subject, question)
    if subject.tokens is not None:
        found = replace(found, subject=replace(subject, tokens=subject.tokens * settings.accumulate))
    run = run_of(found, found.needs[0], request.train_tokens, choice.step_s)
    return found, replace(run, flop=run.flop * settings.accumulate)


# ---- backwards


def largest_batch(request: Request, json: bool) -> int:
    """The most sequences per rank that fit, with each strategy."""
    if request.at(None).source == "function":
        raise OptionError(
            "--largest-batch for a function that returns its own batch", "Give a size or a config.json."
        )
    found = {name: _largest(request, name) for name in request.question.strategies}
    length = request.at(1).tokens
    if json:
        values = {
            name: None
            if one is None
            else {"batch": one[0], "peak_bytes": one[1].peak, "step_s": _step_s(one[1])}
            for name, one in found.items()
        }
        found_json = {"model": request.at(1).name, "tokens_per_sequence": length, "strategies": values}
        as_json_text(found_json | _note_json(request))
        return 0 if any(found.values()) else 1
    rows = []
    for name, one in found.items():
        if one is None:
            rows.append((name, "none", "", "", ""))
            continue
        batch, need = one
        step_s = _step_s(need)
        rate = f"{batch * length * request.question.ranks / step_s:,.0f}" if step_s and length else ""
        rows.append(
            (name, f"{batch}", "" if length is None else f"{batch * length:,}", size(need.peak), rate)
        )
    _print_note(request)
    room = f"{request.question.ranks} ranks of {size(request.question.memory_bytes)}"
    print(f"{request.at(1).name}: sequences per rank and micro-batch that fit on {room}:\n")
    table(("strategy", "sequences", "tokens", "peak", "tokens/s"), rows, left=(0,))
    if not any(found.values()):
        print("\nNot one sequence fits: use more ranks, --checkpoint-activations or --host-memory.")
        return 1
    return 0


def _step_s(one: Need) -> float | None:
    return None if one.times is None else one.times.step_s


def _largest(request: Request, strategy: str) -> tuple[int, Need] | None:
    question = request.question

    def at(batch: int) -> Need:
        return need_of(step_of(request.at(batch), question)[0], question, strategy)

    low, high = 0, _MOST_BATCH + 1
    best: Need | None = None
    peaks: dict[int, int] = {}
    trial = 1
    while high - low > 1:
        one = at(trial)
        peaks[trial] = one.peak
        if question.fits(one):
            low, best = trial, one
        else:
            high = trial
        trial = _next_trial(peaks, low, high, question.room_bytes)
    return None if best is None else (low, best)


def _next_trial(peaks: dict[int, int], low: int, high: int, room: int) -> int:
    """Memory grows with the batch, nearly along a line: where it would be full, kept between the bounds."""
    known = sorted(peaks)
    if len(known) == 1:
        return min(high - 1, 2 * known[0]) if low else 0
    first, last = known[0], known[-1]
    slope = (peaks[last] - peaks[first]) / (last - first)
    estimate = first + floor((room - peaks[first]) / slope) if slope > 0 else 2 * last
    if high <= estimate or estimate <= low:
        estimate = (low + high) // 2 if high <= _MOST_BATCH else 2 * max(1, low)
    if estimate == low and high - low > 1:
        estimate = low + 1
    # Near the line's end, look at the neighbour: it closes the interval.
    return max(low + 1, min(high - 1, estimate))


def smallest_ranks(request: Request, save: str | None, json: bool) -> int:
    """The fewest devices, and what to choose there."""
    batch = request.batch or (1 if request.grows else None)
    request = replace(request, batch=batch)
    count = _fewest(request)
    if count is None:
        return _no_ranks(request, json)
    there = _on(request, count)
    choice = search(there.scope, there.traces())
    assert isinstance(choice, Choice)
    if save is not None:
        choice.save(save)
    if json:
        as_json_text({"smallest_ranks": count, "choice": choice.to_dict()} | _note_json(request))
        return 0
    devices = f"{count} devices" if count > 1 else "1 device"
    room = size(request.question.memory_bytes)
    _print_note(request)
    print(f"{request.scope.model} trains on {devices} of {room}, and not on fewer.")
    print(choice.line)
    if save is not None:
        print(f"Written to {save}: fs.shard(model, plan={save!r}{_state(request)})")
    return 0


def _no_ranks(request: Request, json: bool) -> int:
    what = (
        f"{request.scope.model} trains on no number of ranks of {size(request.question.memory_bytes)}: what "
        "is not sharded does not fit in one"
    )
    ways = ["fewer tokens per rank", "larger devices"]
    ways += [] if request.strategies is None else ["another --strategy"]
    ways += [] if request.question.offload is not None else ["--host-memory"]
    remedy = f"Use {', '.join(ways[:-1])}, or {ways[-1]}."
    if json:
        found = {"smallest_ranks": None, "choice": None, "model": request.scope.model, "why": what}
        as_json_text(found | {"advice": [remedy]} | _note_json(request))
    else:
        _print_note(request)
        print(f"{what}.\n{remedy}")
    return 1


def _on(request: Request, ranks: int) -> Request:
    """The same on so many ranks. Fewer than a node has are one node."""
    inner = request.question.node_ranks
    inner = None if inner is None else min(inner, ranks)
    return replace(request, question=replace(request.question, ranks=ranks, node_ranks=inner))


def _fewest(request: Request) -> int | None:
    """Of 1, 2, 3, ... ranks up to a node, then of entire nodes: the first on which anything fits."""
    (traced,) = request.traces()
    inner = request.question.node_ranks

    def fits(ranks: int) -> bool:
        return anything_fits(_on(request, ranks).scope, traced)

    if request.question.offload is not None:
        # Ranks that share the memory of a host may need more of it together than fewer of them do.
        found = next((ranks for ranks in range(1, (inner or _MOST_OF_A_HOST) + 1) if fits(ranks)), None)
        if found is not None or inner is None:
            return found
    elif inner is None or fits(inner):
        return first_fitting(fits, inner or _MOST_RANKS)
    nodes = first_fitting(lambda count: fits(count * inner), _MOST_RANKS // inner)
    return None if nodes is None else nodes * inner
