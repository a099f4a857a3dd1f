"""Options that several commands have, each declared once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from fullshard.tools.cli.values import one_of, switch

CLUSTER, TRAINING, OFFLOAD, CHOICE = "The cluster", "The training", "Offload", "What to answer"  # in the help

Ranks = Annotated[
    int,
    typer.Option("--ranks", metavar="N", help="Number of ranks, one per device.", rich_help_panel=CLUSTER),
]
NodeRanks = Annotated[
    int | None,
    typer.Option(
        "--node-ranks", metavar="N", help="Ranks per node, for two levels.", rich_help_panel=CLUSTER
    ),
]
HostLink = Annotated[
    str | None,
    typer.Option(
        "--host-link",
        metavar="RATE",
        help="Between a device and its host, one way: 25GB/s.",
        rich_help_panel=OFFLOAD,
    ),
]
CheckpointActivations = Annotated[bool, switch("checkpoint_activations", TRAINING)]
OffloadActivations = Annotated[
    bool,
    typer.Option(
        "--offload-activations",
        help="The same, with the inputs of blocks in host memory until then.",
        rich_help_panel=TRAINING,
    ),
]
Listing = Annotated[bool, typer.Option("--list", help="List the models that have a name, and exit.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def precision(choices: Sequence[str], about: str) -> Any:
    """The typer option for the dtype of compute."""
    return typer.Option(
        "--precision",
        metavar="|".join(choices),
        callback=one_of("--precision", choices),
        help=about,
        rich_help_panel=TRAINING,
    )
