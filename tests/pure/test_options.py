"""Every option of fs.shard is declared once; what must write it out again agrees with the declaration."""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from typing import Any

import pytest

import fullshard as fs
from fullshard import api
from fullshard.errors import OptionError
from fullshard.option_table import STRATEGIES, TABLE
from fullshard.options import Options, ShardOptions, parse

NOT_IN_TABLE = {"model", "mesh"}  # what is sharded, and over which ranks


def _parameters(function: Any) -> dict[str, inspect.Parameter]:
    found = inspect.signature(function).parameters
    return {name: p for name, p in found.items() if name not in NOT_IN_TABLE}


def test_the_signature_of_shard_has_the_names_order_and_defaults_of_the_table() -> None:
    assert {name: p.default for name, p in _parameters(fs.shard).items()} == {
        name: option.default for name, option in TABLE.items()
    }
    assert list(_parameters(fs.shard)) == list(TABLE)


def test_the_docstring_of_shard_has_the_help_of_the_table() -> None:
    text = re.sub(r"\s+", " ", fs.shard.__doc__ or "")
    for name, option in TABLE.items():
        assert f" {name}: {option.help}" in text


def test_plan_takes_options_of_shard_with_the_same_defaults() -> None:
    for name, parameter in _parameters(fs.plan).items():
        assert name in ("ranks", "node_ranks", "peers") or parameter.default == TABLE[name].default, name


def test_fields_of_options_are_those_of_the_table() -> None:
    fields = [field.name for field in dataclasses.fields(Options)]
    assert fields == [*TABLE, "on_gpu", "nodes", "why_flat", "integration"]


def test_doors_know_the_types_of_every_option_that_they_pass_on() -> None:
    known = typing.get_type_hints(ShardOptions)
    assert set(known) == {*TABLE, "mesh"} - {"precision", "device"}
    signature = typing.get_type_hints(fs.shard)
    assert known == {name: signature[name] for name in known}


def test_lightning_takes_every_option() -> None:
    sharding = pytest.importorskip("fullshard.lightning.sharding")
    assert set(sharding._NAMES) == {*TABLE, "mesh", "cpu_offload", "ranks_inside", "weights_only"} - {
        "device"
    }


def test_training_configs_have_the_defaults_of_the_table() -> None:
    from fullshard.training.settings import Sharding

    for field in dataclasses.fields(Sharding):
        assert field.default == TABLE[field.name].default, field.name


def test_help_on_the_command_line_comes_from_the_table() -> None:
    pytest.importorskip("typer")
    from fullshard.tools.cli.values import choice, switch

    assert choice("reduce", "").metavar == "auto|exchange|scatter|fixed"
    assert choice("reduce", "").help.lower() == TABLE["reduce"].help.lower()
    assert switch("checkpoint_activations", "").default == "--checkpoint-activations"  # typer's first name


def test_an_unknown_option_is_refused_with_a_suggestion() -> None:
    with pytest.raises(OptionError, match=r"no option 'stratgy'\. Did you mean 'strategy'\?"):
        parse(stratgy="zero3")
    with pytest.raises(OptionError, match=r"no option 'x'\. Options are strategy, precision"):
        parse(x=1)


@pytest.mark.parametrize("value", [1, "Offload", "host", None])
def test_activations_are_recomputed_or_not_or_from_host_memory(value: Any) -> None:
    assert [parse(checkpoint_activations=v).checkpoint_activations for v in (False, True, "offload")] == [
        *(False, True, "offload")
    ]
    with pytest.raises(OptionError, match=r"checkpoint_activations is .*'offload'"):
        parse(checkpoint_activations=value)


def test_every_default_passes_its_own_check() -> None:
    for name, option in TABLE.items():
        option.parsed(option.default)
        assert option.help.endswith("."), name


@pytest.mark.parametrize("name", [name for name, option in TABLE.items() if option.check is None])
def test_a_value_of_another_kind_is_refused_by_name(name: str) -> None:
    with pytest.raises(OptionError, match=name):
        parse(**{name: 3})


def test_ranks_compare_every_option_that_can_be_compared() -> None:
    not_compared = {name for name, option in TABLE.items() if not option.agreed}
    assert not_compared == {"units", "ignore", "materialize", "device", "plan"}
    assert "option.agreed" in inspect.getsource(api._agree_on_model)
    assert TABLE["strategy"].choices == STRATEGIES
