"""`fullshard doctor`: is a training right, is a cluster healthy, and what belongs into a bug report."""

from __future__ import annotations

import contextlib
import json as json_format
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from fullshard.environment import variables_of_rank
from fullshard.errors import OptionError
from fullshard.tools.cli.commands import Command
from fullshard.tools.cli.launch import require_script
from fullshard.tools.cli.printing import as_json_text, refuse_unwritable, write
from fullshard.tools.cli.shared import AsJson

_GRACE_S = 10.0  # what the other ranks get to end after one has failed
_RESUMED_STEPS = 2
# In errors of ranks whose peers have ended: gloo's, NCCL's and of torch's store.
_GONE = (
    *("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited"),
    *("Socket Timeout", "Connection refused"),
)


def _doctor(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="SCRIPT [ARGS]...", help="The script, and its own arguments."),
    ] = None,
    ranks: Annotated[int, typer.Option("--ranks", metavar="N", help="Ranks of the sharded run.")] = 2,
    steps: Annotated[int, typer.Option("--steps", metavar="N", help="Optimizer steps to look at.")] = 5,
    module: Annotated[
        bool, typer.Option("-m", "--module", help="SCRIPT is a module, as for python -m.")
    ] = False,
    accept: Annotated[
        list[str] | None, typer.Option("--accept", metavar="NAME", help="A finding that does not count.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a page with a picture.")
    ] = None,
    timeout: Annotated[float, typer.Option("--timeout", metavar="S", help="Seconds for each run.")] = 600.0,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show what the script prints.")] = False,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Check the ranks that a launcher started; no script.")
    ] = False,
    report: Annotated[
        bool, typer.Option("--report", help="Collect what belongs into a bug report; SCRIPT is optional.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="The file of --cluster or --report.")
    ] = None,
    json: AsJson = False,
) -> int:
    given = [*(["-m"] if module else []), *(words or [])]
    _refuse_together(cluster, report, given, html)
    for option, file in (("--html", html), ("--out", out)):
        refuse_unwritable(option, file)
    if cluster:
        from fullshard.tools.cli.doctor_cluster import examine_cluster

        return examine_cluster(out or Path("fullshard-cluster.json"), json)
    if report:
        return _report(_Request(given, ranks, steps, timeout, verbose), module, out, json)
    request = _Request(given, ranks, steps, timeout, verbose)
    _check(request, accept or [], module)
    examined = _examined(request, tuple(accept or ()))
    if html is not None:
        from fullshard.doctor.page import page

        write("--html", html, page(examined))
    if json:
        as_json_text(examined.data())
    else:
        print(examined.text())
    return 0 if examined.same else 1


def _refuse_together(cluster: bool, report: bool, given: Sequence[str], html: Path | None) -> None:
    """Options that would not be read."""
    if cluster and report:
        raise OptionError("--cluster and --report do not go together", "Ask one after the other.")
    if cluster and given:
        raise OptionError(
            "--cluster takes no script", "It checks the ranks of a launcher. Leave out one of them."
        )
    if html is not None and (cluster or report):
        other = "--cluster" if cluster else "--report"
        raise OptionError(f"--html and {other} do not go together", "--out FILE writes what it finds.")


def _report(request: _Request, module: bool, out: Path | None, as_json: bool) -> int:
    """Of this host; with a script, also of a few steps of it, and of the error that ends it."""
    from fullshard.doctor.issue_report import as_text, collected

    runs: list[dict[str, Any]] = []
    if len(request.script) > int(module):
        _check(request, (), module)
        with tempfile.TemporaryDirectory(prefix="fullshard-doctor-", ignore_cleanup_errors=True) as folder:
            runs = _run(request, Path(folder) / "run", request.ranks, request.steps, "watch")
    report = collected(request.script if runs else (), runs)
    if as_json:
        as_json_text(report)
    elif out is None:
        print(as_text(report))
    if out is not None:
        text = json_format.dumps(report, indent=1) if out.suffix == ".json" else as_text(report)
        write("--out", out, text)
    return 0


@dataclass(frozen=True)
class _Request:
    script: list[str]  # with -m for a module, and its arguments
    ranks: int
    steps: int
    timeout_s: float
    verbose: bool


def _check(request: _Request, accept: Sequence[str], module: bool) -> None:
    from fullshard.doctor.findings import KINDS

    if len(request.script) <= int(module):
        raise OptionError("no script is given", "Write fullshard doctor train.py, or see --help.")
    for name, value in (("--ranks", request.ranks), ("--steps", request.steps)):
        if value < 1:
            raise OptionError(f"{name} is {value}", "Give at least 1.")
    for name in accept:
        if name not in KINDS:
            raise OptionError(f"there is no finding {name!r}", f"Their names are {', '.join(KINDS)}.")
    require_script(request.script[int(module)], module)


def _examined(request: _Request, accept: tuple[str, ...]) -> Any:
    """Run the script sharded, as one process, and once more if it saves checkpoints; judge the records."""
    from fullshard.doctor.judges import Examination, of_kind
    from fullshard.doctor.report import reported

    subject = os.path.basename(request.script[1] if request.script[0] == "-m" else request.script[0])
    notes: list[str] = []
    with tempfile.TemporaryDirectory(prefix="fullshard-doctor-", ignore_cleanup_errors=True) as folder:
        sharded = _run(request, Path(folder) / "sharded", request.ranks, request.steps, "compare")
        runs = [result["events"] for result in sharded]
        refused = [result["error"] for result in sharded if of_kind(result["events"], "refused")]
        own = [one["error"] for one in sharded if one["error"] and _distance(one["error"]) < 2]
        if any(not _distance(error) for error in refused) or (refused and not own):
            return reported(subject, Examination(runs), accept)
        _refuse_failed(sharded, request, subject)
        resumed: list[Any] = []
        if any(of_kind(events, "saved") for events in runs):
            again = _run(request, Path(folder) / "resumed", request.ranks, _RESUMED_STEPS, "watch")
            problem = next((one["error"] for one in again if one["error"]), None)
            notes += [f"the run after a checkpoint failed: {problem}"] if problem else []
            resumed = [] if problem else [result["events"] for result in again]
            notes += _resume_notes(runs, resumed) if resumed else []
        single = _single(request, Path(folder), notes)
    return reported(subject, Examination(runs, single, resumed), accept, notes)


def _single(request: _Request, folder: Path, notes: list[str]) -> list[Any]:
    """As one process; in a folder without the checkpoints of the sharded run."""
    if request.ranks == 1:
        return []
    place = folder / "single" / "run"
    result = _run(request, place, 1, request.steps, "watch")[0]
    if result["error"]:
        notes.append(f"as one process the script fails: {result['error']}")
        return []
    events: list[Any] = result["events"]
    return events


def _refuse_failed(results: Sequence[dict[str, Any]], request: _Request, subject: str) -> None:
    errors = [(rank, result["error"]) for rank, result in enumerate(results) if result["error"]]
    if errors:
        rank, error = min(errors, key=lambda one: (_distance(one[1]), one[0]))
        ended = [str(rank) for rank, result in enumerate(results) if not result["error"]]
        alone = f" (rank {', '.join(ended)} had ended by itself)" if ended and _distance(error) == 2 else ""
        raise OptionError(
            f"{subject} fails by itself: rank {rank} of {request.ranks}: {error}{alone}",
            "Mend that first; --verbose shows what the script prints.",
        )


def _distance(error: str) -> int:
    """From what went wrong: an error of its own, a rank that died, one whose peer is gone, one that waits."""
    if error.startswith("ended with"):
        return 1 if "exit code" in error else 3
    return 2 if error.startswith("Stalled: ") or any(part in error for part in _GONE) else 0


def _resume_notes(runs: Sequence[list[Any]], resumed: Sequence[list[Any]]) -> list[str]:
    saved = {event["path"] for events in runs for event in events if event["kind"] == "saved"}
    if any(event["kind"] == "loaded" and event["path"] in saved for events in resumed for event in events):
        return []
    return [
        "resuming was not checked: started again, the script loads no checkpoint that it saved. Files are "
        "written to a temporary folder meanwhile: fs.latest and fs.load look there, os.path does not"
    ]


def _run(request: _Request, folder: Path, ranks: int, steps: int, how: str) -> list[dict[str, Any]]:
    """Start the ranks, wait for all of them, and read what they recorded."""
    import torch

    folder.mkdir(parents=True)
    hides = torch.cuda.device_count() < ranks
    command = [sys.executable, "-m", "fullshard.tools.cli.examined", str(folder), str(steps), how]
    processes: list[subprocess.Popen[bytes]] = []
    with _free_port() as port, _ended(processes):
        _start(processes, [*command, *request.script], request.verbose, (folder, ranks, port, hides))
        late = _wait(processes, folder, request.timeout_s)
    return [_result(folder, rank, process, late) for rank, process in enumerate(processes)]


@contextlib.contextmanager
def _ended(processes: list[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Afterwards none of them runs, also when this process is asked to end meanwhile."""

    def leave(number: int, _: Any) -> None:
        sys.exit(128 + number)

    on_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, leave) if on_main else None
    try:
        yield
    finally:
        for process in processes:
            _end(process)
        if on_main:
            signal.signal(signal.SIGTERM, before)


def _start(
    processes: list[subprocess.Popen[bytes]],
    command: Sequence[str],
    verbose: bool,
    place: tuple[Path, int, int, bool],
) -> None:
    folder, ranks, port, hides = place
    for rank in range(ranks):
        with open(folder / f"rank-{rank}.log", "wb") as log:
            output: Any = sys.stderr if verbose else log
            process = subprocess.Popen(
                command,
                env=variables_of_rank(rank, ranks, port, hides),
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        processes.append(process)


def _wait(processes: Sequence[subprocess.Popen[bytes]], folder: Path, limit_s: float) -> bool:
    """Until all have ended, or one has failed and the others had time to end. True at the limit."""
    deadline = time.monotonic() + limit_s
    failed_at: float | None = None
    while any(process.poll() is None for process in processes):
        now = time.monotonic()
        if failed_at is None and any(_has_failed(folder, r, p) for r, p in enumerate(processes)):
            failed_at = now
        if now > deadline:
            return True
        if failed_at is not None and now > failed_at + _GRACE_S:
            return False
        time.sleep(0.05)
    return False


def _has_failed(folder: Path, rank: int, process: subprocess.Popen[bytes]) -> bool:
    if process.poll() is None:
        return False
    place = folder / f"rank-{rank}.json"
    return not place.exists() or json_format.loads(place.read_text())["error"] is not None


def _result(folder: Path, rank: int, process: subprocess.Popen[bytes], late: bool) -> dict[str, Any]:
    place, log = folder / f"rank-{rank}.json", folder / f"rank-{rank}.log"
    lines = log.read_text(errors="replace").strip().splitlines()
    if place.exists():
        result: dict[str, Any] = json_format.loads(place.read_text())
        return result | {"log": lines[-100:]}
    why = "ended with no result within --timeout" if late else f"ended with exit code {process.returncode}"
    return {"events": [], "error": f"{why}{': ' + lines[-1] if lines else ''}", "log": lines[-100:]}


def _end(process: subprocess.Popen[bytes]) -> None:
    """The process and what it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextlib.contextmanager
def _free_port() -> Iterator[int]:
    """A port that no other process gets by chance before rank 0 listens on it, seconds from now.

    The socket stays bound, but does not listen: a store, whose socket may share its port, can still take it.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


DOCTOR = Command(
    "doctor",
    _doctor,
    "check that the numbers of a training script are those of one process",
    """\
Runs the script for a few steps on ranks that it starts here, beside an unsharded copy of the
model in plain torch: outputs of every unit, gradients, norms, parameters and buffers are
compared, with tolerances from the dtypes and the depth. Then as one process, and, if it saves
checkpoints, once more from the last of them. It names the first tensor that differs, and
mistakes around the model: ranks that read the same data, a loss that is a sum, one dropout seed
on all ranks, accumulation without division, and others (docs/doctor.md).

The script is not changed. What it saves with fs.save or torch.save goes to a temporary folder.
Without a GPU for each rank, it runs on the CPU. Options come before SCRIPT.

--cluster checks the ranks that a launcher started: versions, devices, known sums in every
dtype, bandwidth of every pair, disks, clocks; then numbers and speed beside FSDP2. --report
collects versions, plan, options, topology, flight recorders and the error of a script, without
secrets, for an issue report.""",
    """\
examples:
  fullshard doctor train.py --lr 1e-3
  fullshard doctor --ranks 4 --steps 10 --html report.html train.py
  fullshard doctor --accept batchnorm-statistics-differ train.py
  fullshard doctor --json -m my_package.train
  torchrun --nproc-per-node 8 -m fullshard doctor --cluster
  fullshard doctor --report --out report.md train.py

Exit code 0: the same; 1: something was found; 2: invalid request, or the script fails by itself.""",
    {"ignore_unknown_options": False, "allow_interspersed_args": False},
)
