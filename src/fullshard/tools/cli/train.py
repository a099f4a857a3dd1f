"""`fullshard train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fullshard.errors import OptionError
from fullshard.tools.cli.commands import Command


def _train(
    config: Annotated[
        Path | None, typer.Argument(metavar="CONFIG.yaml", help="What to train, on what, and how.")
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", metavar="N", help="Local ranks (as many as there are GPUs, else 1)."),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a value of CONFIG.yaml; may be repeated."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar.")] = False,
    example: Annotated[
        bool, typer.Option("--example", help="Print a CONFIG.yaml with every key explained, and exit.")
    ] = False,
) -> int:
    if config is None and not example:
        raise OptionError(
            "no CONFIG.yaml was named", "Give one; `fullshard train --example > config.yaml` makes one."
        )
    if ranks is not None and ranks < 1:
        raise OptionError(f"--ranks is {ranks}", "Give at least 1.")
    for one in overrides or ():
        if "=" not in one:
            raise OptionError(f"--set is {one!r}", "Write it as KEY=VALUE, for example training.steps=500.")
    from fullshard.training.command import EXAMPLE, train

    if example:
        print(EXAMPLE.rstrip())
        return 0
    assert config is not None
    if not config.is_file():
        what = f"{str(config)!r} is a folder" if config.is_dir() else f"there is no file {str(config)!r}"
        raise OptionError(what, "Name a config file; `fullshard train --example > config.yaml` makes one.")
    return train(config, list(overrides or ()), ranks, quiet)


TRAIN = Command(
    "train",
    _train,
    "train a causal language model on local text, sharded",
    """\
Pretrains or fine-tunes the built-in GPT, or any local Hugging Face folder or config, on
local text or JSONL files. It starts the ranks itself, shows progress, writes TensorBoard
logs and checkpoints, and ends with a report in HTML. The same command run again goes on
where the last checkpoint was.""",
    """\
examples:
  fullshard train --example > config.yaml    every key, with what it means
  fullshard train config.yaml
  fullshard train config.yaml --ranks 4 --set training.steps=500

Exit code 0: trained; 2: something is wrong with CONFIG.yaml or what it names; others:
as the training left.""",
)
