"""Units are found from structure alone; the order of passes is settled from the ranks' paths."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fullshard as fs
from fullshard.options import parse
from fullshard.plan import units
from fullshard.plan.plan import make_plan
from fullshard.plan.schedule import Walk, backward_order, reduce_order, settle
from fullshard.plan.units import find_units


def _names(model: nn.Module, units: object = None, ignore: object = ()) -> list[str]:
    said = parse(units=units, ignore=ignore)
    return [unit.name for unit in find_units(model, said)]


class Mlp(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mlp() for _ in range(3))
        self.shrink = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.shrink(x)


class Pyramid(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.stages = nn.ModuleList(Stage() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
        return x


class Tied(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(rows, 64, device="meta")
        self.blocks = nn.ModuleList(Mlp() for _ in range(2))
        self.head = nn.Linear(64, rows, bias=False, device="meta")
        self.head.weight = self.embed.weight


def test_blocks_of_stages_are_units_and_the_linears_of_a_block_are_not() -> None:
    expected = [""]
    for stage in range(2):
        expected += [f"stages.{stage}", *(f"stages.{stage}.blocks.{i}" for i in range(3))]
    assert _names(Pyramid()) == expected


def test_sequential_of_linears_is_a_list_of_units() -> None:
    model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(3)], nn.ReLU())
    assert _names(model) == ["", "0", "1", "2"]


def test_single_child_is_not_a_repeated_block() -> None:
    assert _names(nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))) == [""]


def test_large_embedding_tied_to_its_head_is_one_unit_and_a_small_one_stays_in_the_root() -> None:
    said = parse(strategy="zero3", precision="fp32", units=None, ignore=())
    units = find_units(Tied(rows=2**17), said)
    assert [unit.name for unit in units] == ["", "embed", "blocks.0", "blocks.1"]
    assert len(units[1].modules) == 2
    assert not units[0].members
    assert _names(Tied(rows=64)) == ["", "blocks.0", "blocks.1"]


def test_classes_and_functions_choose_units() -> None:
    assert _names(Pyramid(), units=Stage) == ["", "stages.0", "stages.1"]
    assert _names(Pyramid(), units=[Stage, Mlp]) == _names(Pyramid())
    assert _names(Pyramid(), units=lambda m: isinstance(m, nn.Linear) and m.out_features == 8)[1:] == [
        f"stages.{s}.blocks.{b}.layers.0" for s in range(2) for b in range(3)
    ]


def test_ignored_parameters_are_in_no_unit() -> None:
    said = parse(strategy="zero3", precision="fp32", units=None, ignore=("stem", "*.shrink.bias"))
    held = {member.name for unit in find_units(Pyramid(), said) for member in unit.members}
    assert "stem.weight" not in held
    assert "stages.0.shrink.bias" not in held
    assert "stages.0.shrink.weight" in held


def test_parameter_tied_across_blocks_lies_in_the_unit_around_both() -> None:
    model = Pyramid()
    model.stages[0].blocks[1].layers[0].weight = model.stages[0].blocks[0].layers[0].weight
    said = parse(strategy="zero3", precision="fp32", units=None, ignore=())
    home = {m.name: unit.name for unit in find_units(model, said) for m in unit.members}
    assert home["stages.0.blocks.0.layers.0.weight"] == "stages.0"


# ---- small blocks


BLOCK_BYTES = 4 * sum(p.numel() for p in Mlp().parameters())


@pytest.fixture
def merging(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Tests run without merging; this turns it on."""
    return lambda size: monkeypatch.setattr(units, "MERGE_BYTES", size)


def test_merging_is_on_by_default_and_no_merged_unit_is_larger_than_said(
    merging: Callable[[int], None],
) -> None:
    source = ast.parse(Path(units.__file__).read_text())
    assert any(ast.unparse(node).startswith("MERGE_BYTES = ") for node in source.body)
    model = nn.ModuleDict({"layers": nn.ModuleList(Mlp() for _ in range(7))})
    merging(BLOCK_BYTES)
    assert _names(model) == ["", *(f"layers.{i}" for i in range(7))]
    merging(2 * BLOCK_BYTES)
    assert _names(model) == ["", "layers.0..1", "layers.2..3", "layers.4..5", "layers.6"]
    merging(4 * BLOCK_BYTES - 1)
    assert _names(model) == ["", "layers.0..2", "layers.3..5", "layers.6"]
    merging(2**22)
    assert _names(model) == ["", "layers.0..6"]


def test_size_is_that_of_the_compute_dtype(merging: Callable[[int], None]) -> None:
    merging(BLOCK_BYTES)
    model = nn.Sequential(*(Mlp() for _ in range(4)))
    said = parse(strategy="zero3", precision="bf16", units=None, ignore=())
    assert [unit.name for unit in find_units(model, said)] == ["", "0..1", "2..3"]


def test_merged_unit_has_its_blocks_in_order_and_all_their_parameters(merging: Callable[[int], None]) -> None:
    merging(2**22)
    model = nn.Sequential(*(Mlp() for _ in range(3)))
    root, unit = find_units(model, parse(strategy="zero3", precision="fp32", units=None, ignore=()))
    assert unit.modules == tuple(model)
    assert unit.merged
    assert [m.name for m in unit.members] == [name for name, _ in model.named_parameters()]
    assert not root.members
    assert "0..2" in str(fs.plan(model, ranks=2))


def test_small_block_is_not_divided_unless_activations_are_recomputed_by_unit(
    merging: Callable[[int], None],
) -> None:
    merging(2 * BLOCK_BYTES)  # stages are larger, with three blocks each
    assert _names(Pyramid()) == [
        "",
        *(f"stages.{s}{blocks}" for s in range(2) for blocks in ("", ".blocks.0..1", ".blocks.2")),
    ]
    merging(2**22)
    assert _names(Pyramid()) == ["", "stages.0..1"]
    said = parse(strategy="zero3", precision="fp32", units=None, ignore=(), checkpoint_activations=True)
    assert [unit.name for unit in find_units(Pyramid(), said)] == [
        "",
        *(f"stages.{s}{blocks}" for s in range(2) for blocks in ("", ".blocks.0..2")),
    ]


def test_chosen_units_are_not_merged(merging: Callable[[int], None]) -> None:
    merging(2**22)
    assert _names(Pyramid(), units=Stage) == ["", "stages.0", "stages.1"]


class Zipped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixers = nn.ModuleList(Mlp() for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(4) for _ in range(3))
        self.tail = nn.Sequential(*(Mlp() for _ in range(2)))


def test_only_what_is_likely_to_be_called_in_a_row_is_merged(merging: Callable[[int], None]) -> None:
    merging(2**22)
    side_by_side = [f"{name}.{i}" for name in ("mixers", "norms") for i in range(3)]
    assert _names(Zipped()) == ["", *side_by_side, "tail.0..1"]
    by_name = nn.ModuleDict({"heads": nn.ModuleDict({"a": Mlp(), "b": Mlp()})})
    assert _names(by_name) == ["", "heads.a", "heads.b"]
    two_classes = nn.ModuleDict({"layers": nn.ModuleList([Mlp(), Mlp(), Stage(), Stage(), Mlp()])})
    assert _names(two_classes) == ["", "layers.0..1", "layers.2..3", "layers.4"]
    convolutions = [m for _ in range(2) for m in (nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU())]
    assert _names(nn.Sequential(*convolutions)) == ["", "0..4"]


def test_frozen_blocks_are_not_merged_with_blocks_that_train(merging: Callable[[int], None]) -> None:
    merging(2**22)
    model = nn.Sequential(*(Mlp() for _ in range(4)))
    model[:2].requires_grad_(False)
    assert _names(model) == ["", "0..1", "2..3"]


def test_parameter_tied_across_merged_blocks_lies_in_their_unit(merging: Callable[[int], None]) -> None:
    merging(2**22)
    model = nn.Sequential(*(Mlp() for _ in range(3)))
    model[2].layers[0].weight = model[0].layers[0].weight
    found = find_units(model, parse(strategy="zero3", precision="fp32", units=None, ignore=()))
    assert [len(unit.members) for unit in found] == [0, 11]


# ---- the plan


def test_plan_is_pure_printable_and_adds_up() -> None:
    with torch.device("meta"):
        model = Pyramid()
    before = dict(model.named_parameters())
    plan = fs.plan(model, ranks=4, precision="bf16")
    assert dict(model.named_parameters()) == before
    total = sum(p.numel() for p in model.parameters())
    assert plan.num_elements == total
    assert 4 * total / 4 <= plan.parameter_bytes <= 4 * total / 4 + 64 * len(before)
    assert plan.gradient_bytes == plan.parameter_bytes
    text = str(plan)
    assert all(unit in text for unit in ("(root)", "stages.1.blocks.2", "at rest", "peak", "sent per step"))
    assert fs.plan(model, ranks=1).wire_bytes_per_step == 0
    whole = fs.plan(model, ranks=4, strategy="replicate")
    assert whole.parameter_bytes >= 4 * total
    with pytest.raises(fs.FullshardError, match="ranks is 0"):
        fs.plan(model, ranks=0)


def test_plan_prints_how_often_a_unit_is_gathered_and_whether_it_is_kept() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(5)])
    sharded = fs.plan(model, ranks=4, units=nn.Linear)
    rows = [line.split() for line in str(sharded).splitlines()[3:8]]
    assert [" ".join(row[8:]) for row in rows] == ["2", "2", "2", "1, kept", "1, kept"]
    assert "kept: full from forward to backward" in str(sharded)
    each = sharded.units[1].full_bytes
    assert sharded.full_bytes_at_peak == 3 * each  # both that are kept, and the one that backward gathers
    options = {"strategy": "zero3", "precision": "fp32", "units": nn.Linear, "ignore": (), "keep_full": 0}
    for prefetch, count in ((True, 2), (False, 1)):
        planned = make_plan(model, 4, parse(**options, prefetch=prefetch))
        assert planned.full_bytes_at_peak == count * each
    replicated = str(fs.plan(model, ranks=4, units=nn.Linear, strategy="replicate"))
    assert [line.split()[8:] for line in replicated.splitlines()[3:8]] == [["0"]] * 5
    assert "kept" not in replicated


def test_plan_of_a_sharded_model_is_the_one_it_was_built_from() -> None:
    model = fs.shard(nn.Sequential(*[nn.Linear(5, 5) for _ in range(3)]))
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    assert fs.plan(model).parameter_bytes == sum(storages.values())
    said = parse(strategy="zero3", precision="fp32", units=None, ignore=())
    fresh = nn.Sequential(*[nn.Linear(5, 5) for _ in range(3)])
    assert make_plan(fresh, 1, said) == fs.plan(model)


# ---- the agreed order


def test_one_path_is_the_order_with_its_repeats() -> None:
    assert settle([[0, 1, 1, 2], [0, 1, 1, 2]], [0, 0, 0]) == [0, 1, 1, 2]


def test_skipped_units_are_merged_where_no_path_runs_against_the_order() -> None:
    assert settle([[0, 4], [0, 1, 2, 3, 4]], [0] * 5) == [0, 1, 2, 3, 4]
    assert settle([[0, 3, 2], [0, 1, 3]], [0] * 4) == [0, 1, 3, 2]


def test_units_nobody_called_come_behind_their_predecessor() -> None:
    assert settle([[0, 2, 3]], [0, 0, 0, 0]) == [0, 1, 2, 3]


def test_units_inside_another_follow_it_and_begin_backward_after_it() -> None:
    parents = [0, 0, 1, 1, 0, 4, 4]
    order = settle([[0, 1, 2, 4, 5], [0, 1, 4, 3, 6]], parents)
    assert order == [0, 1, 2, 3, 4, 5, 6]
    inside = [frozenset()] * 7
    inside[1], inside[4] = frozenset({2, 3}), frozenset({5, 6})
    assert backward_order(order, inside, set()) == [4, 6, 5, 1, 3, 2]
    assert reduce_order(order) == [6, 5, 4, 3, 2, 1, 0]


PATHS = st.integers(2, 7).flatmap(
    lambda n: st.lists(st.lists(st.integers(1, n - 1), max_size=2 * n), min_size=1, max_size=4).map(
        lambda paths: ([[0, *path] for path in paths], n)
    )
)


@given(PATHS)
def test_any_paths_settle_to_an_order_that_holds_every_unit(case: tuple[list[list[int]], int]) -> None:
    paths, units = case
    order = settle(paths, [0] * units)
    assert set(order) == set(range(units))
    assert order[0] == 0
    walk = Walk(order)
    for path in paths:
        for unit in dict.fromkeys(path):
            assert unit in order
    passed = [unit for unit, _ in walk.remaining()]
    assert passed == order
