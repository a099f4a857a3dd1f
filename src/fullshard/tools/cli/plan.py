"""`fullshard plan`."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fullshard.byte_sizes import parse_size
from fullshard.errors import OptionError
from fullshard.option_table import STRATEGIES, TABLE
from fullshard.tools.cli.commands import Command
from fullshard.tools.cli.printing import as_json_text, table
from fullshard.tools.cli.shared import (
    CHOICE,
    CLUSTER,
    OFFLOAD,
    TRAINING,
    AsJson,
    CheckpointActivations,
    HostLink,
    Listing,
    NodeRanks,
    OffloadActivations,
    Ranks,
)
from fullshard.tools.cli.shared import precision as precision_option
from fullshard.tools.cli.values import choice, one_of

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fullshard.planning.adapters import Adapters
    from fullshard.planning.answers import Answer, Question
    from fullshard.planning.machines import Machine
    from fullshard.planning.needs import Need
    from fullshard.planning.offloading import Request
    from fullshard.planning.subjects import Subject
    from fullshard.planning.transfers import Transfers


def _plan(
    context: typer.Context,
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
    memory: Annotated[
        str | None,
        typer.Option("--memory", metavar="SIZE", help="Memory of one device (that of --gpu, or 80GiB)."),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            "--gpu",
            metavar="NAME",
            help="A card by its public figures: h100, h200, a100-80, l40s, rtx4090, mi300x, ... With it, or "
            "after fullshard env --rates, times are printed.",
            rich_help_panel=CLUSTER,
        ),
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(
            "--link",
            metavar="RATE",
            help="Of each rank to other nodes, one way: 50GB/s. Without --node-ranks, between all ranks.",
            rich_help_panel=CLUSTER,
        ),
    ] = None,
    inside: Annotated[
        str | None,
        typer.Option("--inside", metavar="RATE", help="The same inside a node.", rich_help_panel=CLUSTER),
    ] = None,
    choose: Annotated[
        bool,
        typer.Option(
            "--choose",
            help="Choose the fastest settings that fit, and show why others are not.",
            rich_help_panel=CHOICE,
        ),
    ] = False,
    save: Annotated[
        str | None,
        typer.Option(
            "--save",
            metavar="FILE",
            help="Write the choice to a file, for fs.shard(model, plan=FILE).",
            rich_help_panel=CHOICE,
        ),
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            "--allow",
            metavar="int8|int8-across",
            help="With --choose: 8 bits on the wire, everywhere or between nodes, which changes numbers; may "
            "be repeated.",
            rich_help_panel=CHOICE,
        ),
    ] = None,
    global_batch: Annotated[
        int | None,
        typer.Option(
            "--global-batch",
            metavar="N",
            help="Sequences of all ranks per step: micro-batches are chosen.",
            rich_help_panel=CHOICE,
        ),
    ] = None,
    smallest_ranks: Annotated[
        bool,
        typer.Option(
            "--smallest-ranks",
            help="The smallest number of devices on which the model trains, in entire nodes beyond one.",
            rich_help_panel=CHOICE,
        ),
    ] = False,
    largest_batch: Annotated[
        bool,
        typer.Option("--largest-batch", help="The most sequences per rank that fit.", rich_help_panel=CHOICE),
    ] = False,
    train_tokens: Annotated[
        str | None,
        typer.Option(
            "--train-tokens", metavar="N", help="How long these take: 300B, 2T.", rich_help_panel=CHOICE
        ),
    ] = None,
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
    state: Annotated[str, choice("state", TRAINING)] = TABLE["state"].default,
    offload: Annotated[
        str | None,
        typer.Option(
            "--offload",
            metavar="host|optimizer|auto",
            callback=one_of("--offload", ("host", "optimizer", "auto")),
            help="What may rest in host memory: everything, what only the optimizer needs, or what does not "
            "fit on the device (auto, the default with --host-memory).",
            rich_help_panel=OFFLOAD,
        ),
    ] = None,
    one_backward: Annotated[
        bool,
        typer.Option(
            "--one-backward",
            help="One rank, whose steps have one backward each: bf16 gradients rest as they were computed.",
            rich_help_panel=OFFLOAD,
        ),
    ] = False,
    split_masters: Annotated[
        bool,
        typer.Option(
            "--split-masters",
            help="Masters on the host rest as what restores them from bf16 shards, in 2 bytes instead of 4.",
            rich_help_panel=OFFLOAD,
        ),
    ] = False,
    overlap: Annotated[
        bool,
        typer.Option(
            "--overlap",
            help="The optimizer's step goes on beside the next forward.",
            rich_help_panel=OFFLOAD,
        ),
    ] = False,
    slabs: Annotated[
        str | None,
        typer.Option(
            "--slabs",
            metavar="SIZE",
            help="With --overlap: device memory for chunks of a step, which move beside backward, too.",
            rich_help_panel=OFFLOAD,
        ),
    ] = None,
    host_memory: Annotated[
        str | None,
        typer.Option(
            "--host-memory",
            metavar="SIZE",
            help="Memory of one host, which its ranks share (--node-ranks; without it all).",
            rich_help_panel=OFFLOAD,
        ),
    ] = None,
    disk: Annotated[
        str | None,
        typer.Option(
            "--disk", metavar="SIZE", help="Disk of one host, for what exceeds that.", rich_help_panel=OFFLOAD
        ),
    ] = None,
    host_link: HostLink = None,
    disk_link: Annotated[
        str | None,
        typer.Option(
            "--disk-link",
            metavar="RATE",
            help="Of a host's disk (reads 3.7GB/s, writes 1.8GB/s).",
            rich_help_panel=OFFLOAD,
        ),
    ] = None,
    flops: Annotated[
        str | None,
        typer.Option(
            "--flops", metavar="RATE", help="That one device reaches: 400TFLOP/s.", rich_help_panel=OFFLOAD
        ),
    ] = None,
    json: AsJson = False,
) -> int:
    if sizes:
        return _list(json)
    if model is None:
        raise OptionError("no model was given", "Pass one; fullshard plan --list shows the sizes.")
    from fullshard.planning.answers import Question, answer

    _refuse_ignored(
        {
            "--smallest-ranks": smallest_ranks,
            "--largest-batch": largest_batch,
            "--choose": choose,
            "--save": save,
            "--global-batch": global_batch,
            "--allow": allow,
            "--train-tokens": train_tokens,
            "--batch": batch,
            "--flops": flops,
            "--ranks": _is_given(context, "ranks"),
            "--one-backward": one_backward,
            "--split-masters": split_masters,
            "--overlap": overlap,
            "--slabs": slabs,
        }
    )
    tokens = _count(train_tokens)
    timed = (gpu, link, inside, train_tokens, global_batch, save, allow)
    wanted = choose or smallest_ranks or any(value is not None for value in timed)
    machine = _machine(gpu, link, inside, node_ranks, wanted)
    question = Question(
        ranks=(node_ranks or 1) if smallest_ranks else ranks,
        memory_bytes=_memory(memory, gpu, machine),
        strategies=_strategies(strategy, node_ranks),
        precision=precision,
        optimizer=optimizer,
        recompute="offload" if offload_activations else checkpoint_activations,
        node_ranks=node_ranks,
        accumulate=accumulate,
        spare=spare / 100,
        adapters=_adapters(lora, lora_targets, base_dtype or precision, base_dtype is not None),
        offload=_offload(
            offload,
            host_memory,
            disk,
            (host_link, disk_link),
            flops,
            machine,
            slabs,
            one_backward=one_backward,
            split_masters=split_masters,
            overlap=overlap,
        ),
        machine=machine,
        state=state,
    )
    if choose or smallest_ranks or largest_batch or save or global_batch is not None:
        from fullshard.tools.cli import plan_choice

        request = plan_choice.Request(
            question,
            partial(_subject, model),
            batch,
            sequence,
            None if strategy is None else tuple(strategy),
            tuple(allow or ()),
            global_batch,
            tokens,
        )
        if largest_batch:
            return plan_choice.largest_batch(request, json)
        if smallest_ranks:
            return plan_choice.smallest_ranks(request, save, json)
        return plan_choice.choose(request, save, json)
    result = answer(_subject(model, batch, sequence), question)
    if json:
        as_json_text(_as_json(result, tokens))
    else:
        _print(result)
        _print_times(result, tokens)
    return 0 if result.best is not None else 1


# Options that a question does not read, with what to do instead. A question is asked by the first of these
# options that is given, in this order; without any of them strategies are compared.
_CHOOSING = ("--choose", "--save", "--global-batch")
_FORMS = dict.fromkeys(
    ("--one-backward", "--split-masters", "--overlap", "--slabs"),
    "Leave it out here, and plan with it what was chosen.",
)
_IGNORED: dict[str, dict[str, str]] = {
    "--largest-batch": {
        "--smallest-ranks": "Ask one after the other: --smallest-ranks, then --ranks N --largest-batch.",
        "--choose": "Leave out --choose, or --largest-batch: --choose tries growing batches.",
        "--save": "Leave it out, or write --choose --save FILE.",
        "--global-batch": "Leave it out, or write --choose --global-batch N.",
        "--allow": "Leave it out, or write --choose --allow.",
        "--train-tokens": "Leave it out, or write --batch N --train-tokens.",
        "--batch": "Leave it out: the batch is what is looked for.",
        "--flops": "Leave it out: --gpu has the rates.",
    },
    "--smallest-ranks": {
        "--global-batch": "Leave it out, or give --ranks N and --choose.",
        "--train-tokens": "Leave it out, or give --ranks N and --choose.",
        "--flops": "Leave it out: --gpu has the rates.",
        "--ranks": "Leave it out: the number of ranks is what is looked for; or give --ranks N and --choose.",
        **_FORMS,
    },
    "--choose": {"--flops": "Leave it out: --gpu has the rates.", **_FORMS},
    "": {"--allow": "Write --choose --allow, or leave it out."},
}


def _is_given(context: typer.Context, parameter: str) -> bool:
    """On the command line, not by default."""
    source = context.get_parameter_source(parameter)
    return source is not None and source.name != "DEFAULT"


def _refuse_ignored(given: dict[str, Any]) -> None:
    """Rather than answer without an option that was given."""
    are_given = [name for name, value in given.items() if value is not None and value is not False]
    asked = next((name for name in ("--largest-batch", "--smallest-ranks") if name in are_given), "")
    if not asked and any(name in are_given for name in _CHOOSING):
        asked = "--choose"
    for name in are_given:
        if name in _IGNORED[asked]:
            what = f"{name} and {asked} do not go together" if asked else f"{name} is for --choose"
            raise OptionError(what, _IGNORED[asked][name])


def _memory(given: str | None, gpu: str | None, machine: Machine | None) -> int:
    if given is not None:
        return parse_size(given, "--memory", "Write it as 24GiB or 80GB.")
    if gpu is not None and machine is not None:
        return machine.device.memory_bytes
    return 80 * 2**30


def _machine(
    gpu: str | None, link: str | None, inside: str | None, node_ranks: int | None, wanted: bool
) -> Machine | None:
    """The machine to time steps on: a card, this one if it was measured, or a common one if one is needed."""
    from dataclasses import replace

    from fullshard.planning.machines import described
    from fullshard.planning.network import INSIDE_HOP_S, Link, bandwidth
    from fullshard.planning.rates import remembered_gpu

    machine = described(gpu) if gpu is not None else remembered_gpu()
    if machine is None and not wanted:
        return None
    machine = machine or described("h100")
    if link is not None:
        across = Link(bandwidth(link))
        flat = node_ranks is None
        machine = replace(machine, inside=across) if flat else replace(machine, across=across)
    if inside is not None:
        if node_ranks is None:
            raise OptionError("--inside is the link inside a node", "Give --node-ranks, or --link alone.")
        machine = replace(machine, inside=Link(bandwidth(inside), INSIDE_HOP_S))
    return machine


def _count(text: str | None) -> float | None:
    """'2T' tokens as a number."""
    if text is None:
        return None
    scales = {"K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
    scale = scales.get(text[-1:].upper(), 1.0)
    try:
        value = float(text[:-1] if scale != 1.0 else text) * scale
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise OptionError(f"--train-tokens is {text!r}", "Write it as 300B or 2T.")
    return value


def _adapters(rank: int | None, targets: str | None, base_dtype: str, given: bool) -> Adapters | None:
    from fullshard.planning.adapters import ALL, Adapters

    if rank is not None:
        return Adapters(rank, targets or ALL, base_dtype)
    if targets is not None or given:
        option = "--lora-targets" if targets is not None else "--base-dtype"
        raise OptionError(f"{option} is for --lora", "Give the rank of the adapters: --lora 16.")
    return None


def _offload(
    how: str | None,
    host: str | None,
    disk: str | None,
    links: tuple[str | None, str | None],
    flops: str | None,
    machine: Machine | None,
    slabs: str | None,
    **forms: bool,
) -> Request | None:
    """`forms`: fields of fs.Offload that are chosen or not."""
    from fullshard.planning.network import bandwidth, flop_rate
    from fullshard.planning.offloading import Request
    from fullshard.planning.transfers import Rates

    if how is None and host is None:
        given = {"--disk": disk, "--host-link": links[0], "--disk-link": links[1], "--flops": flops}
        given |= {"--slabs": slabs, **{f"--{name.replace('_', '-')}": "" for name in forms if forms[name]}}
        for option in (name for name, value in given.items() if value is not None):
            raise OptionError(f"{option} is for --offload", "Give --offload host, or --host-memory.")
        return None
    rates = Rates() if machine is None else machine.host
    if links[0] is not None:
        rates = rates.with_link(bandwidth(links[0]))
    if links[1] is not None:
        rates = rates.with_disk(bandwidth(links[1]))
    remedy = "Write it as 512GiB or 2TB."
    return Request(
        how or "auto",
        None if host is None else parse_size(host, "--host-memory", remedy),
        None if disk is None else parse_size(disk, "--disk", remedy),
        rates,
        None if flops is None else flop_rate(flops),
        slabs=None if slabs is None else parse_size(slabs, "--slabs", "Write it as 8GiB or 6GB."),
        **forms,
    )


def _strategies(names: list[str] | None, node_ranks: int | None) -> tuple[str, ...]:
    check = one_of("--strategy", STRATEGIES)
    for name in names or ():
        check(name)
    if names:
        return tuple(dict.fromkeys(names))
    return tuple(name for name in STRATEGIES if name != "hybrid" or node_ranks is not None)


def _subject(name: str, batch: int | None, sequence: int | None) -> Subject:
    from fullshard.planning.subjects import META, Batch, Subject, as_units_get, find

    if ":" not in name:
        return find(name, Batch(1 if batch is None else batch, sequence))
    if batch is not None or sequence is not None:
        raise OptionError(f"{name!r} returns its own batch", "Leave out --batch and --sequence.")
    from fullshard.tools.simulation.models import subject

    simulated = subject(name, None, 2)

    def run(model: nn.Module) -> tuple[Tensor, Any]:
        out = simulated.output(model, as_units_get(simulated.batch(META), model))
        return simulated.loss_in(out), out

    return Subject(
        name,
        lambda: simulated.build().to(META),
        run,
        "its own batch per rank",
        "the model that the function returns",
        source="function",
    )


def _sizes() -> list[str]:
    from fullshard.planning.sizes import SIZES

    return list(SIZES)


def _list(json: bool) -> int:
    from fullshard.planning.sizes import SIZES

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
    parts = [one.parameters, one.gradients, one.optimizer, one.rest, one.full, one.sending, one.activations]
    if one.resting is not None:
        parts.insert(4, one.slabs)
    return (one.strategy, *map(_gib, (*parts, one.peak)), _fits(result, one), one.moment)


def _fits(result: Answer, one: Need) -> str:
    from fullshard.planning.offloading import shortage

    if result.fits(one):
        return "yes"
    if one.peak > result.question.room_bytes or result.question.offload is None:
        return "no"
    return f"no: {shortage(one, result.question.offload)}"


def _print(result: Answer) -> None:
    question = result.question
    more = ", activations recomputed" if question.recompute else ""
    more += " from inputs in host memory" if question.recompute == "offload" else ""
    more += ", inside fs.accumulate" if question.accumulate else ""
    more += f", {question.state} optimizer state" if question.state != "exact" else ""
    if question.adapters is not None:
        more += f", LoRA of rank {question.adapters.rank} on {question.adapters.targets}"
        more += f" ({result.num_trainable:,} parameters train), base in {question.adapters.base_dtype}"
    print(
        f"{result.subject.name}: {result.num_parameters:,} parameters; {question.ranks} ranks of "
        f"{_gib(question.memory_bytes)} GiB; {question.precision}, {question.optimizer}, "
        f"{result.subject.batch}{more}\n{_note(result.subject)}GiB per rank, from one step of "
        f"{result.subject.traced}:\n"
    )
    head = [
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
    ]
    if question.offload is not None:
        head.insert(5, "slabs")
    styles = ["green" if result.fits(one) else "red" for one in result.needs]
    table(head, [_row(result, one) for one in result.needs], styles, left=(0, len(head) - 1))
    print(
        f"\nActivations: {_gib(result.saved_bytes)} saved by the blocks, {_gib(result.loss_bytes)} more for "
        f"logits, loss and temporaries.\n{_in_host(result)}{_returned(result)}"
        "Full values, gradients in flight and activations are those of the worst moment. A strategy fits\n"
        f"if its peak leaves {question.spare:.0%} of the memory free."
    )
    if question.offload is not None:
        _print_homes(result, question.offload)
    best = result.best
    if best is not None and question.offload is not None:
        print(
            f"\n{best.strategy} fits, and of those that fit moves and sends least: {_gib(best.peak)} of "
            f"{_gib(question.memory_bytes)} GiB at the peak ({best.moment})."
        )
    elif best is not None and best.times is not None:
        print(
            f"\n{best.strategy} fits, and is the fastest of those that fit: {_gib(best.peak)} of "
            f"{_gib(question.memory_bytes)} GiB at the peak ({best.moment})."
        )
    elif best is not None:
        print(
            f"\n{best.strategy} fits, and sends least of those that fit: {_gib(best.peak)} of "
            f"{_gib(question.memory_bytes)} GiB at the peak ({best.moment})."
        )
    else:
        print("\nNothing fits.\n" + "\n".join(result.advice))


def _note(subject: Subject) -> str:
    return f"{subject.note}\n" if subject.note else ""


def _in_host(result: Answer) -> str:
    if not result.host_bytes:
        return ""
    return f"Inputs of blocks take {_gib(result.host_bytes)} of host memory per rank.\n"


def _print_homes(result: Answer, request: Request) -> None:
    """Where values rest with the best strategy, what a step moves, and how long that takes."""
    one = result.best or next((one for one in result.needs if one.strategy == "zero3"), result.needs[-1])
    ranks = result.question.host_ranks
    host = f"host of {ranks} ranks" if ranks > 1 else "host of one rank"
    print(f"\nAt rest with {one.strategy}, GiB per rank and per {host}:\n")
    head = "home", "compute", "masters", "gradients", "state", "rank", "host", "of"
    table(head, _home_rows(one, request))
    if one.resting is not None and one.resting.disk_buffer_bytes:
        buffers = _gib(one.resting.disk_buffer_bytes)
        print(f"\nBuffers between disk and device take {buffers} of host memory per rank.")
    if one.transfers is not None and any(vars(one.transfers).values()):
        _print_transfers(result, one, one.transfers, request)
    if result.best is not None:
        print(f"\nIn a script: fs.shard(model, {_as_options(result.question, one, request)})")


def _as_options(question: Question, one: Need, request: Request) -> str:
    """Keyword arguments of fs.shard for what was planned."""
    from fullshard.planning.offloading import as_option

    options: dict[str, Any] = {"strategy": one.strategy, "precision": question.precision}
    if question.recompute:
        options["checkpoint_activations"] = question.recompute
    if question.state != "exact":
        options["state"] = question.state
    written = [f"{name}={value!r}" for name, value in options.items()]
    return ", ".join([*written, f"offload={as_option(one, request)}"])


def _home_rows(one: Need, request: Request) -> list[tuple[str, ...]]:
    from fullshard.plan.homes import KINDS, PLACES

    resting = one.resting
    assert resting is not None
    together = {"device": "", "host": _gib(resting.host_bytes), "disk": _gib(resting.disk_bytes)}
    limits = {"device": 0, "host": request.host_bytes, "disk": request.disk_bytes}
    rows = []
    for place in PLACES:
        each = [resting.bytes_at(place, kind) for kind in KINDS]
        limit = limits[place]
        shown = "" if place == "device" else "no limit" if limit is None else _gib(limit)
        if place != "disk" or limit is not None:
            rows.append((place, *map(_gib, each), _gib(sum(each)), together[place], shown))
    return rows


def _print_transfers(result: Answer, one: Need, moved: Transfers, request: Request) -> None:
    from fullshard.planning.offloading import ASSUMED_FLOPS
    from fullshard.planning.transfers import waited_s

    rates, ranks = request.rates, result.question.host_ranks
    pass_s, step_s = moved.pass_s(rates, ranks), moved.step_s(rates, ranks)
    passes = moved.pass_up, moved.pass_down, moved.pass_read, 0
    steps = moved.step_up, moved.step_down, moved.step_read, moved.step_written
    disk = f"; a host's disk reads {rates.disk_read / 1e9:g} and writes {rates.disk_write / 1e9:g} GB/s"
    print(
        f"\nMoved per rank and step, GiB. A device and its host exchange {rates.link_one_way / 1e9:g} GB/s "
        f"one way,\n{rates.link_each_way / 1e9:g} each way at once{disk if moved.step_read else ''}.\n"
    )
    rows = [
        ("forward and backward", *map(_gib, passes), f"{pass_s:.3f}"),
        ("optimizer step", *map(_gib, steps), f"{step_s:.3f}"),
    ]
    table(("", "to the device", "from it", "from disk", "to disk", "seconds"), rows)
    flops = request.flops or ASSUMED_FLOPS
    compute_s, rate = result.flop / flops, f"{flops / 1e12:g} TFLOP/s per rank"
    if request.flops is not None:
        assert one.resting is not None
        forward_s, backward_s = result.flop_of("forward") / flops, result.flop_of("backward") / flops
        least_s = max(compute_s, pass_s) + waited_s(step_s, one.resting, forward_s, backward_s)
        print(f"\nComputing takes {compute_s:.3f} s at {rate}: a step takes at least {least_s:.3f} s.")
    if result.subject.tokens and pass_s:
        tokens = f"{pass_s / compute_s * result.subject.tokens:,.0f}"
        print(
            f"\nAt {rate}, forward and backward compute for longer than they move from\n"
            f"about {tokens} tokens per rank and step on."
        )


def _print_times(result: Answer, train_tokens: float | None) -> None:
    """How long a step takes with each strategy; with the best one also the run and its checkpoints."""
    from fullshard.planning.runs import run_of
    from fullshard.planning.settings import seconds

    machine, network = result.question.machine, result.question.network
    if machine is None:
        return
    print(f"\nTime per step ({machine.source}; {network}):\n")
    rows = []
    for one in result.needs:
        times = one.times
        assert times is not None
        run = run_of(result, one, train_tokens)
        shown = (times.step_s, times.compute_s, times.inside_s, times.across_s, times.exposed_s)
        tokens = "" if run.tokens_s is None else f"{run.tokens_s:,.0f}"
        rows.append((one.strategy, *map(seconds, shown), tokens, f"{run.tflop_s:.0f}", times.bound))
    head = (
        "strategy",
        "step",
        "computing",
        "inside",
        "between nodes",
        "exposed",
        "tokens/s",
        "TFLOP/s",
        "bound by",
    )
    table(head, rows, left=(0, len(head) - 1))
    best = result.best
    if best is not None:
        print("\n" + "\n".join(run_of(result, best, train_tokens).lines))


def _returned(result: Answer) -> str:
    if result.returned_bytes < 2**20:  # a loss alone
        return ""
    return (
        f"What the model returns besides the loss ({_gib(result.returned_bytes)}) counts until the step is "
        "over, as with `out = model(...)`;\na loop that keeps only the loss needs that much less.\n"
    )


def _as_json(result: Answer, train_tokens: float | None) -> dict[str, Any]:
    question, request = result.question, result.question.offload
    flops = None if request is None else request.flops
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
        "state": question.state,
        "batch": result.subject.batch,
        "checkpoint_activations": question.recompute,
        "accumulate": question.accumulate,
        "node_ranks": question.node_ranks,
        "offload": None if request is None else asdict(request),
        "traced": result.subject.traced,
        "note": result.subject.note,
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
                **_homes_json(result, one),
            }
            for one in result.needs
        },
        "best": None if result.best is None else result.best.strategy,
        "advice": list(result.advice),
        **({} if flops is None else {"compute_s": result.flop / flops}),
        **_times_json(result, train_tokens),
    }


def _times_json(result: Answer, train_tokens: float | None) -> dict[str, Any]:
    from fullshard.planning.runs import run_of

    if result.question.machine is None:
        return {}
    times = {one.strategy: asdict(one.times) for one in result.needs if one.times is not None}
    best = result.best
    run = None if best is None else run_of(result, best, train_tokens).as_values()
    return {"machine": result.question.machine.source, "times": times, "run": run}


def _homes_json(result: Answer, one: Need) -> dict[str, Any]:
    from fullshard.plan.homes import KINDS, PLACES

    resting, request = one.resting, result.question.offload
    if resting is None or one.transfers is None or request is None:
        return {}
    ranks = result.question.host_ranks
    return {
        "slab_bytes": one.slabs,
        "homes": {place: {kind: resting.bytes_at(place, kind) for kind in KINDS} for place in PLACES},
        "host_bytes": resting.host_bytes,
        "disk_bytes": resting.disk_bytes,
        "disk_buffer_bytes": resting.disk_buffer_bytes,
        "device_budget_bytes": resting.budget.device,
        "moved_bytes_per_step": asdict(one.transfers),
        "pass_transfer_s": one.transfers.pass_s(request.rates, ranks),
        "step_transfer_s": one.transfers.step_s(request.rates, ranks),
    }


PLAN = Command(
    "plan",
    _plan,
    "predict memory and time of training, and choose the fastest settings that fit",
    """\
Nothing is downloaded and nothing is computed: the model is built on the meta device, and
one step of it is traced tensor by tensor. For each strategy it prints what a rank holds
  at rest      parameters, gradients and optimizer state, between steps
  at the peak  in addition, at the worst moment of a step: full values of the units in
               use, gradients in flight, activations, logits and loss

A config.json is built by transformers (the extra `hf`) as the class that its
`architectures` name, or else as one of its kind, and that is printed; a named size is a
decoder that computes as transformers does. What the model returns (its logits) counts
until the step is over. Attention counts as fused kernels compute it, if the model uses
them. Other models on the same device and what your own code keeps are not included.

Times come from the schedule that the engine runs, with the rates of a card (--gpu) or
those that fullshard env --rates measured here.""",
    """\
examples:
  fullshard plan --list
  fullshard plan llama-3-8b --ranks 8 --memory 80GiB --batch 2 --sequence 4096
  fullshard plan llama-3-70b --ranks 4 --memory 24GiB      exit code 1: it does not fit
  fullshard plan llama-3-70b --ranks 4 --memory 24GiB --checkpoint-activations \\
      --host-memory 512GiB --disk 2TiB                     some of it on the host and on disk
  fullshard plan llama-3-70b --ranks 2 --memory 48GiB --lora 16 --base-dtype nf4
  fullshard plan path/to/config.json --memory 24GiB --checkpoint-activations
  fullshard plan llama-3-70b --ranks 512 --node-ranks 8 --gpu h100 --link 50GB/s --choose \\
      --train-tokens 2T                                    settings, time, and days
  fullshard plan llama-3-8b --gpu rtx4090 --smallest-ranks
  fullshard plan llama-3-8b --gpu h100 --largest-batch
  fullshard plan my_model.py:make --ranks 2 --json | jq .strategies.zero3.peak_bytes

Exit code 0: a strategy fits, or settings, ranks or a batch that fit were found; 1: none,
and what would fit is printed; 2: invalid request.""",
    names=_sizes,
)
