"""The entry of one rank: `python -m fullshard.training.worker CONFIG`, under torchrun or `fullshard train`.

Exit code 0: the run has come to its end, or was stopped and saved; 1: it failed. What went wrong is left in
the launcher's folder, which shows one error of all ranks; without a launcher it is printed.
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
from fullshard.training.session import Wish, is_told_by_another, run_rank
from fullshard.training.stopping import die_with


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    private: Path | None = args.private
    if private is None:
        wish = Wish(args.config, args.set, args.quiet)
    else:
        die_with(args.launcher)
        (private / f"rank-{environment.launch().rank}.pid").write_text(str(os.getpid()))
        rows = json.loads((private / "rows.json").read_text())
        wish = Wish(args.config, args.set, args.quiet, rows, private / "stop")
    try:
        stopped = run_rank(wish)
    except Exception as error:  # noqa: BLE001  one rank's error, told in one place
        return _tell(error, private)
    if private is not None and environment.launch().rank == 0:
        (private / "outcome.json").write_text(json.dumps({"stopped": stopped}))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m fullshard.training.worker", description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--quiet", action="store_true")
    parser.add_argument("--private", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--launcher", type=int, default=0, help=argparse.SUPPRESS)
    return parser


def _tell(error: Exception, private: Path | None) -> int:
    rank, ours = environment.launch().rank, isinstance(error, FullshardError)
    if private is not None:
        said: dict[str, Any] = {"traceback": traceback.format_exc(), "stalled": isinstance(error, Stalled)}
        if isinstance(error, FullshardError):
            said |= {"what": error.what, "remedy": error.remedy}
        staging = private / f"error-{rank}.new"
        staging.write_text(json.dumps(said))
        staging.rename(private / f"error-{rank}.json")
    elif not ours:
        traceback.print_exc()
    elif not is_told_by_another(error):
        sys.stderr.write(f"fullshard: {error}\n")
    # Not through the interpreter's end: a background save that waits for ranks which failed would hold it up.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
