"""Shell completion: a script per shell, made from the commands once.

The scripts hold every command, option, choice and model name, so that completing starts no Python; typer's
own completion would import the package, and with it torch, at every press of the key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullshard.tools.cli.commands import Command

SHELLS = ("bash", "zsh", "fish")


@dataclass(frozen=True)
class Words:
    """What can be completed after a command, or after `fullshard` itself."""

    options: Mapping[str, tuple[str, ...]]  # with the values to choose from; empty: anything, or none
    names: tuple[str, ...]


def describe(root: Any, commands: Sequence[Command]) -> dict[str, Words]:
    """By the name of the command; '' for `fullshard` itself. `root` is typer's group of the commands."""
    names = tuple(command.name for command in commands)
    described = {"": Words(_options(root), names)}
    for command in commands:
        described[command.name] = Words(_options(root.commands[command.name]), tuple(command.names()))
    return described


def _options(command: Any) -> dict[str, tuple[str, ...]]:
    long = [(name, one) for one in command.params for name in one.opts if name.startswith("--")]
    choices = {name: str(one.metavar) for name, one in long}
    split = {name: tuple(text.split("|")) if "|" in text else () for name, text in choices.items()}
    return {**split, "--help": ()}


def script(shell: str, described: Mapping[str, Words]) -> str:
    return _fish(described) if shell == "fish" else _bash(described, shell)


def install(shell: str, described: Mapping[str, Words]) -> str:
    """Write the script where the shell finds it; the message for the user."""
    home = Path.home()
    if shell == "fish":
        file = home / ".config" / "fish" / "completions" / "fullshard.fish"
    else:
        file = home / ".local" / "share" / "fullshard" / f"completion.{shell}"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(script(shell, described))
    if shell == "fish":
        return f"Wrote {file}. New shells complete fullshard."
    startup, line = home / f".{shell}rc", f"source '{file}'"
    text = startup.read_text() if startup.exists() else ""
    if line not in text.splitlines():
        startup.write_text(f"{text}{'' if text.endswith(chr(10)) or not text else chr(10)}{line}\n")
    return f"Wrote {file}, which {startup} reads. New shells complete fullshard."


_BASH = """\
_fullshard() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}" command="" words=""
    if [ "$COMP_CWORD" -gt 1 ]; then command="${{COMP_WORDS[1]}}"; fi
    case "$command" in -*) command="" ;; esac
    case "$command $previous" in
{choices}
    *) case "$command" in
{words}
        esac ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _fullshard fullshard
"""
_ZSH = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"


def _bash(described: Mapping[str, Words], shell: str) -> str:
    choices = [
        f'    "{command} {option}") words="{" ".join(values)}" ;;'
        for command, known in described.items()
        for option, values in known.options.items()
        if values
    ]
    words = [
        f'        "{command}") words="{" ".join([*known.names, *known.options])}" ;;'
        for command, known in described.items()
    ]
    text = _BASH.format(choices="\n".join(choices), words="\n".join(words))
    return _ZSH + text if shell == "zsh" else text


def _fish(described: Mapping[str, Words]) -> str:
    lines = []
    for command, known in described.items():
        where = f"__fish_seen_subcommand_from {command}" if command else "__fish_use_subcommand"
        start = f'complete -c fullshard -n "{where}"'
        if known.names:
            lines.append(f'{start} -a "{" ".join(name for name in known.names if name[0] != "-")}"')
        long = {**known.options, **{name: () for name in known.names if name.startswith("--")}}
        for option, values in long.items():
            chosen = f' -x -a "{" ".join(values)}"' if values else ""
            lines.append(f"{start} -l {option.removeprefix('--')}{chosen}")
    return "\n".join([*lines, ""])
