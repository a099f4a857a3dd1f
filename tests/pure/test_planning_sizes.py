"""The sizes that the planner and the simulator know by name, counted without building a model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fullshard.planning.decoder import Decoder
from fullshard.planning.sizes import SIZES
from fullshard.tools.simulation.presets import PRESETS

SHAPES = {**SIZES, **PRESETS}


@pytest.mark.parametrize("name", SHAPES)
def test_the_count_of_parameters_is_that_of_the_model(name: str) -> None:
    shape = replace(SHAPES[name], layers=2)
    with torch.device("meta"):
        model = Decoder(shape)
    assert shape.num_parameters == sum(parameter.numel() for parameter in model.parameters())
