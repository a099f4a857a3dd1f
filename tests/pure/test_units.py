"""Units are found from structure alone; the order of passes is settled from the ranks' paths."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fullshard as fs
from fullshard.options import parse
from fullshard.plan.plan import make_plan
from fullshard.plan.schedule import Walk, backward_order, kept_units, reduce_order, settle
from fullshard.plan.units import Unit, find_units


def _units(model: nn.Module, merge_units: int | None = 0, **options: Any) -> list[Unit]:
    """Of a model without ranks; a unit per block unless the test is about merging."""
    defaults: dict[str, Any] = {"strategy": "zero3", "precision": "fp32", "units": None, "ignore": ()}
    return find_units(model, parse(**(defaults | options), merge_units=merge_units))


def _names(model: nn.Module, merge_units: int | None = 0, **options: Any) -> list[str]:
    return [unit.name for unit in _units(model, merge_units, **options)]


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
    units = _units(Tied(rows=2**17))
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
    units = _units(Pyramid(), ignore=("stem", "*.shrink.bias"))
    held = {member.name for unit in units for member in unit.members}
    assert "stem.weight" not in held
    assert "stages.0.shrink.bias" not in held
    assert "stages.0.shrink.weight" in held


def test_parameter_tied_across_blocks_lies_in_the_unit_around_both() -> None:
    model = Pyramid()
    model.stages[0].blocks[1].layers[0].weight = model.stages[0].blocks[0].layers[0].weight
    home = {m.name: unit.name for unit in _units(model) for m in unit.members}
    assert home["stages.0.blocks.0.layers.0.weight"] == "stages.0"


# ---- small blocks


BLOCK_BYTES = 4 * sum(p.numel() for p in Mlp().parameters())
ALL = 50 * BLOCK_BYTES  # of every model below more than its blocks, and less than all of it


class Headed(nn.Module):
    """What it holds is its only child of consequence; the head makes the model larger than `ALL`."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.head = nn.Linear(64, 64)


def _body(model: nn.Module, merge_units: int | None = ALL, **options: Any) -> list[str]:
    """Names of the units below `body`."""
    root, *names = _names(Headed(model), merge_units, **options)
    assert root == ""
    return [name.removeprefix("body.") for name in names]


def test_neighbours_share_a_unit_of_at_most_merge_units_bytes() -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList(Mlp() for _ in range(7))})
    assert _body(model, BLOCK_BYTES) == [f"layers.{i}" for i in range(7)]
    assert _body(model, 2 * BLOCK_BYTES) == ["layers.0..1", "layers.2..3", "layers.4..5", "layers.6"]
    assert _body(model, 4 * BLOCK_BYTES - 1) == ["layers.0..2", "layers.3..5", "layers.6"]
    assert _body(model, ALL) == ["layers.0..6"]


def test_a_model_of_at_most_merge_units_bytes_is_one_unit_unless_activations_are_recomputed_by_unit() -> None:
    model = Headed(nn.Sequential(*(Mlp() for _ in range(3))))
    size = 4 * sum(p.numel() for p in model.parameters())
    assert _names(model, size - 1) == ["", "body.0..2"]
    assert _names(model, size) == [""]
    assert _names(model, size, checkpoint_activations=True) == ["", "body.0..2"]


def _of_mebibytes(*sizes: int) -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(1024, 256 * size, bias=False) for size in sizes))


def test_by_default_blocks_share_4_mebibytes_on_the_host_and_96_on_a_gpu() -> None:
    model = _of_mebibytes(*[2] * 5)
    assert _names(model, None) == ["", "0..1", "2..3", "4"]
    assert _names(model, None, on_gpu=True) == ["", "0..4"]
    assert _names(_of_mebibytes(*[32] * 5), None, on_gpu=True) == ["", "0..2", "3..4"]
    for on_gpu in (False, True):
        assert _names(_of_mebibytes(2, 2), None, on_gpu=on_gpu) == [""], "no more than 4 MiB are one unit"
        assert _names(model, 0, on_gpu=on_gpu) == ["", *"01234"]


@pytest.mark.parametrize("wrong", [-1, "all", 1.5, True])
def test_a_wrong_threshold_is_refused(wrong: Any) -> None:
    with pytest.raises(fs.FullshardError, match="merge_units is"):
        fs.plan(Mlp(), ranks=2, merge_units=wrong)


def test_size_is_that_of_the_compute_dtype() -> None:
    model = nn.Sequential(*(Mlp() for _ in range(4)))
    assert _names(model, BLOCK_BYTES, precision="bf16") == ["", "0..1", "2..3"]


def test_merged_unit_has_its_blocks_in_order_and_all_their_parameters() -> None:
    model = Headed(nn.Sequential(*(Mlp() for _ in range(3))))
    root, unit = _units(model, ALL)
    assert unit.modules == tuple(model.body)
    assert unit.merged
    assert [m.name for m in unit.members] == [f"body.{name}" for name, _ in model.body.named_parameters()]
    assert [m.name for m in root.members] == ["head.weight", "head.bias"]
    assert "0..2" in str(fs.plan(model, ranks=2, merge_units=ALL))


def test_small_block_is_not_divided_unless_activations_are_recomputed_by_unit() -> None:
    assert _body(Pyramid(), 2 * BLOCK_BYTES) == [  # stages are larger, with three blocks each
        f"stages.{s}{blocks}" for s in range(2) for blocks in ("", ".blocks.0..1", ".blocks.2")
    ]
    assert _body(Pyramid()) == ["stages.0..1"]
    assert _body(Pyramid(), checkpoint_activations=True) == [
        f"stages.{s}{blocks}" for s in range(2) for blocks in ("", ".blocks.0..2")
    ]


def test_chosen_units_are_not_merged() -> None:
    assert _names(Pyramid(), None, units=Stage) == ["", "stages.0", "stages.1"]


class Zipped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixers = nn.ModuleList(Mlp() for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(4) for _ in range(3))
        self.tail = nn.Sequential(*(Mlp() for _ in range(2)))


def test_only_what_is_likely_to_be_called_in_a_row_is_merged() -> None:
    side_by_side = [f"{name}.{i}" for name in ("mixers", "norms") for i in range(3)]
    assert _body(Zipped()) == [*side_by_side, "tail.0..1"]
    by_name = nn.ModuleDict({"heads": nn.ModuleDict({"a": Mlp(), "b": Mlp()})})
    assert _body(by_name) == ["heads.a", "heads.b"]
    two_classes = nn.ModuleDict({"layers": nn.ModuleList([Mlp(), Mlp(), Stage(), Stage(), Mlp()])})
    assert _body(two_classes) == ["layers.0..1", "layers.2..3", "layers.4"]
    convolutions = [m for _ in range(2) for m in (nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU())]
    assert _body(nn.Sequential(*convolutions)) == ["0..4"]


def test_frozen_blocks_are_not_merged_with_blocks_that_train() -> None:
    model = nn.Sequential(*(Mlp() for _ in range(4)))
    model[:2].requires_grad_(False)
    assert _body(model) == ["0..1", "2..3"]


def test_parameter_tied_across_merged_blocks_lies_in_their_unit() -> None:
    model = nn.Sequential(*(Mlp() for _ in range(3)))
    model[2].layers[0].weight = model[0].layers[0].weight
    assert [len(unit.members) for unit in _units(Headed(model), ALL)] == [2, 11]


# ---- the plan


def test_plan_is_pure_printable_and_adds_up() -> None:
    with torch.device("meta"):
        model = Pyramid()
    before = dict(model.named_parameters())
    plan = fs.plan(model, ranks=4, precision="bf16", merge_units=0)
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
        model = nn.Sequential(*[nn.Linear(4096, 4096) for _ in range(5)])  # too large for all to be kept
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


# ---- what stays full


def test_kept_units_are_the_last_that_fit_and_never_the_root() -> None:
    order, sizes = [0, 1, 2, 3, 4], [100, 10, 10, 10, 10]
    assert kept_units(order, sizes, 25, 0, set()) == {4, 3}
    assert kept_units(order, sizes, 0, 2, set()) == {4, 3}
    assert kept_units(order, sizes, 0, 0, set()) == set()
    assert kept_units(order, sizes, 10**9, 0, {1}) == {4, 3, 2}
    assert kept_units([0, 1, 2, 1], [0, 10, 10], 10, 0, set()) == {1}


@pytest.mark.parametrize("wrong", [-1, "some", 1.5, True])
def test_a_wrong_budget_is_refused(wrong: Any) -> None:
    with pytest.raises(fs.FullshardError, match="keep_full"):
        fs.plan(nn.Linear(2, 2), ranks=2, keep_full=wrong)


# --- one memory, two tensors -----------------------------------------------------------------------------


class Pair(nn.Module):
    def __init__(self, first: torch.Tensor, second: torch.Tensor, frozen: bool = False) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.a.weight = nn.Parameter(first)
        self.b.weight = nn.Parameter(second, requires_grad=not frozen)


def _tied_by_data(device: str = "cpu") -> Pair:
    pair = Pair(torch.randn(4, 4, device=device), torch.randn(4, 4, device=device))
    pair.b.weight = nn.Parameter(pair.a.weight.data)
    return pair


def _with_buffer() -> Pair:
    pair = Pair(torch.randn(4, 4), torch.randn(4, 4))
    pair.register_buffer("kept", pair.a.weight.detach()[1:])
    return pair


_flat, _wide = torch.randn(40), torch.randn(4, 8)
ONE_MEMORY = {
    "assigned .data": (_tied_by_data, "'b.weight'"),
    "on meta": (lambda: _tied_by_data("meta"), "'b.weight'"),
    "transposed": (lambda: Pair(_wide[:, :4], _wide[:, :4].t()), "'b.weight'"),
    "overlapping": (lambda: Pair(_flat[:16].view(4, 4), _flat[8:24].view(4, 4)), "'b.weight'"),
    "one is frozen": (lambda: Pair(_flat[:16].view(4, 4), _flat[:16].view(4, 4), frozen=True), "'b.weight'"),
    "interleaved and overlapping": (lambda: Pair(_wide[:, :4], _wide[:, 3:7]), "'b.weight'"),
    "a buffer": (_with_buffer, "buffer 'kept'"),
    "expanded": (lambda: Pair(torch.randn(4, 1).expand(4, 4), torch.randn(4, 4)), "expand()"),
}


@pytest.mark.parametrize("name", ONE_MEMORY)
def test_two_tensors_over_one_memory_are_refused_by_name(name: str) -> None:
    make, other = ONE_MEMORY[name]
    with pytest.raises(fs.FullshardError, match=r"'a\.weight'") as info:
        _units(make())
    assert other in str(info.value)


def test_parts_of_one_memory_that_do_not_overlap_and_tied_parameters_are_sharded() -> None:
    tied = Pair(torch.randn(4, 4), torch.randn(4, 4))
    tied.b.weight = tied.a.weight
    frozen = Pair(torch.randn(4, 4), torch.randn(4, 1).expand(4, 4), frozen=True)
    interleaved = Pair(_wide[:, :4], _wide[:, 4:])
    for model in (tied, frozen, interleaved, Pair(_flat[:16].view(4, 4), _flat[16:32].view(4, 4))):
        assert _units(model)
    shared = _tied_by_data()
    assert _units(shared, ignore=("a.weight", "b.weight"))
