"""`fullshard plan`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fullshard.byte_sizes import parse_size
from fullshard.errors import OptionError
from fullshard.option_table import STRATEGIES
from fullshard.tools.cli.commands import Command
from fullshard.tools.cli.printing import as_json_text, table
from fullshard.tools.cli.shared import (
    TRAINING,
    AsJson,
    CheckpointActivations,
    Listing,
    NodeRanks,
    OffloadActivations,
    Ranks,
)
from fullshard.tools.cli.shared import precision as precision_option
from fullshard.tools.cli.values import one_of

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fullshard.tools.planning.adapters import Adapters
    from fullshard.tools.planning.answers import Answer
    from fullshard.tools.planning.needs import Need
    from fullshard.tools.planning.subjects import Subject


def _plan(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A size from --list, a Hugging Face config.json or its folder, or FILE.py:FUNCTION "
            "that returns (model, batch).",
        ),
    ] = None,
    sizes: Listing = False,
    ranks: Ranks = 8,
    memory: Annotated[str, typer.Option("--memory", metavar="SIZE", help="Memory of one device.")] = "80GiB",
    spare: Annotated[
        float,
        typer.Option(
            "--spare",
            metavar="PERCENT",
            help="Memory reserved for CUDA, NCCL and fragmentation.",
        ),
    ] = 8.0,
    strategy: Annotated[
        list[str] | None,
        typer.Option("--strategy", metavar="|".join(STRATEGIES), help="Only this strategy; may be repeated."),
    ] = None,
    node_ranks: NodeRanks = None,
    precision: Annotated[
        str, precision_option(("bf16", "fp16", "fp32"), "Compute dtype; everything else is fp32.")
    ] = "bf16",
    batch: Annotated[
        int | None,
        typer.Option(
            "--batch", metavar="N", help="Sequences per rank and micro-batch (1).", rich_help_panel=TRAINING
        ),
    ] = None,
    sequence: Annotated[
        int | None,
        typer.Option(
            "--sequence",
            metavar="N",
            help="Tokens per sequence (the model's context, 4096 at most).",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    checkpoint_activations: CheckpointActivations = False,
    offload_activations: OffloadActivations = False,
    accumulate: Annotated[
        bool,
        typer.Option(
            "--accumulate", help="Several micro-batches inside fs.accumulate.", rich_help_panel=TRAINING
        ),
    ] = False,
    optimizer: Annotated[
        str,
        typer.Option(
            "--optimizer",
            metavar="NAME",
            help="adamw, fused-adamw, adam, rmsprop, adagrad, sgd-momentum or sgd.",
            rich_help_panel=TRAINING,
        ),
    ] = "adamw",
    lora: Annotated[
        int | None,
        typer.Option(
            "--lora",
            metavar="RANK",
            help="Only adapters of this rank train; the base is frozen.",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    lora_targets: Annotated[
        str | None,
        typer.Option(
            "--lora-targets",
            metavar="all-linear|attention|NAME,NAME",
            help="Linears that have an adapter (all-linear).",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    base_dtype: Annotated[
        str | None,
        typer.Option(
            "--base-dtype",
            metavar="fp32|bf16|fp16|nf4",
            callback=one_of("--base-dtype", ("fp32", "bf16", "fp16", "nf4")),
            help="Of the frozen base of --lora (as --precision); nf4 is QLoRA's.",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    json: AsJson = False,
) -> int:
    if sizes:
        return _list(json)
    if model is None:
        raise OptionError("no model was given", "Pass one; fullshard plan --list shows the sizes.")
    from fullshard.tools.planning.answers import Question, answer

    remedy = "Write it as 24GiB or 80GB."
    question = Question(
        ranks=ranks,
        memory_bytes=parse_size(memory, "--memory", remedy),
        strategies=_strategies(strategy, node_ranks),
        precision=precision,
        optimizer=optimizer,
        recompute="offload" if offload_activations else checkpoint_activations,
        node_ranks=node_ranks,
        accumulate=accumulate,
        spare=spare / 100,
        adapters=_adapters(lora, lora_targets, base_dtype or precision, base_dtype is not None),
    )
    result = answer(_subject(model, batch, sequence), question)
    if json:
        as_json_text(_as_json(result))
    else:
        _print(result)
    return 0 if result.best is not None else 1


def _adapters(rank: int | None, targets: str | None, base_dtype: str, given: bool) -> Adapters | None:
    from fullshard.tools.planning.adapters import ALL, Adapters

    if rank is not None:
        return Adapters(rank, targets or ALL, base_dtype)
    if targets is not None or given:
        option = "--lora-targets" if targets is not None else "--base-dtype"
        raise OptionError(f"{option} is for --lora", "Give the rank of the adapters: --lora 16.")
    return None


def _strategies(names: list[str] | None, node_ranks: int | None) -> tuple[str, ...]:
    check = one_of("--strategy", STRATEGIES)
    for name in names or ():
        check(name)
    if names:
        return tuple(dict.fromkeys(names))
    return tuple(name for name in STRATEGIES if name != "hybrid" or node_ranks is not None)


def _subject(name: str, batch: int | None, sequence: int | None) -> Subject:
    from fullshard.tools.planning.subjects import META, Batch, Subject, find

    if ":" not in name:
        return find(name, Batch(1 if batch is None else batch, sequence))
    if batch is not None or sequence is not None:
        raise OptionError(f"{name!r} returns its own batch", "Leave out --batch and --sequence.")
    from fullshard.tools.simulation.models import subject

    simulated = subject(name, None, 2)

    def run(model: nn.Module) -> tuple[Tensor, Any]:
        out = simulated.output(model, simulated.batch(META))
        return simulated.loss_in(out), out

    return Subject(
        name,
        lambda: simulated.build().to(META),
        run,
        "its own batch per rank",
        "the model that the function returns",
    )


def _sizes() -> list[str]:
    from fullshard.tools.planning.sizes import SIZES

    return list(SIZES)


def _list(json: bool) -> int:
    from fullshard.tools.planning.sizes import SIZES

    counts = {name: shape.num_parameters for name, shape in SIZES.items()}
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


def _row(result: Answer, one: Need) -> tuple[str, ...]:
    parts = (one.parameters, one.gradients, one.optimizer, one.rest, one.full, one.sending, one.activations)
    return (one.strategy, *map(_gib, (*parts, one.peak)), "yes" if result.fits(one) else "no", one.moment)


def _print(result: Answer) -> None:
    question = result.question
    more = ", activations recomputed" if question.recompute else ""
    more += " from inputs in host memory" if question.recompute == "offload" else ""
    more += ", inside fs.accumulate" if question.accumulate else ""
    if question.adapters is not None:
        more += f", LoRA of rank {question.adapters.rank} on {question.adapters.targets}"
        more += f" ({result.num_trainable:,} parameters train), base in {question.adapters.base_dtype}"
    print(
        f"{result.subject.name}: {result.num_parameters:,} parameters; {question.ranks} ranks of "
        f"{_gib(question.memory_bytes)} GiB; {question.precision}, {question.optimizer}, "
        f"{result.subject.batch}{more}\nGiB per rank, from one step of {result.subject.traced}:\n"
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
    styles = ["green" if result.fits(one) else "red" for one in result.needs]
    table(head, [_row(result, one) for one in result.needs], styles, left=(0, 10))
    print(
        f"\nActivations: {_gib(result.saved_bytes)} saved by the blocks, {_gib(result.loss_bytes)} more for "
        f"logits, loss and temporaries.\n{_in_host(result)}{_returned(result)}"
        "Full values, gradients in flight and activations are those of the worst moment. A strategy fits\n"
        f"if its peak leaves {question.spare:.0%} of the memory free."
    )
    best = result.best
    if best is not None:
        print(
            f"\n{best.strategy} fits, and sends least of those that fit: {_gib(best.peak)} of "
            f"{_gib(question.memory_bytes)} GiB at the peak ({best.moment})."
        )
    else:
        print("\nNothing fits.\n" + "\n".join(result.advice))


def _in_host(result: Answer) -> str:
    if not result.host_bytes:
        return ""
    return f"Inputs of blocks take {_gib(result.host_bytes)} of host memory per rank.\n"


def _returned(result: Answer) -> str:
    if result.returned_bytes < 2**20:  # a loss alone
        return ""
    return (
        f"What the model returns besides the loss ({_gib(result.returned_bytes)}) counts until the step is "
        "over, as with `out = model(...)`;\na loop that keeps only the loss needs that much less.\n"
    )


def _as_json(result: Answer) -> dict[str, Any]:
    question = result.question
    return {
        "model": result.subject.name,
        "parameters": result.num_parameters,
        "trainable_parameters": result.num_trainable,
        "lora": None if question.adapters is None else asdict(question.adapters),
        "ranks": question.ranks,
        "memory_bytes": question.memory_bytes,
        "room_bytes": question.room_bytes,
        "precision": question.precision,
        "optimizer": question.optimizer,
        "batch": result.subject.batch,
        "checkpoint_activations": question.recompute,
        "accumulate": question.accumulate,
        "node_ranks": question.node_ranks,
        "traced": result.subject.traced,
        "block_activation_bytes": result.saved_bytes,
        "loss_bytes": result.loss_bytes,
        "returned_bytes": result.returned_bytes,
        "host_bytes": result.host_bytes,
        "strategies": {
            one.strategy: {
                "fits": result.fits(one),
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
            for one in result.needs
        },
        "best": None if result.best is None else result.best.strategy,
        "advice": list(result.advice),
    }


PLAN = Command(
    "plan",
    _plan,
    "predict the memory that training needs per rank, and which strategies fit",
    """\
Nothing is downloaded and nothing is computed: the model is built on the meta device, and
one step of it is traced tensor by tensor. For each strategy it prints what a rank holds
  at rest      parameters, gradients and optimizer state, between steps
  at the peak  in addition, at the worst moment of a step: full values of the units in
               use, gradients in flight, activations, logits and loss

A config.json is built by transformers (the extra `hf`); a named size is a
decoder that computes as transformers does. What the model returns (its logits) counts
until the step is over. Attention counts as fused kernels compute it, if the model uses
them. Other models on the same device and what your own code keeps are not included.""",
    """\
examples:
  fullshard plan --list
  fullshard plan llama-3-8b --ranks 8 --memory 80GiB --batch 2 --sequence 4096
  fullshard plan llama-3-70b --ranks 4 --memory 24GiB      exit code 1: it does not fit
  fullshard plan llama-3-70b --ranks 2 --memory 48GiB --lora 16 --base-dtype nf4
  fullshard plan path/to/config.json --memory 24GiB --checkpoint-activations
  fullshard plan my_model.py:make --ranks 2 --json | jq .strategies.zero3.peak_bytes

Exit code 0: a strategy fits; 1: none does, and what would is printed; 2: invalid
request.""",
    names=_sizes,
)
