"""Functions over recorded events, each named after what it finds. Pure: no tensors, no ranks.

A run is the list of events of each rank. `Examination` has the sharded run, and where there are such the run
as one process and the resumed run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod, sqrt
from typing import Any

from fullshard.doctor.findings import Finding

Event = dict[str, Any]
Run = list[list[Event]]
_CLOSE = 0.01


@dataclass(frozen=True)
class Examination:
    sharded: Run
    single: list[Event] = field(default_factory=list)
    resumed: Run = field(default_factory=list)

    @property
    def ranks(self) -> int:
        return len(self.sharded)


Judge = Callable[[Examination], Iterator[Finding]]


def of_kind(events: Sequence[Event], *kinds: str) -> list[Event]:
    return [event for event in events if event["kind"] in kinds]


def training_calls(events: Sequence[Event]) -> list[Event]:
    """Calls with gradients in train mode; where there are none, those in any mode."""
    calls = [event for event in of_kind(events, "call") if event["grad"]]
    return [event for event in calls if event["trains"]] or calls


def _close(a: float, b: float, within: float = _CLOSE) -> bool:
    return abs(a - b) <= within * max(abs(a), abs(b))


def _pairs(ranks: int) -> list[tuple[int, int]]:
    return [(i, j) for i in range(ranks) for j in range(i + 1, ranks)]


# ---- data and random numbers


def _prints(call: Event) -> list[str]:
    return [tensor["print"] for tensor in call["inputs"]]


def _varied(call: Event) -> list[str]:
    return [tensor["print"] for tensor in call["inputs"] if tensor["varied"]]


def _constant(calls: Sequence[Event]) -> set[int]:
    """Inputs that are the same in every call, where others are not: an adjacency matrix, a table."""
    prints = [_prints(call) for call in calls]
    places = range(min(map(len, prints), default=0))
    same = {place for place in places if len({one[place] for one in prints}) == 1}
    return same if len(calls) > 1 and len(same) < len(places) else set()


def _is_of_no_sample(tensor: Event, others: Sequence[Event]) -> bool:
    """One that two ranks have alike, beside others that they do not: rows that are all equal, such as
    positions, or another number of rows than the inputs that differ have."""
    if len(set(tensor["rows"])) < len(tensor["rows"]):
        return True
    return any(other["shape"] and other["shape"][0] != tensor["shape"][0] for other in others)


def _data_rows(call: Event, other: Event, left_out: set[int]) -> list[list[str]]:
    """Rows of the inputs of a call that are samples, by input; `other` is the call of another rank."""
    pairs = list(zip(call["inputs"], other["inputs"], strict=False))
    differing = [mine for mine, theirs in pairs if mine["print"] != theirs["print"]]
    rows = []
    for place, (mine, theirs) in enumerate(pairs):
        if not mine["shape"]:
            continue  # a number, such as the tokens of a batch over all ranks
        alike = mine["print"] == theirs["print"]
        if place in left_out or (alike and differing and _is_of_no_sample(mine, differing)):
            continue
        if len(mine["rows"]) > 1 and len(set(mine["rows"])) == 1:
            continue  # as many times the same row: it is no sample, whatever the other rank has
        rows.append(mine["rows"])
    return rows


def _shared_rows(mine: Sequence[Event], theirs: Sequence[Event]) -> tuple[int, int]:
    """How many samples of the second rank the first has read too, of how many.

    Until one of them sees a sample again: from then on it is another epoch, or drawn with replacement. Nor
    do those count that one rank read before some call and the other after it, which a new epoch explains."""
    left_out = _constant(mine) & _constant(theirs)
    read: tuple[dict[str, int], dict[str, int]] = ({}, {})
    for index, (a, b) in enumerate(zip(mine, theirs, strict=False)):
        parts = _data_rows(a, b, left_out), _data_rows(b, a, left_out)
        repeats = any(len(set(rows)) < len(rows) for part in parts for rows in part)
        flat = [[row for rows in part for row in rows] for part in parts]
        if repeats or any(row in seen for rows, seen in zip(flat, read, strict=True) for row in rows):
            break
        for rows, seen in zip(flat, read, strict=True):
            seen.update(dict.fromkeys(rows, index))
    first, second = read
    times = [sorted((first[row], index)) for row, index in second.items() if row in first]
    last = max((late for _, late in times), default=0)
    explained = any(all(early < k <= late for early, late in times) for k in range(1, last + 1))
    return (0 if explained else len(times)), len(second)


def same_data(examined: Examination) -> Iterator[Finding]:
    calls = [training_calls(events) for events in examined.sharded]
    for i, j in _pairs(examined.ranks):
        compared = [(a, b) for a, b in zip(calls[i], calls[j], strict=False) if _varied(a) and _varied(b)]
        equal = [a for a, b in compared if _prints(a) == _prints(b)]
        if equal and len(equal) * 2 > len(compared):
            detail = f"the inputs of ranks {i} and {j} are equal in {len(equal)} of {len(compared)} calls"
            yield Finding("same-data-on-ranks", detail, step=equal[0]["step"])
            return
        shared, rows = _shared_rows(calls[i], calls[j])
        if shared >= 3 and shared > 0.15 * rows:
            detail = f"{shared} of {rows} samples of rank {j} are also read by rank {i}"
            yield Finding("same-data-on-ranks", detail)
            return


def _draws_by_call(events: Sequence[Event]) -> list[list[Event]]:
    """Random draws inside each training call."""
    calls: list[list[Event]] = []
    inside: list[Event] = []
    counted = {id(call) for call in training_calls(events)}
    for event in events:
        if event["kind"] == "draw" and event["inside"]:
            inside.append(event)
        elif event["kind"] == "call":
            if id(event) in counted:
                calls.append(inside)
            inside = []
    return calls


def _size(draw: Event) -> int:
    return prod(draw["shape"])


def same_dropout(examined: Examination) -> Iterator[Finding]:
    calls = [training_calls(events) for events in examined.sharded]
    draws = [_draws_by_call(events) for events in examined.sharded]
    for i, j in _pairs(examined.ranks):
        for index, (a, b) in enumerate(zip(calls[i], calls[j], strict=False)):
            mine, other = draws[i][index], draws[j][index]
            large = [x for x, y in zip(mine, other, strict=False) if x["print"] == y["print"]]
            drawn_alike = sum(map(_size, large)) >= 16 and len(large) == len(mine)
            if drawn_alike or (a["random"] == b["random"] and a["draws_random"] and b["draws_random"]):
                detail = f"ranks {i} and {j} draw the same random numbers in forward (dropout, noise)"
                yield Finding("same-random-numbers-on-ranks", detail, step=a["step"])
                return


def same_augmentation(examined: Examination) -> Iterator[Finding]:
    """Noise for a batch that ranks draw alike, and that is not the batch itself or cut from it."""
    inputs = {
        part
        for events in examined.sharded
        for call in of_kind(events, "call")
        for tensor in call["inputs"]
        for part in (tensor["print"], *tensor["rows"])
    }
    shapes = {tuple(t["shape"]) for call in training_calls(examined.sharded[0]) for t in call["inputs"]}
    batches = {shape[0] for shape in shapes if len(shape) > 1 and shape[0] > 1}
    outside = [
        [d for d in of_kind(events, "draw") if not d["inside"] and d["shape"] and d["shape"][0] in batches]
        for events in examined.sharded
    ]
    for i, j in _pairs(examined.ranks):
        other = {(d["step"], d["print"]) for d in outside[j]}
        common = [d for d in outside[i] if (d["step"], d["print"]) in other and _size(d) > 1]
        noise = [d for d in common if not inputs & {d["print"], *d["rows"]}]
        if len({d["step"] for d in noise}) > 1:
            detail = (
                f"ranks {i} and {j} draw the same noise of shape {tuple(noise[0]['shape'])} for their batches"
            )
            yield Finding("same-random-numbers-on-ranks", detail, step=noise[0]["step"])
            return


# ---- the loss


@dataclass(frozen=True)
class _Term:
    kind: str
    count: float
    factor: float  # without the scale of a GradScaler
    inside: bool = False  # a model has made it

    @property
    def divisor(self) -> float:
        """What an element is divided by in the end."""
        return (self.count if self.kind == "mean" else 1.0) / abs(self.factor)


def _terms(backward: Event) -> list[_Term]:
    scale = backward["scale"] if backward["scaled"] else 1.0
    weight = _weight(backward)
    return [
        _Term(term["kind"], term["count"], term["factor"] * weight / scale, term["inside"])
        for term in backward["terms"]
        if term["factor"] and term["count"] and weight
    ]


def _weight(backward: Event) -> float:
    """By which the loop over fs.Batches has the gradients of this rank multiplied."""
    return float(backward.get("weight", 1.0))


@dataclass(frozen=True)
class _Update:
    """One step of an optimizer on one model, with what it is made of."""

    model: int
    step: int
    micro: list[Event]  # backwards that one site of the script called most often, since gradients were zero
    calls: list[Event]  # of the model in training, since its last step
    norms: list[float]  # of its gradients, after each backward and when the step begins
    rates: list[float]
    optimizer: int


def _of_model(backward: Event, model: int) -> Event | None:
    """What a backward did to one model; None if it did not reach it."""
    reached = [one for one in backward["models"] if one["reached"]] or backward["models"]
    return next((one for one in reached if one["model"] == model), None)


def _rows_of(backward: Event) -> float | None:
    """Samples in the loss, of the models that it reached."""
    rows = [one["rows"] for one in backward["models"] if one["rows"] is not None]
    return min([count for count in rows if count > 1] or rows, default=None)


def _updates(events: Sequence[Event]) -> list[_Update]:
    """All that have a backward of their own, in their order."""
    trains = {id(call) for call in training_calls(events)}
    since: dict[int, list[Event]] = {}
    updates = []
    for event in events:
        if event["kind"] in ("backward", "call", "gradients", "step begins"):
            for model in {event["model"]} if "model" in event else {m["model"] for m in event["models"]}:
                since.setdefault(model, []).append(event)
        elif event["kind"] == "step":
            model, window = event["model"], since.pop(event["model"], [])
            micro = _micro_batches([e for e in window if e["kind"] == "backward"], model)
            calls = [e for e in window if id(e) in trains]
            norms = [e["norm"] for e in window if e["kind"] in ("gradients", "step begins")]
            if micro:
                rates, optimizer = event["rates"], event["optimizer"]
                updates.append(_Update(model, event["step"], micro, calls, norms, rates, optimizer))
    return updates


def _micro_batches(backwards: Sequence[Event], model: int) -> list[Event]:
    """Of the backwards since a model's last step: since its gradients were zero, from the busiest site."""
    reaching = [(one, about) for one in backwards if (about := _of_model(one, model)) is not None]
    first = max((index for index, (_, about) in enumerate(reaching) if about["fresh"]), default=0)
    own = [one for one, _ in reaching[first:]]
    sites = [(one["site"], [about["how"] for about in one["models"]]) for one in own]
    often = max(sites, key=sites.count, default=None)
    return [one for one, site in zip(own, sites, strict=True) if site == often]


def _rows(calls: Sequence[Event]) -> int:
    """Samples per call. An input of one row, beside a first one of several, is a mask for all of them."""
    least = []
    for call in calls:
        rows = [tensor["shape"][0] for tensor in call["inputs"] if tensor["shape"]]
        least += [count for count in rows if count > 1] if rows and rows[0] > 1 else rows
    return min(least, default=1)


def _second_extents(calls: Sequence[Event]) -> set[int]:
    """Numbers of samples if inputs are (time, batch, ...)."""
    return {
        tensor["shape"][1]
        for call in calls
        for tensor in call["inputs"]
        if len(tensor["shape"]) > 2 or (len(tensor["shape"]) == 2 and tensor["integers"])
    } - {1}


def _rows_in_the_loss(updates: Sequence[_Update]) -> float:
    """Samples per rank and micro-batch that a loss counts, the mean over all: masks leave some out."""
    known = [rows for one in updates for backward in one.micro if (rows := _rows_of(backward)) is not None]
    return sum(known) / len(known) if known else float("inf")


def _across_ranks(examined: Examination) -> Iterator[tuple[_Update, ...]]:
    """The same update of every rank."""
    yield from zip(*(_updates(events) for events in examined.sharded), strict=False)


def loss_is_a_sum(examined: Examination) -> Iterator[Finding]:
    if examined.ranks == 1:
        return
    made = of_kind(examined.sharded[0], "sharded")
    time_first = {event["model"] for event in made if event.get("time_first")}
    for updates in _across_ranks(examined):
        for update in updates:
            own = min((r for one in update.micro if (r := _rows_of(one)) is not None), default=float("inf"))
            rows = min(_rows(update.calls), own, _rows_in_the_loss(updates))
            by_time = update.model in time_first
            detail = next(filter(None, (_summed(one, update, rows, by_time) for one in update.micro)), None)
            if rows > 1 and detail is not None:
                yield Finding("loss-is-a-sum", detail, step=update.step)
                return


def _summed(backward: Event, update: _Update, rows: float, time_first: bool) -> str | None:
    """What a loss adds up instead of averaging it.

    A mean per step of time, each over the batch, is added up rightly; it differs from a mean per sample only
    by modules that are made for (time, batch, ...)."""
    term, micro = _main_term(backward), len(update.micro)
    if term is None:
        return None
    divisor = term.divisor / micro if term.divisor >= micro else term.divisor
    extents = _second_extents(update.calls)
    by_time = any(_close(divisor, extent, 0.02) for extent in extents)
    by_time_step = any(_close(term.count, extent) for extent in extents)
    if term.kind == "sum" and rows <= term.count and divisor < 0.98 * rows and not by_time:
        return f"{term.count:.0f} elements of {rows:.4g} samples are added up, not averaged"
    count = 0 if time_first and by_time_step else _means_of_samples(backward)
    factor = abs(term.factor) * (micro if term.factor < 1 else 1)
    if count and _close(count, rows) and _close(factor, 1.0):
        return f"the means of {count} samples are added up, not averaged"
    return None


def _means_of_samples(backward: Event) -> int:
    """As many as there are, if the loss is a mean for each row of one output, added up by Python."""
    terms = _terms(backward)
    reached = [shape for one in backward["models"] for shape in one["reached"]]
    if len(reached) != 1 or not terms or any(term != terms[0] for term in terms):
        return 0
    (shape,), first = reached, terms[0]
    elements = prod(shape)
    sizes = (elements, elements // shape[-1], shape[0]) if shape else ()  # per class, per token or per sample
    one_each = first.kind == "mean" and len(terms) == (shape[0] if shape else 0)
    return len(terms) if one_each and any(_close(first.count * len(terms), size) for size in sizes) else 0


def uneven_mean(examined: Examination) -> Iterator[Finding]:
    for updates in _across_ranks(examined):
        divisors: dict[tuple[int, int], list[tuple[int, float, float]]] = {}
        for rank, update in enumerate(updates):
            for place, backward in enumerate(update.micro):
                key = 0 if len(update.calls) >= len(update.micro) else place  # several losses of one forward
                for index, term in enumerate(_terms(backward)):
                    divisors.setdefault((key, index), []).append((rank, term.divisor, term.count))
        for found in divisors.values():
            low, high = min(found, key=lambda one: one[1]), max(found, key=lambda one: one[1])
            if high[1] > low[1] * (1 + _CLOSE) and max(one[2] for one in found) > 1:
                detail = (
                    f"an element counts 1/{low[1]:.6g} on rank {low[0]} and 1/{high[1]:.6g} on rank {high[0]}"
                )
                yield Finding("mean-over-uneven-counts", detail, step=updates[0].step)
                return


def _main_term(backward: Event) -> _Term | None:
    """The one over the most elements: sums of a few, such as a router's over its experts, come beside it.

    What a model gives out with a small factor, such as a penalty on its activations, comes beside it too."""
    terms = _terms(backward)
    outside = max((abs(term.factor) for term in terms if not term.inside), default=0.0)
    large = [term for term in terms if not term.inside or abs(term.factor) >= 0.1 * outside]
    return max(large, key=lambda term: (term.count, term.kind == "mean"), default=None)


def _share(backward: Event) -> float:
    """What a micro-batch counts in the sum of gradients: 1 if it is a mean of its own."""
    term = _main_term(backward)
    rows = _rows_of(backward)
    if term is None or term.kind == "mean" or rows is None:
        return _mean_factor(backward)
    return float(rows / term.divisor)


def _mean_factor(backward: Event) -> float:
    """Of the largest term that is a mean."""
    return max((abs(term.factor) for term in _terms(backward) if term.kind == "mean"), default=0.0)


def accumulation_without_division(examined: Examination) -> Iterator[Finding]:
    for events in examined.sharded:
        for update in _updates(events):
            number, norms = len(update.micro), update.norms
            if min(number, len(update.calls)) < 2:
                continue
            if not all(_close(_share(one), 1.0) for one in update.micro):
                continue
            divided = len(norms) > 1 and norms[-2] and _close(norms[-1] / norms[-2], 1 / number)
            if not divided:
                detail = f"{number} micro-batches per step, each with factor 1 instead of 1/{number}"
                yield Finding("accumulation-without-division", detail, step=update.step)
                return


def clipping_before_unscaling(examined: Examination) -> Iterator[Finding]:
    for events in examined.sharded:
        updates = _updates(events)
        for clip in of_kind(events, "clip"):
            if clip["scaled"] and clip["max_norm"] < float("inf"):
                detail = f"{clip['norm']:.4g} was clipped to {clip['max_norm']:.4g} before unscale_"
                yield Finding("clipping-before-unscaling", detail, step=clip["step"])
                return
            own = [u for u in updates if u.step == clip["step"] and u.model in clip["models"]]
            scale = max((abs(t.factor) for u in own for b in u.micro for t in _terms(b)), default=1.0)
            begins = [update.norms[-1] for update in own if update.norms]
            if scale > 4 and begins and begins[0] and _close(clip["after"] / begins[0], scale, 0.05):
                detail = f"the loss is scaled by {scale:.6g}, and gradients are divided by it after clipping"
                yield Finding("clipping-before-unscaling", detail, step=clip["step"])
                return


# ---- parameters and buffers


def _last_steps(run: Run) -> list[list[Event]]:
    """Of each model: its last step on every rank."""
    by_model: dict[int, dict[int, Event]] = {}
    for rank, events in enumerate(run):
        for event in of_kind(events, "step"):
            by_model.setdefault(event["model"], {})[rank] = event
    return [list(by_model[model].values()) for model in sorted(by_model)]


def batchnorm_statistics(examined: Examination) -> Iterator[Finding]:
    for steps in _last_steps(examined.sharded):
        for name, (value, kind) in steps[0]["buffers"].items():
            differing = [r for r, step in enumerate(steps) if step["buffers"].get(name, [value])[0] != value]
            if differing:
                normalises = "BatchNorm" in kind or "InstanceNorm" in kind
                found = "batchnorm-statistics-differ" if normalises else "buffer-differs-between-ranks"
                detail = f"{name!r} of a {kind} is not the same on ranks 0 and {differing[0]}"
                yield Finding(found, detail, tensor=name, step=steps[0]["step"])
                if normalises:
                    break


def parameter_not_synchronised(examined: Examination) -> Iterator[Finding]:
    for last in _last_steps(examined.sharded):
        for name, value in last[0]["beside"].items():
            if any(step["beside"].get(name, value) != value for step in last):
                detail = f"{name!r} is trained on every rank by itself, and has different values there"
                yield Finding("parameter-not-synchronised", detail, tensor=name, step=last[0]["step"])
                return
        ranges: dict[tuple[str, int, int], tuple[int, str]] = {}
        for rank, step in enumerate(last):
            for name, (start, stop, value) in step["copies"].items():
                first = ranges.setdefault((name, start, stop), (rank, value))
                if first[1] != value:
                    detail = (
                        f"{name!r} is not the same on ranks {first[0]} and {rank}, which hold copies of it"
                    )
                    yield Finding("parameter-not-synchronised", detail, tensor=name, step=step["step"])
                    return


def parameter_in_no_optimizer(examined: Examination) -> Iterator[Finding]:
    events = examined.sharded[0]
    for sharded in of_kind(events, "sharded"):
        model = sharded["model"]
        steps = [event for event in of_kind(events, "step") if event["model"] == model]
        gradients = [event for event in of_kind(events, "gradients") if event["model"] == model]
        if not steps or not gradients:
            continue
        without = set.intersection(*(set(event["without"]) for event in gradients))
        names = [name for name in steps[-1]["unheld"] if name not in without]
        if names:
            more = f", and {len(names) - 1} others" if len(names) > 1 else ""
            unit = sharded["parameters"].get(names[0])
            yield Finding("parameter-in-no-optimizer", f"{names[0]!r}{more}", unit=unit, tensor=names[0])
            return


def frozen_parameter_changed(examined: Examination) -> Iterator[Finding]:
    for event in of_kind(examined.sharded[0], "frozen parameter changed")[:1]:
        yield Finding(
            "frozen-parameter-changed",
            repr(event["parameter"]),
            unit=event["unit"],
            tensor=event["parameter"],
            step=event["step"],
        )


def tied_weights_untied(examined: Examination) -> Iterator[Finding]:
    for event in of_kind(examined.sharded[0], "sharded"):
        for first, second in event["untied"][:1]:
            yield Finding("tied-weights-untied", f"{first!r} and {second!r}", tensor=second)


# ---- beside one process


def _rates(events: Sequence[Event]) -> list[float]:
    return [max(event["rates"]) for event in of_kind(events, "step") if event["rates"]]


def _samples(run: Sequence[Sequence[Event]], step: int) -> int:
    return sum(
        max((t["shape"][0] for t in call["inputs"] if t["shape"]), default=1)
        for events in run
        for call in training_calls(events)
        if call["step"] == step
    )


def _loss_factor(update: _Update) -> float:
    """What a step multiplies its mean losses by, over all micro-batches."""
    factors = [(_mean_factor(backward), _weight(backward)) for backward in update.micro]
    if any(weight != 1.0 for _, weight in factors):  # the loop has weights for them: the script's own factor
        own = [factor / weight for factor, weight in factors if weight]
        return sum(own) / max(1, len(own))
    return sum(factor for factor, _ in factors)


def _loss_ratio(examined: Examination) -> float:
    """Of the loss to that of one process, where it is the ranks' number, or its inverse, in all steps."""
    pairs = zip(_updates(examined.sharded[0]), _updates(examined.single), strict=False)
    factors = [(_loss_factor(here), _loss_factor(there)) for here, there in pairs]
    ratios = [here / there for here, there in factors if here and there]
    for factor in (float(examined.ranks), 1 / examined.ranks):
        if ratios and all(_close(one, factor) for one in ratios):
            return factor
    return 1.0


@dataclass(frozen=True)
class _RateRatio:
    """Of one parameter group, to that of one process."""

    group: int
    of_groups: int
    ratio: float
    is_base: bool  # of what its schedule starts from: the rates themselves are no constant multiple


def _rate_ratios(examined: Examination) -> list[_RateRatio]:
    found: dict[tuple[int, int, int], list[tuple[float, float | None]]] = {}
    sizes: dict[tuple[int, int, int], int] = {}
    steps = zip(of_kind(examined.sharded[0], "step"), of_kind(examined.single, "step"), strict=False)
    for here, there in steps:
        if len(here["rates"]) != len(there["rates"]):
            continue
        for group, (mine, other) in enumerate(zip(here["rates"], there["rates"], strict=True)):
            key = (here["model"], here["optimizer"], group)
            base, base_there = here["bases"][group], there["bases"][group]
            ratio = base / base_there if base and base_there else None
            sizes[key] = len(here["rates"])
            if other:
                found.setdefault(key, []).append((mine / other, ratio))
    ratios = []
    for key, pairs in found.items():
        base = pairs[0][1]
        if all(_close(rate, pairs[0][0]) for rate, _ in pairs):
            ratios.append(_RateRatio(key[2], sizes[key], pairs[0][0], False))
        elif base is not None:
            ratios.append(_RateRatio(key[2], sizes[key], base, True))
    return ratios


def learning_rate(examined: Examination) -> Iterator[Finding]:
    if examined.ranks == 1:
        return
    loss, samples = _loss_ratio(examined), _samples([examined.single], 0)
    batch = _samples(examined.sharded, 0) / samples if samples else 1.0
    for rate in _rate_ratios(examined):
        name = _scaled_name(rate, loss, batch, examined.ranks)
        if name is not None:
            which = f" of group {rate.group}" if rate.of_groups > 1 else ""
            detail = (
                f"on {examined.ranks} ranks the learning rate{which} is {rate.ratio:.4g} times that of one "
                f"process, the loss {loss:.4g} times and the global batch {batch:.4g} times"
            )
            yield Finding(name, detail)
            return


def _scaled_name(rate: _RateRatio, loss: float, batch: float, ranks: int) -> str | None:
    total = rate.ratio * loss
    if any(_close(total, allowed) for allowed in (1.0, sqrt(batch), batch)):
        return None
    if _close(rate.ratio, 1.0):
        return "loss-scaled-by-ranks"
    if any(_close(total, factor**2) for factor in (float(ranks), batch) if factor != 1):
        return "learning-rate-scaled-twice"
    return None if rate.is_base else "learning-rate-scaled"


def _step_rows(run: Sequence[Sequence[Event]], step: int) -> list[str]:
    return sorted(
        row
        for events in run
        for call in training_calls(events)
        if call["step"] == step
        for tensor in call["inputs"][:1]
        for row in tensor["rows"]
    )


def differs_from_one_process(examined: Examination) -> Iterator[Finding]:
    """Where the script reads the same global batch as one process: whether the gradients are a multiple."""
    rows = _step_rows(examined.sharded, 0)
    single = examined.single
    if examined.ranks == 1 or not rows or rows != _step_rows([single], 0):
        return
    if any(call["draws"] for call in training_calls(single)):
        return
    norms = [
        [e["norm"] for e in of_kind(events, "gradients") if e["step"] == 0]
        for events in (examined.sharded[0], single)
    ]
    if not all(norms) or not norms[1][-1]:
        return
    ratio = norms[0][-1] / norms[1][-1]
    factors = [float(examined.ranks), 1 / examined.ranks]
    if any(_close(ratio, factor, 1e-3) for factor in factors):
        detail = f"gradients on {examined.ranks} ranks are {ratio:.6g} times those of one process"
        yield Finding("differs-from-one-process", detail, step=0)


# ---- resuming


def _inputs_of(events: Sequence[Event], step: int) -> list[list[str]]:
    return [
        [tensor["print"] for tensor in call["inputs"]]
        for call in training_calls(events)
        if call["step"] == step
    ]


def wrong_resume(examined: Examination) -> Iterator[Finding]:
    yield from _resumed_elsewhere(examined)
    yield from _optimizer_not_restored(examined)
    for events in examined.sharded[:1] + examined.resumed[:1]:
        loads = [index for index, event in enumerate(events) if event["kind"] == "loaded"]
        for index in loads[:1]:
            yield from _schedule_not_restored(events, index)
            yield from _resumed_in_one_run(events, index)


def _optimizer_not_restored(examined: Examination) -> Iterator[Finding]:
    """A run that begins with a checkpoint that has an optimizer, trains on, and leaves the optimizer new."""
    saved = {e["path"] for run in examined.sharded for e in of_kind(run, "saved") if e["optimizer"]}
    for events in examined.resumed[:1]:
        first = next((index for index, event in enumerate(events) if event["kind"] == "step"), 0)
        loads = [event for event in of_kind(events[:first], "loaded") if event["path"] in saved]
        if loads and not any(event["optimizer"] for event in loads):
            detail = "optimizer: the checkpoint has its state, and fs.load was called without it"
            yield Finding("wrong-resume", detail, step=0)


def _schedule_not_restored(events: Sequence[Event], index: int) -> Iterator[Finding]:
    saved = [key for key in events[index]["extra"] if "sched" in key.lower()]
    made, restored = of_kind(events, "schedule made"), of_kind(events[index:], "schedule restored")
    if saved and made and not restored:
        detail = f"the checkpoint has {saved[0]!r}, and no scheduler was given its state"
        yield Finding("wrong-resume", detail, step=events[index]["step"])


def _resumed_in_one_run(events: Sequence[Event], index: int) -> Iterator[Finding]:
    """A script that saves, loads and goes on: it must not begin with its first batch again."""
    path = events[index]["path"]
    saved = [event for event in of_kind(events[:index], "saved") if event["path"] == path]
    before, after = training_calls(events[:index]), training_calls(events[index:])
    if not saved or not before or not after:
        return
    if _varied(after[0]) and _varied(after[0]) == _varied(before[0]):
        yield Finding(
            "wrong-resume", "data order: the first batch comes again after loading", step=after[0]["step"]
        )
    rates, later = _rates(events[:index]), _rates(events[index:])
    if (
        len(rates) > 1
        and later
        and _close(later[0], rates[0], 1e-6)
        and not _close(rates[-1], rates[0], 1e-6)
    ):
        detail = f"scheduler: the learning rate is {later[0]:.4g} again, as in the first step"
        yield Finding("wrong-resume", detail, step=after[0]["step"])


def _resumed_elsewhere(examined: Examination) -> Iterator[Finding]:
    """The resumed run beside the run that went on: data, learning rate and loss of the same steps."""
    if not examined.resumed:
        return
    events, before = examined.resumed[0], examined.sharded[0]
    loads = of_kind(events, "loaded")
    saves = [event for event in of_kind(before, "saved") if loads and event["path"] == loads[0]["path"]]
    if not saves:
        return
    start = saves[-1]["step"]
    expected, found = _inputs_of(before, start), _inputs_of(events, 0)
    if not expected or not found:
        return
    if expected != found:
        again = found == _inputs_of(before, 0)
        where = "begins again with the first batch" if again else "has other batches"
        yield Finding("wrong-resume", f"step or data order: after step {start} it {where}", step=start)
    rates, later = _rates(before), _rates(events)
    if len(rates) > start and later and not _close(later[0], rates[start], 1e-5):
        detail = (
            f"scheduler: the learning rate of step {start} is {later[0]:.6g} instead of {rates[start]:.6g}"
        )
        yield Finding("wrong-resume", detail, step=start)
    elif expected == found:
        yield from _other_losses(before, events, start)


def _other_losses(before: Sequence[Event], events: Sequence[Event], start: int) -> Iterator[Finding]:
    first = [e["loss"] for e in of_kind(before, "backward") if e["step"] == start]
    again = [e["loss"] for e in of_kind(events, "backward") if e["step"] == 0]
    random = [call["draws"] for call in training_calls(events)]
    if first and again and None not in (first[0], again[0]) and not any(random):
        if not _close(first[0], again[0], 1e-4):
            detail = f"model: the loss of step {start} is {again[0]:.6g} instead of {first[0]:.6g}"
            yield Finding("wrong-resume", detail, step=start)
            return
        second = [e["loss"] for e in of_kind(before, "backward") if e["step"] == start + 1]
        later = [e["loss"] for e in of_kind(events, "backward") if e["step"] == 1]
        same = _inputs_of(before, start + 1) == _inputs_of(events, 1)
        if (
            second
            and later
            and same
            and None not in (second[0], later[0])
            and not _close(second[0], later[0], 1e-3)
        ):
            detail = f"optimizer: the loss of step {start + 1} is {later[0]:.6g} instead of {second[0]:.6g}"
            yield Finding("wrong-resume", detail, step=start + 1)


# ---- the engine beside the copy


def non_deterministic(examined: Examination) -> Iterator[Finding]:
    for events in examined.sharded:
        for event in of_kind(events, "not repeatable")[:1]:
            module = event["module"] or "the model"
            yield Finding(
                "non-deterministic",
                event.get("what") or f"the output of {module}",
                unit=event["unit"],
                tensor=module,
                step=event["step"],
            )
            return


def kept_value_edited(examined: Examination) -> Iterator[Finding]:
    for events in examined.sharded:
        for event in of_kind(events, "kept value edited")[:1]:
            yield Finding("kept-value-edited", event["what"], unit=event["unit"], step=event["step"])
            return


def differing(events: Sequence[Event]) -> list[Event]:
    return [e for e in of_kind(events, "compared") if not e["apart"] <= e["allowed"]]


def _first_differing(run: Run) -> tuple[int, Event] | None:
    """The earliest comparison that failed. Gradients of one backward: the one that is computed first."""
    found = [
        (event["step"], events.index(event), rank, event)
        for rank, events in enumerate(run)
        for event in differing(events)[:1]
    ]
    if not found:
        return None
    _, _, rank, event = min(found, key=lambda one: one[:2])
    if event["stage"] != "gradient":
        return rank, event
    rest = [e for e in differing(run[rank]) if e["stage"] == "gradient" and e["step"] == event["step"]]
    return rank, rest[-1]


def numbers_differ(examined: Examination) -> Iterator[Finding]:
    first = _first_differing(examined.sharded)
    if first is None:
        return
    rank, event = first
    name, detail = _cause(examined.sharded[rank], event)
    tensor = f"{event['stage']} {event['tensor'] or 'of the model'!r}"
    what = f"{tensor} is {event['apart']:.3g} apart, {event['allowed']:.2g} is allowed"
    yield Finding(
        name,
        f"{what}{detail}",
        unit=event["unit"],
        tensor=event["tensor"],
        step=event["step"],
        apart=event["apart"],
        allowed=event["allowed"],
    )


def _cause(events: Sequence[Event], event: Event) -> tuple[str, str]:
    """The likely cause of a difference, from what else was seen."""
    if of_kind(events, "not repeatable"):
        return "non-deterministic", ", and the copy does not repeat itself"
    edits = [e for e in of_kind(events, "kept value edited") if e["step"] <= event["step"]]
    if edits:
        return "kept-value-edited", f", after {edits[0]['what']} was edited"
    edited = [e for e in of_kind(events, "edited") if e["step"] == event["step"]]
    if edited and event["stage"] in ("output", "gradient"):
        return "kept-value-edited", f", after {edited[0]['parameters'][0]!r} was edited between micro-batches"
    recomputes = of_kind(events, "recomputes") or any(e["recomputes"] for e in of_kind(events, "sharded"))
    if event["stage"] == "gradient" and recomputes:
        custom = {
            n for e in of_kind(events, "custom functions") for names in e["modules"].values() for n in names
        }
        which = f", and the model uses the autograd function {sorted(custom)[0]}" if custom else ""
        return "wrong-backward-under-recomputation", which
    return "numbers-differ", ""


def refused(examined: Examination) -> Iterator[Finding]:
    """An error of ours that ended the script."""
    found = [event for events in examined.sharded for event in of_kind(events, "refused")]
    for event in sorted(found, key=lambda one: one["error"] == "Stalled")[:1]:  # by another rank's, perhaps
        alone = event["error"] == "OptimizerError" and "does not own" in event["what"]
        detail = f"{event['what'].rstrip('.')}. {event['remedy']}".rstrip(".")
        name = "parameter-not-synchronised" if alone else "refused"
        yield Finding(name, detail, step=event["step"])


JUDGES: tuple[Judge, ...] = (
    same_data,
    same_dropout,
    same_augmentation,
    loss_is_a_sum,
    uneven_mean,
    accumulation_without_division,
    clipping_before_unscaling,
    batchnorm_statistics,
    parameter_not_synchronised,
    parameter_in_no_optimizer,
    frozen_parameter_changed,
    tied_weights_untied,
    learning_rate,
    wrong_resume,
    non_deterministic,
    kept_value_edited,
    numbers_differ,
    differs_from_one_process,
)


def judged(examined: Examination) -> list[Finding]:
    """All findings, each name once. A difference that another finding explains is not listed again."""
    found: dict[str, Finding] = {finding.name: finding for finding in refused(examined)}
    if found:
        return list(found.values())  # the run ended there, on some ranks at another point
    for judge in JUDGES:
        for finding in judge(examined):
            found.setdefault(finding.name, finding)
    if len(found) > 1:
        found.pop("differs-from-one-process", None)
    return list(found.values())
