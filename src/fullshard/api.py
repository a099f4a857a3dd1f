"""The public functions. They combine what the other modules do, and decide nothing themselves."""

from __future__ import annotations

import functools
import hashlib
import json
import sys
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard import environment, model_libraries
from fullshard.build import build, free_memory
from fullshard.comm import control, groups, topology
from fullshard.comm.groups import Comm
from fullshard.engine import penalties
from fullshard.engine.inference import Kept
from fullshard.engine.inference_scope import inferring
from fullshard.engine.runtime import Runtime, engine_of, is_sharded, runtime_of
from fullshard.errors import FullshardError, ModelError, OptionError, RankMismatch, StateError, unit_label
from fullshard.keywords import checked_keywords
from fullshard.offload import Offload
from fullshard.option_table import OTHER_NAMES, TABLE
from fullshard.options import Options, parse
from fullshard.plan import tensor_parallel
from fullshard.plan.plan import Plan, make_plan, planned_levels
from fullshard.plan.units import Unit, find_units
from fullshard.planning import shortage
from fullshard.planning.settings import BY_NAME
from fullshard.policy import NO_INTEGRATION, Integration
from fullshard.precision import Precision

M = TypeVar("M", bound=nn.Module)
Batch = TypeVar("Batch")
F = TypeVar("F", bound=Callable[..., Any])

model_libraries.register()


class _Beside(NamedTuple):
    """What was given for `plan`, and the names of the options that were given with it."""

    plan: Any
    names: frozenset[str]


def _beside_plan(function: F) -> F:
    """A plan leaves options as they are that were given, though they may be equal to their defaults."""

    @functools.wraps(function)
    def call(*args: Any, **given: Any) -> Any:
        chosen = {name for name, value in given.items() if not (isinstance(value, str) and value == "auto")}
        if given.get("plan") is not None or chosen != given.keys():
            given["plan"] = _Beside(given.get("plan"), frozenset(chosen))
        return function(*args, **given)

    return call  # type: ignore[return-value]


def _with_names(plan: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    if isinstance(plan, _Beside):
        return plan.plan, {**given, BY_NAME: plan.names}
    return plan, given


@checked_keywords(OTHER_NAMES)
@_beside_plan
def shard(
    model: M,
    *,
    strategy: str = "zero3",
    precision: str | Precision = "fp32",
    mesh: DeviceMesh | None = None,
    units: Any = None,
    checkpoint_activations: bool | Literal["offload"] = False,
    ignore: Any = (),
    initial: str = "broadcast",
    materialize: Callable[[nn.Module], Any] | None = None,
    device: torch.device | str | int | None = None,
    offload: str | Offload | None = None,
    state: str = "exact",
    check_gradients: bool = False,
    prefetch: bool = True,
    keep_full: int | str | None = None,
    keep_node: int | str | None = None,
    merge_units: int | None = None,
    reduce: str = "auto",
    optimizer_step: str = "auto",
    plan: Any = None,
) -> M:
    """Shard `model` in place over all ranks and return it. If it raises, the module is as it was.

    strategy: 'zero3' (default), 'zero2', 'zero1', 'replicate', or 'hybrid' (shard inside, replicate across).
    precision: 'fp32', 'bf16', 'fp16', or an fs.Precision.
    mesh: a torch DeviceMesh; axes 'replicate' and 'shard' for hybrid; None is all ranks. For a model that is
        tensor-parallel already, its other axis: mesh['dp'], or the entire mesh, if its axes have names.
    units: None finds them; or module classes; or a function of a module that returns a bool.
    checkpoint_activations: recompute the activations of each block in backward; 'offload' keeps the inputs of
        blocks in host memory until then.
    ignore: modules, parameters or names that stay as they are on every rank, unsynchronised.
    initial: 'broadcast' gives every rank the first rank's values; 'verify' raises if ranks differ.
    materialize: for a meta-device model, a function that initialises one module's own tensors.
    device: where shards and buffers go, unit by unit, so that no device holds all of a model that was built
        on the host: 'cuda' is this rank's GPU. None is where the model is; for a meta model the GPU.
    offload: 'host' keeps shards, gradients and optimizer state in host memory between their uses; 'optimizer'
        only what the optimizer alone needs: masters and its state; 'auto' what does not fit on the device; or
        an fs.Offload.
    state: 'exact' keeps an optimizer's state as the optimizer makes it; '8bit' keeps it in 8-bit blocks
        between steps, about a quarter of its bytes. Parameters stay as they are.
    check_gradients: raise on all ranks when a gradient is not finite, naming rank and parameter.
    prefetch: gather the next unit while this one computes.
    keep_full: bytes of full values that zero3 and hybrid may keep from forward to backward, which saves each
        kept unit its second gather; 'all', or 0 for none. None keeps what backward needs first.
    keep_node: bytes of its node's share of values that a rank may keep from forward to backward, where ranks
        are on several nodes: backward then gathers inside the node only; 'all', or 0 for none. None keeps up
        to half of what the rank holds anyway.
    merge_units: bytes up to which neighbouring small blocks share a unit, and below which a small model is
        one unit; 0 keeps one unit per block; None chooses by device. Units that `units` picks are not merged.
    reduce: 'exchange' sends gradients all-to-all and their owners sum them in fp32; 'scatter' sends fp32,
        summed on the way by the backend; 'auto' takes the one that sends less between nodes; 'fixed' sums the
        micro-batches of fs.Batches in one order: the same bits on any number of ranks.
    optimizer_step: 'element-wise' steps on shards; 'owned' on entire tensors, each on one rank; 'gathered' on
        all of them on every rank; 'auto' finds out whether an optimizer is element-wise or looks at tensors
        one by one.
    plan: 'auto' chooses the fastest settings that fit: strategy, checkpoint_activations, offload, keep_full
        and keep_node, unless they are given; an fs.Planning has the batch and the machine to plan for; a
        recorded plan, or its file, is used again.
    """
    given = {name: value for name, value in locals().items() if name != "model"}
    return shard_with(NO_INTEGRATION, model, **given)


def _move_rest(model: nn.Module, runtime: Runtime, device: torch.device) -> None:
    """State of modules that is neither parameter nor buffer, such as a metric's sums. Shards are in place."""
    at_rest = {id(p) for lane in runtime.lanes for p in lane.parameters}
    apply: Callable[..., Any] = model._apply
    apply(lambda tensor: tensor if id(tensor) in at_rest else tensor.to(device))


def shard_with(integration: Integration, model: M, mesh: DeviceMesh | None = None, **given: Any) -> M:
    """`shard` for an integration, with its policies. `given` are options of `shard`."""
    control.start()
    topology.refuse_outsider(mesh)
    given, choice = _planned(model, mesh, given)
    request: _Request | None = None
    problem: FullshardError | None = None
    grid: torch.Tensor | None = None
    tp_ranks: list[int] | None = None
    place: topology.Place | None = None
    try:
        place = topology.own_place()
        grid, tp_ranks = _ranks(model, mesh, given.get("strategy", TABLE["strategy"].default))
        request = _examine(model, parse(integration=integration, **given), grid)
        if tp_ranks is not None and request.options.reduce == "fixed":
            raise OptionError(
                "reduce='fixed' for a tensor-parallel model, whose sums inside a layer depend on the ranks",
                "Leave out reduce=.",
            )
    except FullshardError as error:
        problem = error
    except Exception as error:  # noqa: BLE001  a user's function, here or in the model: all ranks must know
        problem = ModelError(f"{type(error).__name__} while looking at the model: {error}", "See its cause.")
        problem.__cause__ = error
    control.raise_together_first(problem, grid, tp_ranks)
    assert request is not None
    assert place is not None
    device = request.device
    arrangement = _arranged(request, place, topology.names_nodes(mesh))
    options = _with_levels(request.options, arrangement, device)
    if device.type == "cuda":
        environment.let_segments_grow()
    comm = Comm(device, arrangement)
    if tp_ranks is not None:
        comm.join(control.World(comm, tp_ranks))
    _agree_on_model(comm, model, request.units, options)
    runtime = build(model, request.units, comm, options)
    runtime.plan = replace(runtime.plan, choice=choice)
    shortage.watch(runtime)
    if request.moves:
        _move_rest(model, runtime, device)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # it held the unsharded model until now
    return model


def _planned(model: nn.Module, mesh: DeviceMesh | None, given: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """Options with what a plan chooses, the same on all ranks, and the choice; or as they are."""
    plan, given = _with_names(given.get("plan"), given)
    by_strategy = isinstance(given.get("strategy"), str) and given["strategy"] == "auto"
    given = {name: value for name, value in given.items() if name != "plan"}
    if by_strategy:
        plan = "auto" if plan is None else plan
        given["strategy"] = TABLE["strategy"].default
    if plan is None:
        given.pop(BY_NAME, None)
        return given, None
    from fullshard.planning import automatic

    choice: Any = None
    problem: FullshardError | None = None
    members = topology.members(mesh)
    try:
        choice = automatic.record_of(TABLE["plan"].parsed(plan))
    except FullshardError as error:
        problem = error
    control.raise_together_first(problem, members)
    if choice is None:
        choice = _agreed_choice(model, plan, given, members)
    return automatic.arguments_of(choice, given), choice


def _agreed_choice(model: nn.Module, plan: Any, given: dict[str, Any], members: torch.Tensor) -> Any:
    """Made by the first rank, from the least memory that any rank has, and sent to all."""
    from fullshard.planning import automatic, rates
    from fullshard.planning.machines import described
    from fullshard.planning.request import request_of
    from fullshard.planning.settings import Choice

    ranks = sorted(members.flatten().tolist())
    places = topology.places_without_peers(ranks)
    text, problem = "", None
    try:
        device = environment.compute_device(_given_device(model, given))
        free = free_memory(device)
        own = sum(p.nbytes for p in model.parameters() if p.device == device) if device.type == "cuda" else 0
        request = request_of(plan)
        host, local = free.host * free.node_ranks, environment.launch().local_ranks
        facts = [free.device + own, host, request.free_on_disk(), local]
    except FullshardError as error:
        problem, facts = error, []
    control.raise_together_first(problem, members)
    rows = control.all_gather_object_first(facts, members)
    if groups.own_rank() == ranks[0] or places is not None:
        try:
            if tensor_parallel.mesh_of(model) is not None:
                raise OptionError("plan='auto' for a tensor-parallel model", "Give the options themselves.")
            least = [min(column) for column in zip(*rows, strict=True)]
            inner = places[0].local_ranks if places is not None else least[3]
            on_gpu = device.type == "cuda"
            here = automatic.Situation(len(ranks), inner, least[0], least[1], on_gpu, least[2])
            machine = rates.machine_here(device) if request.machine is None else described(request.machine)
            assert machine is not None
            choice = automatic.choose_for(model, request, given, here, machine)
            sys.stderr.write(f"fullshard: {choice.shown()}\n")
            text = json.dumps(choice.to_dict())
        except FullshardError as error:
            problem = error
        except Exception as error:  # noqa: BLE001  the other ranks wait for this one
            problem = ModelError(f"{type(error).__name__} while planning: {error}", "See its cause.")
            problem.__cause__ = error
    control.raise_together_first(problem, members)
    return Choice.from_dict(json.loads(control.all_gather_object_first(text, members)[0]))


def _planned_here(
    model: nn.Module, plan: Any, given: dict[str, Any], ranks: int | None, node_ranks: int | None
) -> tuple[dict[str, Any], Any]:
    """As `_planned`, for ranks that need not be there."""
    from fullshard.planning import automatic, rates
    from fullshard.planning.machines import described
    from fullshard.planning.request import request_of

    choice = automatic.record_of(TABLE["plan"].parsed(plan))
    if choice is None:
        request, device = request_of(plan), environment.compute_device(_model_device(model))
        ranks = ranks or groups.rank_count()
        free = free_memory(device, node_ranks)
        machine = rates.machine_here(device) if request.machine is None else described(request.machine)
        assert machine is not None
        on_gpu = machine.device.is_gpu
        memory = machine.device.memory_bytes if request.machine is not None else free.device
        host, disk = free.host * free.node_ranks, request.free_on_disk()
        here = automatic.Situation(ranks, node_ranks or ranks, memory, host, on_gpu, disk)
        choice = automatic.choose_for(model, request, given, here, machine)
    return automatic.arguments_of(choice, given), choice


def _given_device(model: nn.Module, given: dict[str, Any]) -> torch.device:
    wanted = TABLE["device"].parsed(given.get("device"))
    return _model_device(model) if wanted is None else wanted


@dataclass(frozen=True)
class _Request:
    """What a rank determines by itself, before the ranks compare anything."""

    device: torch.device
    moves: bool  # the model is on another device
    grid: torch.Tensor
    options: Options
    units: list[Unit]


def _ranks(model: nn.Module, mesh: DeviceMesh | None, strategy: str) -> tuple[torch.Tensor, list[int] | None]:
    """The grid of ranks to shard over, and the ranks of this rank's tensor-parallel group, if it has one."""
    if not isinstance(model, nn.Module):
        raise ModelError(f"fs.shard got a {type(model).__name__}, not a torch module", "Pass the model.")
    parallel = tensor_parallel.mesh_of(model)
    if parallel is None:
        return topology.rank_grid(mesh, strategy == "hybrid"), None
    if mesh is None:
        raise OptionError(
            f"parameter {tensor_parallel.first_cut_name(model)!r} is a DTensor: over which ranks to shard is "
            "not known",
            "Give the mesh axis to shard over: mesh=mesh['dp'].",
        )
    grid = topology.rank_grid(tensor_parallel.axes_to_shard(mesh, parallel), strategy == "hybrid")
    return grid, tensor_parallel.tp_ranks_of(parallel, grid, tensor_parallel.first_cut_name(model))


def _examine(model: nn.Module, options: Options, grid: torch.Tensor) -> _Request:
    where = _model_device(model)
    device = environment.compute_device(options.device or where)
    moves = device != environment.compute_device(where)
    if moves and tensor_parallel.mesh_of(model) is not None:
        raise OptionError(
            f"device={str(device)!r} for a tensor-parallel model on {where}",
            "Leave out device: such a model stays on the device of its mesh.",
        )
    _refuse_unfit(model)
    if options.offload is not None and options.device is None:
        _warn_of_computing_on_the_host(device)
    options = replace(options, on_gpu=device.type == "cuda")
    return _Request(device, moves, grid, options, find_units(model, options))


def _warn_of_computing_on_the_host(device: torch.device) -> None:
    """A model on the host computes there, and is then hardly meant to be offloaded."""
    if device.type == "cpu" and torch.cuda.is_available() and groups.own_rank() == 0:
        warnings.warn(
            "the model is on the host and will compute there, where offload= saves no memory of a GPU. Give "
            "fs.shard device='cuda' to compute on this rank's GPU, or device='cpu' if this is meant.",
            stacklevel=2,
        )


def _arranged(request: _Request, here: topology.Place, named: bool) -> topology.Arrangement:
    """On which nodes the ranks are: an agreement. named: the mesh states it."""
    grid, options = request.grid, request.options
    if options.reduce == "fixed" and options.strategy != "hybrid":
        return topology.Arrangement(grid.reshape(1, -1), why_flat="reduce='fixed' sums nothing inside a node")
    places = topology.places_without_peers(sorted(grid.flatten().tolist()))
    if places is None:
        sent = control.all_gather_object_first((here.local_rank, here.local_ranks), grid)
        places = [topology.Place(*theirs) for theirs in sent]
    return topology.arrange(grid, options.strategy == "hybrid", places, named)


def _with_levels(options: Options, arrangement: topology.Arrangement, device: torch.device) -> Options:
    options = replace(options, nodes=arrangement.nodes, why_flat=arrangement.why_flat)
    if options.reduce != "auto":
        return options
    wire = options.precision.wire or options.precision.compute or torch.float32
    sum_bytes = options.precision.reduce.itemsize
    scatters = not arrangement.two_level and topology.scatter_sends_less(
        arrangement.grid, device, wire.itemsize, sum_bytes
    )
    return replace(options, reduce="scatter" if scatters else "exchange")


@checked_keywords(
    {
        **OTHER_NAMES,
        **dict.fromkeys(("world_size", "num_ranks", "mesh"), "Write ranks=N."),
        **dict.fromkeys(("local_ranks", "local_world_size", "ranks_per_node"), "Write node_ranks=N."),
        **dict.fromkeys(
            ("memory", "batch", "sequence", "optimizer", "checkpoint_activations"),
            "Write plan=fs.Planning(...), or use the command `fullshard plan`.",
        ),
    }
)
@_beside_plan
def plan(
    model: nn.Module,
    *,
    ranks: int | None = None,
    strategy: str = "zero3",
    precision: str | Precision = "fp32",
    units: Any = None,
    ignore: Any = (),
    keep_full: int | str | None = None,
    keep_node: int | str | None = None,
    merge_units: int | None = None,
    offload: str | Offload | None = None,
    state: str = "exact",
    optimizer_step: str = "auto",
    node_ranks: int | None = None,
    plan: Any = None,
    peers: int = 0,
) -> Plan:
    """What sharding would hold and send, per rank. Nothing is changed; the model may be on meta.

    offload: as for fs.shard; 'auto' takes what is free on this machine now. The plan of a sharded model has
        the homes that were chosen.
    optimizer_step: 'owned' adds how evenly tensors are dealt to their owners.
    node_ranks: ranks of one host, which share its memory and its links to others. None: as launched; with
        `ranks`, all of them.
    plan: as for fs.shard, with what is free on this machine: the plan of the settings that are chosen, whose
        `choice` is their record. `plan.choice.save(FILE)` writes it; fs.shard(model, plan=FILE) uses it.
    peers: as for fs.save: also the host memory that its copies take.
    """
    if type(peers) is not int or peers < 0:
        raise OptionError(f"peers is {peers!r}", "Give the number of other hosts that hold a copy, or 0.")
    runtime = engine_of(model)
    if runtime is not None:
        return replace(runtime.plan, peers=peers) if peers else runtime.plan
    for name, count in (("ranks", ranks), ("node_ranks", node_ranks)):
        if count is not None and (not isinstance(count, int) or count < 1):
            raise OptionError(f"{name} is {count!r}", "Give a number of ranks of at least 1.")
    device = environment.compute_device(_model_device(model))
    given: dict[str, Any] = {
        "strategy": strategy,
        "precision": precision,
        "units": units,
        "ignore": ignore,
        "keep_full": keep_full,
        "keep_node": keep_node,
        "merge_units": merge_units,
        "offload": offload,
        "state": state,
        "optimizer_step": optimizer_step,
    }
    choice = None
    plan, named = _with_names(plan, given)
    if plan is not None or strategy == "auto":
        given = named
        given["strategy"] = TABLE["strategy"].default if strategy == "auto" else strategy
        given, choice = _planned_here(model, plan, given, ranks, node_ranks)
    options = parse(**given, on_gpu=device.type == "cuda")
    parallel = tensor_parallel.mesh_of(model)
    tp_size = 1 if parallel is None else parallel.size()
    if node_ranks is None and ranks not in (None, groups.rank_count()):
        node_ranks = ranks
    ranks = ranks or max(1, groups.rank_count() // tp_size)
    ranks, options = planned_levels(options, ranks, node_ranks or environment.launch().local_ranks, tp_size)
    if options.strategy == "hybrid" and options.why_flat:
        raise OptionError(
            f"strategy 'hybrid' for {options.why_flat}", "Give node_ranks, the number of ranks of every node."
        )
    made = replace(make_plan(model, ranks, options), choice=choice, peers=peers)
    if options.offload is None:
        return made
    return made.with_offload(options.offload, free_memory(device, node_ranks))


@checked_keywords(
    dict.fromkeys(
        ("write_back", "writeback_to_rank0", "rank0_only", "offload_to_cpu", "with_grads", "recurse"),
        "writeback=False only reads.",
    )
)
@contextmanager
def full(module: nn.Module, writeback: bool = True) -> Iterator[nn.Module]:
    """Inside, parameters of `module` hold their unsharded values, to read or to edit. All ranks must enter.

    With `writeback`, edits are kept; where the ranks' edits differ, the first rank's values are used. Without
    it they are undone.
    """
    runtime = runtime_of(module, used=False)
    with runtime.opened(runtime.units_of(module), writeback):
        yield module


@checked_keywords(
    dict.fromkeys(
        ("memory_bytes", "keep_full", "budget", "max_memory", "bytes"), "Write memory=BYTES or 'all'."
    )
)
@contextmanager
def inference(model: nn.Module, memory: int | str | None = None) -> Iterator[Kept]:
    """Evaluation and generation: no gradients, and units are gathered once and stay full while memory allows.

    memory: bytes for full values, of which the smallest value of any rank counts; 'all', or 0 for none. None
        is half of what is free on the device; on a host, its ranks share that equally.

    All ranks must enter. Inside, each rank may run any number of forwards on any path, and `generate`. If
    everything stays full (`with fs.inference(model) as kept:`, `kept.everything`), no rank waits for another.
    If not, a rank that needs a unit waits until all others need one or leave, and they leave together.
    Parameters must not change inside; backward and optimizer steps raise an error.
    """
    runtime = runtime_of(model)
    if runtime.gathering.inference is None:
        runtime.comm.barrier("inference")
    elif memory is not None:
        raise StateError("fs.inference is open already", "Leave memory= out inside: the outer one decides.")
    with inferring(runtime, model, memory) as kept:
        yield kept


@checked_keywords(
    dict.fromkeys(
        ("steps", "gradient_accumulation_steps", "last", "enabled", "sync"),
        "Enter it around all micro-batches but the last; the strategy decides what is postponed.",
    )
)
@contextmanager
def accumulate(model: nn.Module) -> Iterator[None]:
    """Around all micro-batches but the last: postpones communication where the strategy allows it.

    Do not edit parameters through `p.data` between these micro-batches: full values may be kept.
    """
    reduction = runtime_of(model, reads=False).reduction
    before, reduction.postponing = reduction.postponing, True
    try:
        yield
    finally:
        reduction.postponing = before


@checked_keywords(dict.fromkeys(("fn", "function", "func", "penalty"), "Write term=function."))
def penalty(model: nn.Module, term: Callable[[str, torch.Tensor], Any]) -> torch.Tensor:
    """A penalty on parameters for the loss (L1, L2, EWC): the sum of `term(name, p)` over all of them.

    term: is given each parameter between passes, and returns a tensor of its shape, the elements of which
        are summed, or the sum itself: `lambda name, p: p.abs()`, `lambda name, p: p.norm()`,
        `lambda name, p: fisher[name] * (p - start[name]).square()`. What it combines with `p` has the
        unsharded shape, or was made from the parameter or its gradient. What cannot be right is refused.

    The value is that of one process, on every rank, and backward adds its gradient. All ranks must call it,
    after the forward, and use it in the loss alike.
    """
    return penalties.penalty(runtime_of(model), model, term)


@checked_keywords(dict.fromkeys(("loader", "dataloader", "data", "iterable"), "Write batches=loader."))
def even_batches(batches: Iterable[Batch], model: nn.Module) -> EvenBatches[Batch]:
    """The same number of steps on every rank, however many batches each has.

    A rank that has run out gets its last batch again, and its gradients do not count: they are the mean over
    the ranks that still have data. Costs one small message per batch. In an evaluation, leave out the results
    of a batch while `repeated` of the returned iterator is true.
    """
    return EvenBatches(batches, model)


class EvenBatches(Iterator[Batch]):
    """The iterator that fs.even_batches returns."""

    def __init__(self, batches: Iterable[Batch], model: nn.Module) -> None:
        # Shared with the steps. They must not hold this object: a cycle would outlive a loop that is left.
        self._repeated = [False]
        self._steps = _even_steps(batches, runtime_of(model), self._repeated)

    @property
    def repeated(self) -> bool:
        """The last batch is one that this rank has had before, because others still have data."""
        return self._repeated[0]

    def __next__(self) -> Batch:
        return next(self._steps)

    def close(self) -> None:
        self._steps.close()


def _even_steps(
    batches: Iterable[Batch], runtime: Runtime, repeated: list[bool]
) -> Generator[Batch, None, None]:
    staying = runtime.gathering.inference
    if staying is not None and not staying.kept.everything:
        raise StateError(
            "fs.even_batches inside an fs.inference that does not keep all units full",
            "Loop over each rank's own batches: inside fs.inference their numbers may differ.",
        )
    iterator, last, first = iter(batches), None, True
    try:
        while True:
            here, batch = True, last
            try:
                batch = last = next(iterator)
            except StopIteration:
                here = False
            active = sum(runtime.comm.all_gather_int(int(here)))
            empty = runtime.comm.all_gather_int(int(first and not here)) if first else []
            if active and any(empty):
                raise RankMismatch(
                    f"rank {runtime.comm.members[empty.index(1)]} has no batch at all",
                    "Give every rank at least one batch.",
                )
            if not active:
                return
            first = False
            runtime.reduction.absent, runtime.reduction.active_ranks = not here, active
            repeated[0] = not here
            yield batch  # type: ignore[misc]
    finally:
        repeated[0] = False
        runtime.reduction.absent, runtime.reduction.active_ranks = False, runtime.comm.all_ranks


def _model_device(model: nn.Module) -> torch.device:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    devices = {t.device for _, t in tensors if not t.is_meta}
    if len(devices) > 1:
        where = {str(t.device): name for name, t in reversed(tensors)}
        raise ModelError(f"the model is on several devices: {where}", "Move it to one device first.")
    return devices.pop() if devices else torch.device("meta" if tensors else "cpu")


def _refuse_unfit(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if is_sharded(module):
            raise StateError(
                f"module {name or type(model).__name__!r} is sharded already", "Call fs.shard once."
            )
        for attribute, parameter in module._parameters.items():
            if parameter is not None and parameter.grad is not None:
                raise ModelError(
                    f"parameter {f'{name}.{attribute}'.lstrip('.')!r} has a gradient",
                    "Call model.zero_grad() before fs.shard.",
                )
    if next(model.parameters(), None) is None:
        raise ModelError("the model has no parameters", "There is nothing to shard.")


def _agree_on_model(comm: Comm, model: nn.Module, units: list[Unit], options: Options) -> None:
    """If ranks built different models or passed different options, raise an error that names the first."""
    agreed = [option.name for option in TABLE.values() if option.agreed]
    rows = [f"option {name}={getattr(options, name)!r}" for name in agreed]
    for unit in units:
        for m in unit.members:
            kind = "trainable" if m.parameter.requires_grad else "frozen"
            cut = tensor_parallel.spec_of(m.parameter)
            rows.append(
                f"parameter {m.name!r} of shape {tuple(m.parameter.shape)}, {m.parameter.dtype}, {kind}, "
                f"in {unit_label(unit.name)}" + ("" if cut is None else f", {cut.placements}")
            )
    rows += [f"buffer {n!r} of shape {tuple(b.shape)}, {b.dtype}" for n, b in model.named_buffers()]
    digest = hashlib.sha256("\n".join(rows).encode()).hexdigest()
    if len(set(comm.world.all_gather_object(digest))) == 1:
        return
    by_rank, members = comm.world.all_gather_object(rows), comm.world.members
    for rank, theirs in zip(members, by_rank, strict=True):
        if theirs != by_rank[0]:
            here, there = _first_difference(theirs, by_rank[0])
            raise RankMismatch(
                f"rank {rank} has {here}, where rank {members[0]} has {there}",
                "Build the same model with the same options on every rank.",
            )


def _first_difference(mine: list[str], first: list[str]) -> tuple[str, str]:
    """The first row that only one side has; an inserted row is not reported as a change of the next one."""
    pairs = zip([*mine, "nothing"], [*first, "nothing"], strict=False)
    here, there = next((a, b) for a, b in pairs if a != b)
    if there in mine:
        return here, "nothing"
    return ("nothing", there) if here in first else (here, there)
