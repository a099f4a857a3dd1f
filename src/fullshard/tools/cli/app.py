"""All commands under one roof, and what their errors look like: one line, with a remedy."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from fullshard.errors import DamagedCheckpoint, FullshardError
from fullshard.tools.cli import checkpoints, launch, machine, plan, simulate, train
from fullshard.tools.cli.commands import Command, shown
from fullshard.version import VERSION

COMMANDS: tuple[Command, ...] = (
    train.TRAIN,
    launch.LAUNCH,
    plan.PLAN,
    simulate.SIMULATE,
    checkpoints.INSPECT,
    checkpoints.VERIFY,
    checkpoints.EXPORT,
    machine.MACHINE,
)
ABOUT = "Fully sharded data parallel training for PyTorch."
EXAMPLES = """\
examples:
  fullshard plan llama-3-8b --ranks 8 --memory 80GiB   does it fit, and how
  fullshard launch --nproc-per-node 8 train.py         run a script on 8 ranks
  fullshard train config.yaml                          train a language model
  fullshard inspect runs/gpt/checkpoints               which checkpoints are there

`fullshard COMMAND --help` says what a command does, with examples.

Exit code 0: done; 1: damaged, or does not fit; 2: something is wrong with what was
asked; 130: interrupted."""
# typer brings its own click, or uses the installed one: this is the root of usage errors in either.
_USAGE: type[Any] = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


def run(said: Sequence[str]) -> int:
    """Run one command; every error that is ours, or about the command line, is one line."""
    try:
        code = _invoke(said or ["--help"])
        sys.stdout.flush()  # so that a reader who has gone away is noticed here
        return code if said else 2
    except FullshardError as error:
        _say(f"{error.what.rstrip('.')}. {error.remedy}")
        return 1 if isinstance(error, DamagedCheckpoint) else 2
    except _USAGE as error:
        _say(_usage(error))
        return 2
    except BrokenPipeError:  # `fullshard inspect ... | head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (KeyboardInterrupt, typer.Abort):
        _say("interrupted")
        return 130


def _invoke(said: Sequence[str]) -> int:
    """What typer's own `main` does, less its way with errors: it answers a closed pipe with exit code 1."""
    command = typer.main.get_command(_app(plain=not sys.stdout.isatty()))
    try:
        with command.make_context("fullshard", list(said)) as context:
            return int(command.invoke(context) or 0)
    except typer.Exit as left:
        return left.exit_code


def _app(plain: bool) -> typer.Typer:
    app = typer.Typer(
        name="fullshard",
        help=shown(ABOUT, plain),
        epilog=shown(EXAMPLES, plain),
        rich_markup_mode=None if plain else "rich",
        add_completion=False,
    )
    app.callback()(_root)
    for command in COMMANDS:
        app.command(
            command.name,
            help=shown(f"{command.summary[0].upper()}{command.summary[1:]}.\n\n{command.about}", plain),
            short_help=command.summary,
            epilog=shown(command.examples, plain),
            context_settings={"max_content_width": 100, **command.settings},
        )(command.run)
    return app


def _version(asked: bool) -> None:
    if asked:
        print(f"fullshard {VERSION}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    del version  # its callback has answered


def _usage(error: Any) -> str:
    """typer's error in our form."""
    what = " ".join(str(error.format_message()).split()).rstrip(".")
    context = getattr(error, "ctx", None)
    path = getattr(context, "command_path", None) or "fullshard"
    remedy = f"See {path} --help."
    if path == "fullshard":
        remedy = f"The commands are {', '.join(command.name for command in COMMANDS)}. {remedy}"
    stop = "" if what.endswith("?") else "."
    return f"{what[:1].lower()}{what[1:]}{stop} {remedy}"


def _say(text: str) -> None:
    print(f"fullshard: {' '.join(text.split())}", file=sys.stderr)
