"""The entry of one rank: `python -m fullshard.training.worker CONFIG`, under torchrun or `fullshard train`.

Exit code 0: the run is complete, or saved at its time limit; 128 + n: saved after signal n; 1: it failed.
Errors are written to the launcher's folder, and the launcher shows one of them; without a launcher they are
printed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fullshard import environment
from fullshard.errors import FullshardError, Stalled
from fullshard.stop_signals import exit_code
from fullshard.text_files import replace_text
from fullshard.training.session import RankArguments, is_printed_by_rank_0, run_rank
from fullshard.training.stopping import die_with


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    private: Path | None = args.private
    if private is None:
        started = RankArguments(args.config, args.set, args.quiet)
    else:
        die_with(args.launcher)
        (private / f"rank-{environment.launch().rank}.pid").write_text(str(os.getpid()))
        rows = json.loads((private / "rows.json").read_text())
        started = RankArguments(args.config, args.set, args.quiet, rows, private / "stop")
    try:
        stopped = run_rank(started)
    except Exception as error:  # noqa: BLE001  one rank's error, reported in one place
        return _report(error, private)
    if private is None:
        return exit_code(stopped)
    if environment.launch().rank == 0:
        (private / "outcome.json").write_text(json.dumps({"stopped": stopped}))
    return 0  # the launcher knows the outcome, and torchrun's agent takes others for failures


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m fullshard.training.worker", description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--quiet", action="store_true")
    parser.add_argument("--private", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--launcher", type=int, default=0, help=argparse.SUPPRESS)
    return parser


def _report(error: Exception, private: Path | None) -> int:
    rank = environment.launch().rank
    if private is not None:
        report: dict[str, Any] = {"traceback": traceback.format_exc(), "stalled": isinstance(error, Stalled)}
        if isinstance(error, FullshardError):
            report |= {"what": error.what, "remedy": error.remedy}
        replace_text(private / f"error-{rank}.json", json.dumps(report))
    elif not isinstance(error, FullshardError):
        traceback.print_exc()
    elif not is_printed_by_rank_0(error):
        sys.stderr.write(f"fullshard: {error}\n")
    # Without the interpreter's shutdown, which would wait for a background save that waits for failed ranks.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
