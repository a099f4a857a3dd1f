"""Habits of training scripts around torch's signatures: averages of weights, compiled models, early saves."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from test_torch_fsdp2 import Net, batches, build, by_blocks, loss_of
from test_torch_fsdp2_modules import rank, refusal, same, whole
from torch import Tensor, nn

import ranks
import reference


def _values(model: nn.Module) -> dict[str, Tensor]:
    """Whole values of a model under either signature."""
    from fullshard.torch_fsdp import FullyShardedDataParallel

    return dict(model.state_dict()) if isinstance(model, FullyShardedDataParallel) else whole(model)


def _wrapped(model: nn.Module) -> nn.Module:
    from fullshard.torch_fsdp import FullyShardedDataParallel
    from fullshard.torch_fsdp.wrap import ModuleWrapPolicy

    group = torch.distributed.new_group([0, 1])
    policy = ModuleWrapPolicy({type(model.blocks[0])})
    return FullyShardedDataParallel(model, process_group=group, auto_wrap_policy=policy)


def _trained(model: Any, average: Any, parts: list[Any]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for part in parts:
        loss_of(model, part).backward()
        optimizer.step()
        optimizer.zero_grad()
        if average is not None:
            average.update_parameters(model)


def _averages() -> None:
    """An average is made before the model is used; copies of wrappers train apart, and keep their groups."""
    from torch.optim.swa_utils import AveragedModel

    all_parts = batches(2, 3)
    plain = build()
    expected = AveragedModel(plain)
    _trained(plain, expected, [torch.cat(list(step)) for step in all_parts])
    for shards in (by_blocks, _wrapped):
        model = shards(build())
        average = AveragedModel(model)
        _trained(model, average, [step[rank()] for step in all_parts])
        late = copy.deepcopy(model)
        for ours, theirs in ((model, plain), (average.module, expected.module), (late, plain)):
            values = _values(ours)
            for name, value in theirs.state_dict().items():
                reference.assert_close(values[name], value, name, rtol=1e-4, atol=1e-5)


def test_averaged_model_made_before_the_first_use_follows_the_sharded_one() -> None:
    ranks.run(_averages, 2, init=True, timeout_s=120)


def _compiled(is_wrapped: bool) -> None:
    all_parts = batches(2, 2)
    plain = build()
    _trained(plain, None, [torch.cat(list(step)) for step in all_parts])
    model = _wrapped(build()) if is_wrapped else by_blocks(build())
    _trained(torch.compile(model, backend="eager"), None, [step[rank()] for step in all_parts])
    values = _values(model)
    for name, value in plain.state_dict().items():
        reference.assert_close(values[name], value, name, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("is_wrapped", [False, True])
def test_model_compiled_whole_before_its_first_use_trains_as_one_process_does(is_wrapped: bool) -> None:
    ranks.run(_compiled, 2, is_wrapped, init=True, timeout_s=120)


def _empty() -> Any:
    with torch.device("meta"):
        model = Net()
    by_blocks(model)
    return model.to_empty(device="cpu")


def _written(model: nn.Module) -> None:
    """Every parameter has its own values; the last one written leaves its unit open."""
    for position, (_, parameter) in enumerate(nn.Module.named_parameters(model)):
        nn.init.constant_(parameter, float(position + 1))


def _early(folder: str) -> None:
    import fullshard as fs

    expected = build()
    _written(expected)
    wanted = expected.state_dict()
    model = _empty()
    _written(model)
    fs.save(f"{folder}/written", model)
    reader = by_blocks(build())
    fs.load(f"{folder}/written", reader)
    assert same(whole(reader), wanted)  # not what its shards were before
    model = _empty()
    _written(model)
    assert same(whole(model), wanted)  # first read inside fs.full
    fs.save(f"{folder}/other", by_blocks(build()))
    for is_written in (False, True):
        each = _empty()
        if is_written:
            _written(each)
        fs.load(f"{folder}/other", each)
        assert same(whole(each), build().state_dict())  # what was loaded is not overwritten


def test_model_initialised_after_to_empty_is_saved_read_and_loaded_before_its_first_forward(
    tmp_path: Path,
) -> None:
    ranks.run(_early, 2, str(tmp_path), init=True, timeout_s=120)


def _in_the_background(folder: str) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict

    model = by_blocks(build())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    loss_of(model, batches(2, 1)[0][rank()]).backward()
    optimizer.step()
    before = whole(model)
    values, state = get_state_dict(model, optimizer)
    group = torch.distributed.new_group(backend="gloo")
    saving = dcp.async_save({"model": values, "optimizer": state}, checkpoint_id=folder, process_group=group)
    optimizer.step()  # the copy is made: what follows does not reach it
    saving.result()
    assert not same(whole(model), before)
    read = {"model": get_model_state_dict(model)}
    dcp.load(read, checkpoint_id=folder)
    model.load_state_dict(read["model"])
    assert same(whole(model), before)
    assert refusal(lambda: values["head.weight"].untyped_storage()) == "StateError"


def test_async_save_writes_the_values_of_the_moment_it_was_called(tmp_path: Path) -> None:
    ranks.run(_in_the_background, 2, str(tmp_path), init=True, timeout_s=120)


def _three_axes() -> None:
    """Replicas and shards beside a tensor-parallel axis: each pair of ranks shards over other ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    steps = batches(2, 2)
    plain = build(tie=False)
    _trained(plain, None, [torch.cat(list(step)) for step in steps])
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicas", "shards", "tp"))
    model = build(tie=False)
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    by_blocks(model, mesh=mesh["replicas", "shards"])
    _trained(model, None, [step[rank() // 2] for step in steps])
    for name, value in whole(model).items():
        found = value.full_tensor() if hasattr(value, "full_tensor") else value
        reference.assert_close(found, plain.state_dict()[name], name, rtol=1e-4, atol=1e-5)


def test_mesh_of_two_axes_beside_a_tensor_parallel_one_trains_as_one_process_does() -> None:
    ranks.run(_three_axes, 4, init=True, timeout_s=120)
