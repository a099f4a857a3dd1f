"""`fullshard train`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fullshard.errors import OptionError
from fullshard.tools.cli.commands import Command


def _train(
    config: Annotated[
        Path | None, typer.Argument(metavar="CONFIG.yaml", help="The model, the data and the settings.")
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", metavar="N", help="Local ranks (one per GPU; without GPUs 1)."),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a value of CONFIG.yaml; may be repeated."),
    ] = None,
    offload: Annotated[
        str | None,
        typer.Option(
            "--offload",
            metavar="WHERE",
            help="What rests away from the GPU: host, optimizer, auto, none; or a budget such as "
            "device=22GiB,host=90GiB,disk=FOLDER. The same as the key sharding.offload.",
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar.")] = False,
    example: Annotated[
        bool, typer.Option("--example", help="Print a CONFIG.yaml with every key explained, and exit.")
    ] = False,
) -> int:
    if config is None and not example:
        raise OptionError(
            "no CONFIG.yaml was given", "Pass one; `fullshard train --example > config.yaml` writes one."
        )
    if ranks is not None and ranks < 1:
        raise OptionError(f"--ranks is {ranks}", "Give at least 1.")
    for one in overrides or ():
        if "=" not in one:
            raise OptionError(f"--set is {one!r}", "Write it as KEY=VALUE, for example training.steps=500.")
    if example:
        from fullshard.training.example import EXAMPLE

        print(EXAMPLE.rstrip())
        return 0
    assert config is not None
    if not config.is_file():
        what = f"{str(config)!r} is a folder" if config.is_dir() else f"there is no file {str(config)!r}"
        raise OptionError(what, "Pass a config file; `fullshard train --example > config.yaml` writes one.")
    from fullshard.training.command import train

    changes = list(overrides or ())
    if offload is not None:
        changes.append(f"sharding.offload={_offload_value(offload)}")
    return train(config, changes, ranks, quiet)


def _offload_value(text: str) -> str:
    """As YAML."""
    if "=" not in text:
        return "null" if text == "none" else text
    parts = [part.partition("=") for part in text.split(",")]
    return json.dumps({key.strip(): _scalar(value) for key, _, value in parts})


def _scalar(text: str) -> bool | int | str:
    if text in ("true", "false"):
        return text == "true"
    return int(text) if text.isdigit() else text


TRAIN = Command(
    "train",
    _train,
    "train a causal language model on local text, sharded",
    """\
Pretrains or fine-tunes the built-in GPT, or the model of any local Hugging Face folder
or config, on local text or JSONL files. It starts the ranks itself, shows progress,
writes TensorBoard logs and checkpoints, and ends with an HTML report. The same command
run again resumes from the last checkpoint.""",
    """\
examples:
  fullshard train --example > config.yaml    every key, explained
  fullshard train config.yaml
  fullshard train config.yaml --ranks 4 --set training.steps=500
  fullshard train config.yaml --offload host
  fullshard train config.yaml --offload device=22GiB,host=90GiB,disk=/scratch/run

Exit code 0: trained; 2: CONFIG.yaml, or a file that it names, is invalid; others: the
exit code of the training.""",
)
