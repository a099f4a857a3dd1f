"""Small blocks are merged into units of a sensible size: fewer messages, the same bits, nothing held longer.

`merge_units` is mostly the size of two blocks here, so that they share a unit in pairs.
"""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import engines
import ranks
import reference
import tables
import zoo
from engines import my_rank
from reference import Trace

STRATEGIES = ("zero3", "zero2", "replicate")
RANK_COUNTS = (2, 3)
STEPS = 4
BLOCKS = 5


def bytes_of(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


PAIRS = 2 * bytes_of(engines.block())


# --- models -------------------------------------------------------------------------------------------


class Steered(engines.Net):
    """Calls the blocks it is told to, in the order it is told."""

    path: tuple[int, ...] = tuple(range(BLOCKS))

    def __init__(self) -> None:
        super().__init__(BLOCKS)

    def forward(self, x: Tensor) -> Tensor:
        for index in self.path:
            x = x + self.blocks[index](x)
        out: Tensor = self.head(x)
        return out


class Tied(Steered):
    """One weight in blocks of the same unit, another in blocks of two units."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1][0].weight = self.blocks[0][0].weight
        self.blocks[3][2].weight = self.blocks[1][2].weight


Path = tuple[int, ...]
# By step and rank. In the first step nobody calls block 1: what the ranks learn from it is not all there is.
DROPPING: list[list[Path]] = [
    [(0, 2, 3, 4), (0, 2, 3, 4), (0, 2, 3, 4)],
    [(0, 1, 2, 3, 4), (0, 2, 3), (0, 1, 4)],
    [(4,), (1, 2, 3), (0, 1, 2, 3, 4)],
    [(0, 2, 4), (), (1, 3)],
]
APART: list[list[Path]] = [DROPPING[2], DROPPING[1], DROPPING[0], DROPPING[3]]
IN_ANOTHER_ORDER: list[list[Path]] = [
    3 * [path] for path in ((0, 1, 2, 3, 4), (1, 0, 3, 2, 4), (4, 2, 0, 1, 3), (0, 0, 1, 2, 4, 3, 4))
]
STRAIGHT: list[list[Path]] = [3 * [Steered.path]] * STEPS


@dataclass(frozen=True)
class Model:
    make: Callable[[], nn.Module]
    batch: Callable[[int, int], Any]  # of a step and a rank
    loss: Callable[[nn.Module, Any], Tensor]
    merge_units: int
    names: list[str]


def _steered_batch(paths: list[list[Path]], step: int, rank: int) -> Any:
    return engines.batch(step, rank), paths[step][rank]


def _steered_loss(model: nn.Module, piece: Any) -> Tensor:
    model.path = piece[1]
    return engines.loss_of(model, piece[0])


PAIRED = ["", "blocks.0..1", "blocks.2..3", "blocks.4"]


def _steered(paths: list[list[Path]], make: Callable[[], nn.Module] = Steered) -> Model:
    return Model(make, partial(_steered_batch, paths), _steered_loss, PAIRS, PAIRED)


def _of_zoo(family: str, merge_units: int, names: list[str]) -> Model:
    found = zoo.FAMILIES[family]
    return Model(found.build, lambda step, rank: found.batch(2 * step + rank), found.loss, merge_units, names)


EXPERT = bytes_of(zoo.ExpertList().experts[0])
EXPERTS = [f"blocks.{i}{experts}" for i in range(3) for experts in ("", ".experts.0..1", ".experts.2..3")]
MODELS = {
    "llama": _of_zoo("llama", 70_000, ["", "model.layers.0..1", "model.layers.2"]),
    "gpt2": _of_zoo("gpt2_tied", 2**17, ["", "transformer.h.0..1", "transformer.h.2"]),
    "pairs of experts": _of_zoo("experts_skipped", 2 * EXPERT, ["", *EXPERTS]),
    "blocks of experts": _of_zoo("experts_skipped", 2**16, ["", "blocks.0..1", "blocks.2"]),
    "stack": _steered(STRAIGHT),
    "layer drop": _steered(DROPPING),
    "layer drop from the first step": _steered(APART),
    "another order": _steered(IN_ANOTHER_ORDER),
    "tied across blocks": _steered(STRAIGHT, Tied),
}
ALL_IN_ONE = 2**22


# --- training -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    trace: Trace
    names: list[str]
    sent: list[Counter[str]]  # collectives by step
    held: int  # bytes of full values after a step


def train(name: str, **options: Any) -> Run:
    import fullshard as fs

    case = MODELS[name]
    model = fs.shard(engines.build(case.make), **{"keep_full": 0, "merge_units": PAIRS, **options})
    sent = count_collectives(model)
    steps = []
    optimizer = reference.sgd(model.parameters())
    losses, norms = [], []
    for step in range(STEPS):
        sent.clear()
        loss = case.loss(model, case.batch(step, my_rank()))
        loss.backward()
        steps.append(Counter(sent))
        losses.append(loss.item())
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), float("inf"))))
        optimizer.step()
        optimizer.zero_grad()
    held = full_bytes(model)
    trace = Trace(losses, norms, engines.whole("fullshard", model))
    return Run(trace, [unit.name for unit in model._fullshard.units], steps, held)


def count_collectives(model: nn.Module) -> Counter[str]:
    """Counts from now on: 'gather forward', 'reduce backward', and each unit's gathers by its name."""
    records, sent = model._fullshard.comm.recorder, Counter[str]()
    begin = records.begin

    def counted(channel: str, phase: str, unit: str, step: int) -> Any:
        sent[f"{channel} {phase}"] += 1
        sent[f"{channel} {phase} {unit}"] += 1
        return begin(channel, phase, unit, step)

    records.begin = counted
    return sent


def full_bytes(model: nn.Module) -> int:
    lanes = [lane for lane in model._fullshard.lanes if not lane.permanent]
    return sum(lane.full.untyped_storage().nbytes() for lane in lanes)


def strategies(name: str, merge_units: int) -> tuple[str, ...]:
    """All for one model, zero3 and another one in turn for the others; zero3 alone without merging, where
    strategies are compared elsewhere."""
    if name == "stack":
        return STRATEGIES
    other = STRATEGIES[1 + list(MODELS).index(name) % 2]
    return ("zero3", other) if merge_units else ("zero3",)


def train_all(name: str, merge_units: int) -> dict[str, Run]:
    found = {}
    for strategy in strategies(name, merge_units):
        found[strategy] = train(name, strategy=strategy, merge_units=merge_units)
        ranks.end_groups_of_models()
    return found


@lru_cache
def runs(name: str, num_ranks: int, merge_units: int) -> list[dict[str, Run]]:
    return ranks.run(train_all, num_ranks, name, merge_units, timeout_s=90.0)  # type: ignore[no-any-return]


@lru_cache
def expected(name: str, num_ranks: int) -> Trace:
    case = MODELS[name]
    batches = [[case.batch(step, rank) for rank in range(num_ranks)] for step in range(STEPS)]
    return reference.train(engines.build(case.make), batches, case.loss, reference.sgd, STEPS)


def _merges(name: str, num_ranks: int) -> tuple[int, ...]:
    return (MODELS[name].merge_units, *([ALL_IN_ONE] if num_ranks == 2 else []))


# Another model has its parts: blocks of transformers, a tied weight, experts that ranks skip.
LONG = ("gpt2", "blocks of experts")
on_models = tables.some("name", MODELS, *(name for name in MODELS if name not in LONG))
# On three ranks, what depends on their paths; the other models are long there.
ON_THREE = ("pairs of experts", "layer drop from the first step")
on_models_and_ranks = pytest.mark.parametrize(
    ("name", "num_ranks"),
    [
        pytest.param(
            name, n, marks=[] if name not in LONG and (n == 2 or name in ON_THREE) else pytest.mark.long
        )
        for name in MODELS
        for n in RANK_COUNTS
    ],
)


@on_models
def test_neighbouring_blocks_are_one_unit_with_a_name_that_says_so(name: str) -> None:
    for found in runs(name, 2, MODELS[name].merge_units):
        assert all(run.names == MODELS[name].names for run in found.values())


@on_models_and_ranks
def test_merged_blocks_train_as_in_one_process(name: str, num_ranks: int) -> None:
    for merge_units in _merges(name, num_ranks):
        found = runs(name, num_ranks, merge_units)
        for strategy in strategies(name, merge_units):
            trace = reference.combine([run[strategy].trace for run in found])
            reference.assert_close_trace(trace, expected(name, num_ranks), rtol=2e-5, atol=2e-6)


@on_models_and_ranks
def test_merging_changes_no_bit(name: str, num_ranks: int) -> None:
    apart = runs(name, num_ranks, 0)
    for merge_units in _merges(name, num_ranks):
        for merged, alone in zip(runs(name, num_ranks, merge_units), apart, strict=True):
            for run in merged.values():
                ours, theirs = run.trace, alone["zero3"].trace
                assert ours.losses == theirs.losses
                different = [
                    n for n, p in theirs.parameters.items() if not reference.bitwise(ours.parameters[n], p)
                ]
                assert not different


@on_models
def test_merged_units_hold_nothing_after_a_step(name: str) -> None:
    for found in runs(name, 2, MODELS[name].merge_units):
        assert not any(run.held for run in found.values())


@on_models
def test_merged_units_are_gathered_once_a_pass(name: str) -> None:
    """Whatever path a rank takes; in the first step, too, if the units are needed in the same order."""
    # Called again after all of its blocks had been called: one gather more.
    units = set(MODELS[name].names) - ({"blocks.4"} if name == "another order" else set())
    alike = name in ("llama", "gpt2", "stack", "layer drop")
    for found in runs(name, 2, MODELS[name].merge_units):
        for strategy, run in found.items():
            forward, backward = {"zero3": (1, 1), "zero2": (1, 0), "replicate": (0, 0)}[strategy]
            for sent in run.sent if alike else run.sent[1:]:
                for unit in units:
                    assert sent[f"gather forward {unit}"] == forward, (strategy, unit, sent)
                    again = backward if unit else 0  # the root stays full
                    assert sent[f"gather backward {unit}"] == again, (strategy, unit, sent)


@on_models
def test_number_of_collectives_falls(name: str) -> None:
    apart, merged, one = (runs(name, 2, m)[0] for m in (0, MODELS[name].merge_units, ALL_IN_ONE))
    for strategy in apart:
        many, fewer, least = (_messages(run[strategy]) for run in (apart, merged, one))
        assert least <= fewer < many


def _messages(run: Run) -> int:
    """Gathers and reduces of the last step."""
    return sum(n for key, n in run.sent[-1].items() if key.count(" ") == 1 and key[0] in "gr")


# --- how a merged unit is used ------------------------------------------------------------------------


def variants() -> dict[str, Run]:
    return {
        "checkpoint": train("stack", checkpoint_activations=True),
        "checkpoint, layer drop": train("layer drop", checkpoint_activations=True),
        "no prefetch": train("stack", prefetch=False),
        "no prefetch, layer drop": train("layer drop", prefetch=False),
        "hybrid": train("stack", strategy="hybrid"),
        "plain": train("stack"),
        "layer drop": train("layer drop"),
        "all kept": train("stack", keep_full="all"),
        "all kept, layer drop": train("layer drop", keep_full="all"),
        "default": train("stack", keep_full=None),
        "default, layer drop": train("layer drop", keep_full=None),
    }


@lru_cache
def all_variants() -> list[dict[str, Run]]:
    return ranks.run(variants, 2)  # type: ignore[no-any-return]


@pytest.mark.parametrize("variant", ["checkpoint", "no prefetch", "all kept", "default"])
def test_options_change_no_bit(variant: str) -> None:
    for found in all_variants():
        assert found[variant].trace.losses == found["plain"].trace.losses
        assert found[f"{variant}, layer drop"].trace.losses == found["layer drop"].trace.losses
        held = found[variant].held, found[f"{variant}, layer drop"].held
        # A model of this size keeps the memory of its full values, unless the budget is smaller.
        assert [bytes_held > 0 for bytes_held in held] == 2 * [variant in ("all kept", "default")]


@pytest.mark.parametrize("variant", ["checkpoint", "no prefetch", "hybrid"])
def test_options_change_no_message(variant: str) -> None:
    for found in all_variants():
        assert found[variant].sent[1:] == found["plain"].sent[1:]


class UserCheckpointed(engines.Net):
    """The caller wraps each block in torch's own activation checkpointing."""

    use_reentrant = False

    def __init__(self, num_blocks: int = BLOCKS) -> None:
        super().__init__(num_blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for layer in self.blocks:
            x = x + checkpoint(layer, x, use_reentrant=self.use_reentrant)
        out: Tensor = self.head(x)
        return out


class UserCheckpointedReentrant(UserCheckpointed):
    use_reentrant = True


EIGHT: dict[str, tuple[Callable[[int], nn.Module], bool]] = {
    "plain": (engines.Net, False),
    "checkpoint_activations": (engines.Net, True),
    "checkpoints": (UserCheckpointed, False),
    "reentrant checkpoints": (UserCheckpointedReentrant, False),
}


def peak(kind: str, prefetch: bool) -> tuple[dict[str, int], Counter[str]]:
    """In the second step: the most units full at a time, by phase; and the collectives."""
    import fullshard as fs
    from fullshard.engine.lane import Lane

    make, recompute = EIGHT[kind]
    options: dict[str, Any] = {"prefetch": prefetch, "checkpoint_activations": recompute, "keep_full": 0}
    options["merge_units"] = PAIRS
    model = fs.shard(engines.build(lambda: make(8)), **options)
    units = model._fullshard.units[1:]
    assert [unit.name for unit in units] == [f"blocks.{i}..{i + 1}" for i in range(0, 8, 2)]
    engines.loss_of(model, engines.batch(0, my_rank())).backward()
    found: Counter[str] = Counter()
    gather, sent = Lane.gather, count_collectives(model)

    def watched(lane: Lane, *how: Any) -> None:
        gather(lane, *how)
        full = sum(any(ln.full.untyped_storage().nbytes() for ln in unit.lanes) for unit in units)
        found[phase] = max(found[phase], full)

    Lane.gather = watched  # type: ignore[method-assign]
    try:
        phase = "forward"
        loss = engines.loss_of(model, engines.batch(1, my_rank()))
        phase = "backward"
        loss.backward()
        messages = Counter(sent)
        phase = "evaluation"
        with torch.no_grad():
            model(engines.batch(2, my_rank())[0])
    finally:
        Lane.gather = gather  # type: ignore[method-assign]
    assert full_bytes(model) == 0
    return dict(found), messages


def peaks() -> dict[tuple[str, bool], tuple[dict[str, int], Counter[str]]]:
    return {(kind, prefetch): peak(kind, prefetch) for kind in EIGHT for prefetch in (False, True)}


def test_two_merged_units_are_full_at_a_time_with_prefetch_and_one_without() -> None:
    names = [f"blocks.{i}..{i + 1}" for i in range(0, 8, 2)]
    for found in ranks.run(peaks, 2):
        for (kind, prefetch), (full, sent) in found.items():
            number = 2 if prefetch else 1
            assert full == {"forward": number, "backward": number, "evaluation": number}, (kind, prefetch)
            gathers = [sent["gather forward"], sent["gather backward"]]
            assert gathers == [len(names) + 1, len(names)], (kind, prefetch)  # the root forward alone
            assert [sent[f"reduce backward {unit}"] for unit in names] == [1] * len(names), (kind, prefetch)


def plain_steps(
    strategy: str, make: Callable[[], nn.Module], micro_batches: int, merge_units: int
) -> dict[str, Tensor]:
    import fullshard as fs

    model = fs.shard(engines.build(make), strategy=strategy, merge_units=merge_units, keep_full=0)
    optimizer = engines.sgd(model.parameters())
    for step in range(3):
        for micro in range(micro_batches):
            last = micro == micro_batches - 1
            with contextlib.nullcontext() if last else fs.accumulate(model):
                engines.loss_of(model, engines.batch(micro_batches * step + micro, my_rank())).backward()
        with torch.no_grad():
            model(engines.batch(step, 0)[0])  # an evaluation between backward and step
        optimizer.step()
        optimizer.zero_grad()
    assert full_bytes(model) == 0
    return engines.whole("fullshard", model)


USES: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "evaluation": (Steered, 1),
    "accumulation": (Steered, 2),
    "checkpoints": (UserCheckpointed, 1),
    "reentrant checkpoints": (UserCheckpointedReentrant, 1),
}


def all_uses(merge_units: int, every_strategy: bool) -> dict[str, dict[str, Tensor]]:
    found = {}
    for number, use in enumerate(USES):
        first, *others = ("zero3", "zero2", "replicate", "zero1")
        for strategy in (first, *(others if every_strategy else [others[number % len(others)]])):
            found[f"{use} {strategy}"] = plain_steps(strategy, *USES[use], merge_units)
            ranks.end_groups_of_models()
    return found


@tables.some("every_strategy", [False, True], False)
def test_accumulation_evaluation_and_the_users_own_checkpoints_give_the_same_bits(
    every_strategy: bool,
) -> None:
    apart, *merged = (ranks.run(all_uses, 2, m, every_strategy) for m in (0, PAIRS, ALL_IN_ONE))
    for found in merged:
        for rank in range(2):
            for use, values in apart[rank].items():
                assert all(reference.bitwise(found[rank][use][n], v) for n, v in values.items()), use


class AuxiliaryBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.router = engines.block(), nn.Linear(engines.WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        self.loss = torch.softmax(self.router(torch.tanh(x)), -1).pow(2).mean()
        return y


class Auxiliary(engines.Net):
    """Every block leaves a loss in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(AuxiliaryBlock() for _ in range(4))


def auxiliary_losses_alone(merge_units: int) -> dict[str, Tensor]:
    """The loss is made of what the blocks left, and not of the output."""
    import fullshard as fs

    model = fs.shard(engines.build(Auxiliary), merge_units=merge_units, keep_full=0)
    optimizer = engines.sgd(model.parameters())
    for step in range(3):
        model(engines.batch(step, my_rank())[0])
        sum(block.loss for block in model.blocks).backward()
        optimizer.step()
        optimizer.zero_grad()
    return engines.whole("fullshard", model)


def test_losses_that_each_block_of_a_unit_left_in_an_attribute() -> None:
    apart, merged = (ranks.run(auxiliary_losses_alone, 2, m) for m in (0, ALL_IN_ONE))
    for rank in range(2):
        assert all(reference.bitwise(merged[rank][n], v) for n, v in apart[rank].items())


# --- the module stays a module ------------------------------------------------------------------------


def module_use() -> dict[str, Any]:
    import fullshard as fs

    found: dict[str, Any] = {}
    model = fs.shard(engines.build(Steered), merge_units=PAIRS, keep_full=0)
    start = reference.whole_parameters(engines.build(Steered))
    found["names"] = [unit.name for unit in model._fullshard.units]

    with fs.full(model.blocks[1]) as block, torch.no_grad():
        found["whole block"] = reference.bitwise(block[0].weight.detach(), start["blocks.1.0.weight"])
        block[0].weight[0, 0] = 7.0
    whole = engines.whole("fullshard", model)
    found["edited"] = whole["blocks.1.0.weight"][0, 0].item()
    whole["blocks.1.0.weight"][0, 0] = start["blocks.1.0.weight"][0, 0]
    found["others"] = all(reference.bitwise(whole[n], v) for n, v in start.items())

    with fs.full(model):
        state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    found["state keys"] = list(state)
    state["blocks.1.0.weight"] = start["blocks.1.0.weight"]
    with fs.full(model):
        model.load_state_dict(state)
    whole = engines.whole("fullshard", model)
    found["loaded"] = all(reference.bitwise(whole[n], v) for n, v in start.items())

    seen: list[tuple[int, int]] = []
    for index, layer in enumerate(model.blocks):
        layer.register_forward_hook(
            lambda module, args, output, i=index: seen.append((i, module[0].weight.numel()))
        )
    twin = copy.deepcopy(model)
    found["losses"] = [_one_step(m) for m in (model, twin)]
    found["hooks"] = seen == 2 * [(i, 8 * 13) for i in range(BLOCKS)]
    ours, theirs = (engines.whole("fullshard", m) for m in (model, twin))
    found["copy"] = all(reference.bitwise(theirs[n], v) for n, v in ours.items())
    found["copied names"] = [unit.name for unit in twin._fullshard.units]

    before = reference.whole_parameters(engines.build(Steered))["blocks.2.0.weight"]
    alone = model.blocks[2](engines.batch(0, 0)[0])  # a block by itself, outside a pass
    found["alone"] = tuple(alone.shape) == (6, 8) and tuple(before.shape) == (13, 8)
    found["rest"] = full_bytes(model) + full_bytes(twin)
    return found


def _one_step(model: nn.Module) -> float:
    loss = engines.loss_of(model, engines.batch(0, my_rank()))
    loss.backward()
    engines.sgd(model.parameters()).step()
    model.zero_grad()
    return loss.item()


def test_a_block_of_a_merged_unit_is_still_a_module() -> None:
    keys = list(engines.build(Steered).state_dict())
    for found in ranks.run(module_use, 2):
        assert found["names"] == found["copied names"] == PAIRED
        assert found["edited"] == 7.0
        assert found["state keys"] == keys
        assert found["losses"][0] == found["losses"][1]
        assert found["rest"] == 0
        for what in ("whole block", "others", "loaded", "hooks", "copy", "alone"):
            assert found[what], what


def from_meta() -> dict[str, Any]:
    import fullshard as fs

    with torch.device("meta"):
        model = Steered()
    fs.shard(model, merge_units=PAIRS)
    return {
        "names": [unit.name for unit in model._fullshard.units],
        "losses": [_one_step(model) for _ in range(2)],
        "meta": any(p.is_meta for p in model.parameters()),
    }


def test_meta_device_models_are_merged_alike() -> None:
    for found in ranks.run(from_meta, 2):
        assert found["names"] == PAIRED
        assert not found["meta"]
        assert found["losses"][1] != found["losses"][0]


def compiled_blocks() -> tuple[int, list[float], list[float]]:
    """Each block compiles by itself; the compiler's place is taken by one that counts."""
    import fullshard as fs

    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    plain, model = (fs.shard(engines.build(Steered), merge_units=PAIRS) for _ in range(2))
    model.blocks[1].compile(backend=backend)
    losses = [[_one_step(m) for _ in range(3)] for m in (plain, model)]
    return len(graphs), losses[0], losses[1]


def test_blocks_of_a_merged_unit_compile_one_by_one() -> None:
    for graphs, plain, compiled in ranks.run(compiled_blocks, 2, timeout_s=90.0):
        assert graphs == 1
        assert compiled == pytest.approx(plain, rel=1e-6)


def chosen_units() -> tuple[list[str], list[str]]:
    import fullshard as fs

    by_class = fs.shard(engines.build(), units=nn.Sequential, merge_units=ALL_IN_ONE)
    by_function = fs.shard(engines.build(), units=lambda m: isinstance(m, nn.Sequential))
    return tuple([u.name for u in m._fullshard.units] for m in (by_class, by_function))  # type: ignore[return-value]


def test_units_that_were_chosen_are_not_merged() -> None:
    for found in ranks.run(chosen_units, 2):
        assert found == 2 * (["", "blocks.0", "blocks.1", "blocks.2"],)


def _tiny(strategy: str) -> tuple[Trace, int, int, list[str]]:
    import fullshard as fs

    model = fs.shard(engines.build(), strategy=strategy)
    runtime = model._fullshard
    begin, sent = runtime.comm.recorder.begin, []

    def count(channel: str, phase: str, unit: str, step: int) -> Any:
        if step == 2:
            sent.append(f"{channel} {phase}")
        return begin(channel, phase, unit, step)

    runtime.comm.recorder.begin = count
    mine = [engines.batch(step, my_rank()) for step in range(engines.STEPS)]
    trace = reference.train_rank(model, mine, engines.loss_of, reference.adamw, engines.STEPS)
    held = sum(lane.full.untyped_storage().nbytes() for lane in runtime.lanes)
    return trace, len(runtime.units), held, sent


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_tiny_model_is_one_unit_with_one_message_each_way(strategy: str) -> None:
    found = ranks.run(_tiny, 2, strategy, timeout_s=60)
    expected = reference.train(
        engines.build(), engines.batches(2), engines.loss_of, reference.adamw, engines.STEPS
    )
    trace = reference.combine([rank[0] for rank in found])
    reference.assert_close_trace(trace, expected, rtol=2e-5, atol=2e-6)
    for _, units, held, sent in found:
        assert units == 1
        assert held > 0, "a small model keeps the memory of its full values"
        assert sent.count("gather forward") == (0 if strategy == "replicate" else 1)
        assert "gather backward" not in sent
