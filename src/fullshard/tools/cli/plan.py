"""`fullshard plan`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from fullshard.errors import OptionError
from fullshard.options import STRATEGIES
from fullshard.tools.cli.commands import Command
from fullshard.tools.cli.printing import as_json_text, table
from fullshard.tools.cli.values import one_of, size, switch

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fullshard.tools.planning.answers import Answer
    from fullshard.tools.planning.needs import Need
    from fullshard.tools.planning.subjects import Subject

_TRAINING = "The training"


def _plan(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A size that --list shows, a Hugging Face config.json or its folder, or FILE.py:FUNCTION "
            "that returns (model, batch).",
        ),
    ] = None,
    sizes: Annotated[bool, typer.Option("--list", help="List the sizes and exit.")] = False,
    ranks: Annotated[int, typer.Option("--ranks", metavar="N", help="Devices, all of them.")] = 8,
    memory: Annotated[str, typer.Option("--memory", metavar="SIZE", help="Of one device.")] = "80GiB",
    spare: Annotated[
        float,
        typer.Option(
            "--spare",
            metavar="PERCENT",
            help="Of the memory, for CUDA, NCCL and what the allocator cannot use.",
        ),
    ] = 8.0,
    strategy: Annotated[
        list[str] | None,
        typer.Option("--strategy", metavar="NAME", help="Only this one; may be repeated."),
    ] = None,
    node_ranks: Annotated[
        int | None, typer.Option("--node-ranks", metavar="N", help="Ranks of one node, for hybrid.")
    ] = None,
    precision: Annotated[
        str,
        typer.Option(
            "--precision",
            metavar="bf16|fp16|fp32",
            callback=one_of("--precision", ("bf16", "fp16", "fp32")),
            help="What computes; the rest is fp32.",
            rich_help_panel=_TRAINING,
        ),
    ] = "bf16",
    batch: Annotated[
        int | None,
        typer.Option(
            "--batch", metavar="N", help="Sequences a rank and micro-batch (1).", rich_help_panel=_TRAINING
        ),
    ] = None,
    sequence: Annotated[
        int | None,
        typer.Option(
            "--sequence",
            metavar="N",
            help="Tokens of a sequence (the model's context, 4096 at most).",
            rich_help_panel=_TRAINING,
        ),
    ] = None,
    checkpoint_activations: Annotated[
        bool,
        switch("checkpoint_activations", _TRAINING),
    ] = False,
    accumulate: Annotated[
        bool,
        typer.Option(
            "--accumulate", help="Several micro-batches inside fs.accumulate.", rich_help_panel=_TRAINING
        ),
    ] = False,
    optimizer: Annotated[
        str,
        typer.Option(
            "--optimizer",
            metavar="NAME",
            help="adamw, fused-adamw, adam, rmsprop, adagrad, sgd-momentum or sgd.",
            rich_help_panel=_TRAINING,
        ),
    ] = "adamw",
    json: Annotated[bool, typer.Option("--json", help="Print JSON, in bytes.")] = False,
) -> int:
    if sizes:
        return _list(json)
    if model is None:
        raise OptionError("no model was named", "Give one; fullshard plan --list shows the sizes.")
    from fullshard.tools.planning.answers import Question, answer

    remedy = "Write it as 24GiB or 80GB."
    question = Question(
        ranks=ranks,
        memory_bytes=size(memory, "--memory", remedy),
        strategies=_strategies(strategy, node_ranks),
        precision=precision,
        optimizer=optimizer,
        recompute=checkpoint_activations,
        node_ranks=node_ranks,
        accumulate=accumulate,
        spare=spare / 100,
    )
    found = answer(_subject(model, batch, sequence), question)
    if json:
        as_json_text(_as_json(found))
    else:
        _print(found)
    return 0 if found.best is not None else 1


def _strategies(said: list[str] | None, node_ranks: int | None) -> tuple[str, ...]:
    check = one_of("--strategy", STRATEGIES)
    for one in said or ():
        check(one)
    if said:
        return tuple(dict.fromkeys(said))
    return tuple(one for one in STRATEGIES if one != "hybrid" or node_ranks is not None)


def _subject(name: str, batch: int | None, sequence: int | None) -> Subject:
    from fullshard.tools.planning.subjects import META, Batch, Subject, find

    if ":" not in name:
        return find(name, Batch(1 if batch is None else batch, sequence))
    if batch is not None or sequence is not None:
        raise OptionError(f"{name!r} decides its own batch", "Leave out --batch and --sequence.")
    from fullshard.tools.simulation.models import subject

    theirs = subject(name, None, 2)

    def run(model: nn.Module) -> tuple[Tensor, Any]:
        out = theirs.output(model, theirs.batch(META))
        return theirs.loss_in(out), out

    return Subject(
        name,
        lambda: theirs.build().to(META),
        run,
        "its own batch a rank",
        "the model that the function returns",
    )


def _list(json: bool) -> int:
    from fullshard.tools.planning.decoder import num_parameters
    from fullshard.tools.planning.sizes import SIZES

    counts = {name: num_parameters(shape) for name, shape in SIZES.items()}
    if json:
        as_json_text(counts)
        return 0
    rows = []
    for name, shape in SIZES.items():
        count = counts[name]
        experts = f", {shape.experts} experts" if shape.experts else ""
        rows.append((name, f"{count:,}", f"{shape.layers} layers of width {shape.width}{experts}"))
    table(("size", "parameters", "shape"), rows, left=(0, 2))
    return 0


def _gib(num_bytes: int) -> str:
    if 0 < num_bytes < 2**30:
        return f"{num_bytes / 2**30:.3f}"
    return f"{num_bytes / 2**30:.1f}"


def _row(found: Answer, one: Need) -> tuple[str, ...]:
    parts = (one.parameters, one.gradients, one.optimizer, one.rest, one.full, one.sending, one.activations)
    return (one.strategy, *map(_gib, (*parts, one.peak)), "yes" if found.fits(one) else "no", one.moment)


def _print(found: Answer) -> None:
    question = found.question
    more = ", activations computed again" if question.recompute else ""
    more += ", inside fs.accumulate" if question.accumulate else ""
    print(
        f"{found.subject.name}: {found.num_parameters:,} parameters; {question.ranks} ranks of "
        f"{_gib(question.memory_bytes)} GiB; {question.precision}, {question.optimizer}, "
        f"{found.subject.batch}{more}\nGiB of one rank, from one step of {found.subject.traced}:\n"
    )
    head = (
        "strategy",
        "parameters",
        "gradients",
        "optimizer",
        "at rest",
        "full values",
        "sending",
        "activations",
        "peak",
        "fits",
        "worst moment",
    )
    styles = ["green" if found.fits(one) else "red" for one in found.needs]
    table(head, [_row(found, one) for one in found.needs], styles, left=(0, 10))
    print(
        f"\nActivations: {_gib(found.saved_bytes)} kept by the blocks, {_gib(found.loss_bytes)} more for "
        f"logits, loss and temporaries.\n{_returned(found)}Full values, gradients being sent and activations "
        "are those of the worst moment. A strategy fits\n"
        f"if its peak leaves {question.spare:.0%} of the memory."
    )
    best = found.best
    if best is not None:
        print(
            f"\n{best.strategy} fits, and of those that fit it sends least: {_gib(best.peak)} of "
            f"{_gib(question.memory_bytes)} GiB at the peak ({best.moment})."
        )
    else:
        print("\nNothing fits.\n" + "\n".join(found.advice))


def _returned(found: Answer) -> str:
    if found.returned_bytes < 2**20:  # a loss alone
        return ""
    return (
        f"What the model returns beside the loss ({_gib(found.returned_bytes)}) counts until the step is "
        "over, as with `out = model(...)`;\nwho keeps only the loss has that much more room.\n"
    )


def _as_json(found: Answer) -> dict[str, Any]:
    question = found.question
    return {
        "model": found.subject.name,
        "parameters": found.num_parameters,
        "ranks": question.ranks,
        "memory_bytes": question.memory_bytes,
        "room_bytes": question.room_bytes,
        "precision": question.precision,
        "optimizer": question.optimizer,
        "batch": found.subject.batch,
        "checkpoint_activations": question.recompute,
        "accumulate": question.accumulate,
        "node_ranks": question.node_ranks,
        "traced": found.subject.traced,
        "block_activation_bytes": found.saved_bytes,
        "loss_bytes": found.loss_bytes,
        "returned_bytes": found.returned_bytes,
        "strategies": {
            one.strategy: {
                "fits": found.fits(one),
                "parameter_bytes": one.parameters,
                "gradient_bytes": one.gradients,
                "optimizer_bytes": one.optimizer,
                "rest_bytes": one.rest,
                "full_bytes": one.full,
                "sending_bytes": one.sending,
                "activation_bytes": one.activations,
                "peak_bytes": one.peak,
                "peak_moment": one.moment,
                "sent_bytes_per_step": one.sent_bytes,
            }
            for one in found.needs
        },
        "best": None if found.best is None else found.best.strategy,
        "advice": list(found.advice),
    }


PLAN = Command(
    "plan",
    _plan,
    "say what training a model needs on each rank, and which strategies fit",
    """\
Nothing is downloaded and nothing is computed: the model is built without memory, and
one step of it is followed tensor by tensor. For each strategy it says what a rank holds
  at rest      parameters, gradients and optimizer state, between steps
  at the peak  beside that, at the worst moment of a step: full values of the units at
               work, gradients on their way, activations, logits and loss

A config.json is built by transformers (pip install 'fullshard[hf]'); a size by its name
is a decoder that computes as transformers does. What the model returns (its logits)
counts until the step is over, attention as fused kernels compute it where the model
asks for them. Other models on the same device and what your own code keeps do not count.""",
    """\
examples:
  fullshard plan --list
  fullshard plan llama-3-8b --ranks 8 --memory 80GiB --batch 2 --sequence 4096
  fullshard plan llama-3-70b --ranks 4 --memory 24GiB      exit code 1: it does not
  fullshard plan path/to/config.json --memory 24GiB --checkpoint-activations
  fullshard plan my_model.py:make --ranks 2 --json | jq .strategies.zero3.peak_bytes

Exit code 0: something fits; 1: nothing does, and it says what would; 2: what was asked
is wrong.""",
)
