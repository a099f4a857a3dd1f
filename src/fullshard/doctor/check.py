"""`fs.check`: the examination of a training function, in code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fullshard.comm import groups
from fullshard.comm.plain_group import PlainGroup
from fullshard.doctor.findings import KINDS
from fullshard.doctor.judges import Examination
from fullshard.doctor.recorder import Enough, Recorder
from fullshard.doctor.report import Report, reported
from fullshard.errors import OptionError
from fullshard.keywords import checked_keywords


@checked_keywords(
    {
        **dict.fromkeys(("model", "function", "fn", "func", "loop"), "Write train=function, which trains."),
        **dict.fromkeys(("num_steps", "k", "iterations", "max_steps"), "Write steps=N."),
        **dict.fromkeys(("allow", "ignore", "skip", "except_"), "Write accept=[names of findings]."),
        **dict.fromkeys(("args", "kwargs", "ranks"), "Write train=lambda: f(arguments), on running ranks."),
    }
)
def check(train: Callable[[], Any], *, steps: int = 5, accept: Sequence[str] = ()) -> Report:
    """Run a training function for a few steps beside an unsharded copy of its model, and compare.

        report = fs.check(lambda: train(config), steps=5)  # it calls fs.shard and trains
        print(report)
        report.raise_if_different()

    train: builds the model, shards it and trains. All ranks must call fs.check. It is left after `steps`
        optimizer steps, by an exception that is not an Exception.
    accept: names of findings that do not count.

    The same report on all ranks: what differs first, in which unit, by how much and why; and mistakes around
    the model, such as ranks that read the same data (docs/doctor.md has the list). Every rank holds the
    unsharded model meanwhile. `fullshard doctor` does the same with a script, and compares it with one
    process and with a resumed run.
    """
    if not callable(train):
        raise OptionError(
            f"fs.check got a {type(train).__name__}, not a function", "Give the function that trains."
        )
    if not isinstance(steps, int) or steps < 1:
        raise OptionError(f"steps is {steps!r}", "Give a number of steps of at least 1.")
    for name in accept:
        if name not in KINDS:
            raise OptionError(f"there is no finding {name!r}", f"Their names are {', '.join(KINDS)}.")
    recorder = Recorder(steps)
    recorder.start()
    try:
        train()
    except Enough:
        pass
    finally:
        recorder.stop()
    groups.start()
    runs = PlainGroup().gather_values(recorder.events)
    return reported(getattr(train, "__name__", "the function"), Examination(runs), accept)
