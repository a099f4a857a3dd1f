"""The entry point of `fullshard`: runs the application, or prints which extra to install."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from fullshard.errors import MissingExtra
from fullshard.extras import need


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    0: done; 1: the checkpoint is damaged, or nothing fits; 2: invalid request; 130: interrupted.
    `fullshard launch` and `fullshard train` return the exit code of the script or the training.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        for library in ("rich", "typer"):
            need(library, "cli")
    except MissingExtra as error:
        print(f"fullshard: {error.what}. {error.remedy}", file=sys.stderr)
        return 2
    try:
        from fullshard.tools.cli.app import run
    except KeyboardInterrupt:  # handled by `run` once it is imported
        print("fullshard: interrupted", file=sys.stderr)
        return 130
    return run(words)
