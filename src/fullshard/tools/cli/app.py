"""The application of all commands. An error is printed as one line, with its remedy."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from fullshard.errors import DamagedCheckpoint, FullshardError
from fullshard.tools.cli import checkpoints, completion, doctor, launch, machine, plan, simulate, train, watch
from fullshard.tools.cli.commands import Command, shown
from fullshard.tools.cli.values import one_of
from fullshard.version import VERSION

COMMANDS: tuple[Command, ...] = (
    train.TRAIN,
    launch.LAUNCH,
    watch.WATCH,
    plan.PLAN,
    simulate.SIMULATE,
    doctor.DOCTOR,
    checkpoints.INSPECT,
    checkpoints.VERIFY,
    checkpoints.EXPORT,
    machine.MACHINE,
)
ABOUT = "Fully sharded data parallel training for PyTorch."
EXAMPLES = """\
examples:
  fullshard plan llama-3-8b --ranks 8 --memory 80GiB   does it fit, and with which strategy
  fullshard launch --nproc-per-node 8 train.py         run a script on 8 ranks
  fullshard train config.yaml                          train a language model
  fullshard inspect runs/gpt/checkpoints               list the checkpoints of a run

`fullshard COMMAND --help` describes a command, with examples.

Exit code 0: done; 1: damaged, or does not fit; 2: invalid request; 130: interrupted."""
# typer vendors click, or uses the installed one: this is the base class of usage errors in either.
_USAGE: type[Any] = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


def run(words: Sequence[str]) -> int:
    """Run one command. Errors of ours, and usage errors, are printed as one line."""
    try:
        code = _invoke(words or ["--help"])
        sys.stdout.flush()  # so that a closed pipe is noticed here
        return code if words else 2
    except FullshardError as error:
        _print_error(f"{error.what.rstrip('.')}. {error.remedy}")
        return 1 if isinstance(error, DamagedCheckpoint) else 2
    except _USAGE as error:
        _print_error(_usage(error))
        return 2
    except BrokenPipeError:  # `fullshard inspect ... | head` closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (KeyboardInterrupt, typer.Abort):
        _print_error("interrupted")
        return 130


def _invoke(words: Sequence[str]) -> int:
    """typer's own `main` without its error handling, which turns a closed pipe into exit code 1."""
    command = typer.main.get_command(_app(plain=not sys.stdout.isatty()))
    try:
        with command.make_context("fullshard", list(words)) as context:
            return int(command.invoke(context) or 0)
    except typer.Exit as request:
        return request.exit_code


def _app(plain: bool) -> typer.Typer:
    app = typer.Typer(
        name="fullshard",
        help=shown(ABOUT, plain),
        epilog=shown(EXAMPLES, plain),
        rich_markup_mode=None if plain else "rich",
        add_completion=False,  # typer's own imports torch at every key press: see `completion`
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


def _print_version(given: bool) -> None:
    if given:
        print(f"fullshard {VERSION}")
        raise typer.Exit


def _show_completion(shell: str | None) -> None:
    if shell is not None:
        print(completion.script(shell, _described()), end="")
        raise typer.Exit


def _install_completion(shell: str | None) -> None:
    if shell is not None:
        print(completion.install(shell, _described()))
        raise typer.Exit


def _described() -> Any:
    return completion.describe(typer.main.get_command(_app(plain=True)), COMMANDS)


def _shell_option(option: str, callback: Callable[[str | None], None], about: str) -> Any:
    check = one_of(option, completion.SHELLS)
    return typer.Option(
        option,
        metavar="|".join(completion.SHELLS),
        callback=lambda shell: callback(check(shell)),
        is_eager=True,
        help=about,
    )


def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
    install: Annotated[
        str | None,
        _shell_option("--install-completion", _install_completion, "Install shell completion and exit."),
    ] = None,
    show: Annotated[
        str | None,
        _shell_option("--show-completion", _show_completion, "Print the completion script and exit."),
    ] = None,
) -> None:
    del version, install, show  # handled by their callbacks


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


def _print_error(text: str) -> None:
    print(f"fullshard: {' '.join(text.split())}", file=sys.stderr)
