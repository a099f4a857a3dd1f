"""A rank that is stuck or gone: the others warn within seconds, go on if it does, and end if it does not.

Every case is a run of two real processes (`hang_cases`), because how they end is a part of it. Runs mostly
wait, so some are in progress at a time. Limits end a hang; no time is measured here. `-s` prints a table.
"""

from __future__ import annotations

import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

import hang_runs
import tables
from hang_runs import Ended

STALL_S = 9


def _run(case: str, folder: Path) -> Ended:
    fails = bool(CASES[case].error)
    return hang_runs.run(case, folder, STALL_S if fails else hang_runs.LIMIT_S, last=(1,) if fails else ())


@dataclass(frozen=True)
class Expected:
    warning: str = ""  # in a warning; empty: there may be one
    error: str = ""  # in the error of rank 0; empty: both ranks end as if nothing had happened
    statuses: tuple[int, ...] = (1,)


LATE = r"rank 0 \(pid \d+ on \S+\) has waited \d+ s in .*\. Late: rank 1 \(pid \d+\): .*"
SIGNAL = "stopped by a signal"
STOPPED = Expected(LATE + SIGNAL, r"nothing moved for \d+ s; late: rank 1 .*" + SIGNAL)
IDLE, MUTUAL, GONE = "sleeping, or waiting", "none of them can continue", "rank 1: process has exited"
CASES: dict[str, Expected] = {
    "stopped": STOPPED,
    "loop": Expected(LATE + r"computing, at .*hang_cases.py:\d+ in loop", "nothing moved"),
    "lock": Expected(LATE + IDLE + r".*in locked: lock.acquire\(\)", "nothing moved"),
    "sleep": Expected(LATE + IDLE + r".*in sleeps: time.sleep", "nothing moved"),
    "input": Expected(LATE + IDLE + r".*in asks: input\(\)", "nothing moved"),
    "short sleep": Expected(LATE + IDLE + r".*in sleeps: time.sleep"),
    "late for shard": Expected("rank 0 .*has waited .*rank 1 on .*: not come to this call yet"),
    "quiet before a save": Expected(r"rank 1 .*has waited .*\(save, .*Late: rank 0 .*" + IDLE),
    "leaves": Expected(error="rank 1: (process has exited|has left)"),
    "exits": Expected(error=GONE),
    "killed": Expected(error=GONE),
    "out of memory": Expected(error="rank 1: (process has exited|has left)"),
    "killed in a save": Expected(error=GONE),
    "forward alone": Expected(error=r"rank 1 waits in torch.distributed.barrier .*" + MUTUAL),
    "full alone": Expected(error=r"rank 1 waits in torch.distributed.barrier .*" + MUTUAL),
    "forward against all_reduce": Expected(error=r"rank 1 waits in torch.distributed.all_reduce .*" + MUTUAL),
    "shorter loader": Expected(error=r"rank 1 waits in torch.distributed.barrier .*" + MUTUAL),
    "two models": Expected(error="another model .*" + MUTUAL),
    "stopped in shard": STOPPED,
    "stopped in a save": STOPPED,
    "stopped in a background save": Expected(LATE + SIGNAL, "nothing moved"),
    "stopped in a load": STOPPED,
    "stopped in backward": STOPPED,
    "stopped in the optimizer": STOPPED,
    "interrupted": Expected(error="KeyboardInterrupt", statuses=(-signal.SIGINT, 1)),
    "caught": Expected(LATE, "caught Stalled", statuses=(0,)),
    "caught, status 7": Expected(LATE, "caught Stalled", statuses=(7,)),
    "groups ended in finally": STOPPED,
    "error swallowed": Expected(error="Stalled|RankMismatch"),
}


# Another case ends in the same way, and waits in the same state of the process.
LONG = ("sleep", "input", "exits", "out of memory", "caught, status 7")


@pytest.mark.timeout(1200)
@tables.some("is_long", [False, True], False)
def test_a_stuck_rank_is_named_within_seconds_and_every_other_process_ends(
    is_long: bool, tmp_path: Path
) -> None:
    wanted = [case for case in CASES if (case in LONG) == is_long]
    wanted = os.environ["HANGS"].split(";") if os.environ.get("HANGS") else wanted
    folders = [tmp_path / re.sub(r"\W", "-", case) for case in wanted]
    with ThreadPoolExecutor(4) as pool:
        found = dict(zip(wanted, pool.map(_run, wanted, folders), strict=True))
    for case, ended in found.items():
        hang_runs.print_row(case, ended)
    # On a machine that is busy with other tests a rank may be late for other reasons: once more, alone.
    suspects = [case for case, ended in found.items() if _problems(case, CASES[case], ended)]
    again = {case: _run(case, tmp_path / f"again-{number}") for number, case in enumerate(suspects)}
    wrong = [problem for case, ended in again.items() for problem in _problems(case, CASES[case], ended)]
    assert not wrong, "\n\n".join(wrong)


def _problems(case: str, expected: Expected, ended: Ended) -> list[str]:
    wrong: list[str] = []
    both = ended.text(0) + "\n" + ended.text(1)
    if not re.search(expected.warning, both):
        wrong.append(f"{case}: no warning {expected.warning!r}:\n{both}")
    if ended.statuses[0] not in (expected.statuses if expected.error else (0,)):
        wrong.append(f"{case}: rank 0 ended with {ended.statuses[0]}:\n{both}")
    if not re.search(expected.error, ended.text(0)):
        wrong.append(f"{case}: no error {expected.error!r}:\n{ended.text(0)}")
    if not expected.error:
        undisturbed = {output.split()[-1] for output in ended.outputs if output}
        if ended.statuses != [0, 0] or len(ended.outputs[0].split()) != 2 or not undisturbed:
            wrong.append(f"{case}: the run did not continue:\n{both}")
    if "Late" in both and sum("has waited" in line for line in both.splitlines()) > 8:
        wrong.append(f"{case}: too many warnings:\n{both}")
    return wrong
