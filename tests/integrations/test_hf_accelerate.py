"""A plain accelerate loop on our engine: the steps of one process, and its saves."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hf_runs
import ranks

WIDTH = 12


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + torch.tanh(self.inner(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 5)
        self.register_buffer("scale", torch.tensor([2.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale


def data(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        (torch.randn(WIDTH, generator=generator), torch.randint(0, 5, (), generator=generator))
        for _ in range(count)
    ]


ENVIRONMENT = {  # what `accelerate launch --use_fsdp` sets
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "Block",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
}


def _accelerator(how: str, offload: Any = None) -> Any:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import GradScalerKwargs

    hf_runs.forget()
    plugin = None
    if offload is not None and how == "environment":
        os.environ["FSDP_OFFLOAD_PARAMS"] = offload
    if how == "alone":
        hf_runs.alone()
    elif how == "environment":
        os.environ.update(ENVIRONMENT)
    elif how == "version 1":
        plugin = FullyShardedDataParallelPlugin(
            sharding_strategy="SHARD_GRAD_OP", use_orig_params=False, cpu_offload=offload
        )
    elif how == "version 2":
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=150, cpu_offload=offload
        )
    elif how == "fp16":
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_offload=offload)
    narrow: dict[str, Any] = {}
    if how == "fp16":  # with the usual 65536 the first step would overflow and be left out
        narrow = {"mixed_precision": "fp16", "kwargs_handlers": [GradScalerKwargs(init_scale=256.0)]}
    return Accelerator(cpu=True, gradient_accumulation_steps=2, fsdp_plugin=plugin, **narrow)


def _made(accelerator: Any) -> tuple[Any, ...]:
    torch.manual_seed(1)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    batch = 4 // accelerator.num_processes
    loader = torch.utils.data.DataLoader(data(24), batch_size=batch)  # type: ignore[arg-type]
    # accelerate steps a schedule once for every rank.
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda n: 1 / (1 + n // accelerator.num_processes)
    )
    parameters = list(model.parameters())
    made = tuple(accelerator.prepare(model, optimizer, loader, schedule))
    held = [p for group in made[1].param_groups for p in group["params"]]
    for name, theirs in (("the model", list(made[0].parameters())), ("the optimizer", held)):
        assert [id(p) for p in theirs] == [id(p) for p in parameters], f"{name} has other parameters now"
    return made


def _epoch(accelerator: Any, made: tuple[Any, ...], stop: int = 99) -> list[tuple[float, float]]:
    model, optimizer, loader, schedule = made
    found, losses = [], []
    for number, (x, y) in enumerate(loader):
        if number == stop:
            break
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(x), y)
            losses.append(accelerator.gather(loss.detach()).mean())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 0.3)
                found.append((float(sum(losses) / len(losses)), float(norm)))
                losses.clear()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return found


def _predictions(accelerator: Any, model: Any) -> torch.Tensor:
    """Of seven samples, which two ranks cannot share equally."""
    loader = accelerator.prepare(torch.utils.data.DataLoader(data(7), batch_size=2))  # type: ignore[arg-type]
    model.eval()
    with torch.no_grad():
        found = [accelerator.gather_for_metrics(model(x)) for x, _ in loader]
    model.train()
    return torch.cat(found)


def _loop(folder: str, how: str, offload: Any = None) -> dict[str, Any]:
    import safetensors.torch
    from accelerate.utils import merge_fsdp_weights

    accelerator = _accelerator(how, offload)
    made = _made(accelerator)
    model = made[0]
    found: dict[str, Any] = {"type": accelerator.distributed_type.value, "first": _epoch(accelerator, made)}
    found["predictions"] = _predictions(accelerator, model)
    accelerator.save_state(f"{folder}/state")
    state = accelerator.get_state_dict(model)
    found["state"] = {name: value.clone() for name, value in state.items()}
    found["unwrapped"] = accelerator.unwrap_model(model) is model and type(model) is Net
    accelerator.save_model(model, f"{folder}/model")
    accelerator.wait_for_everyone()
    found["saved"] = safetensors.torch.load_file(f"{folder}/model/model.safetensors")
    found["second"] = _epoch(accelerator, made)
    accelerator.load_state(f"{folder}/state")
    found["repeated"] = _epoch(accelerator, made)
    if how != "alone":
        merge_fsdp_weights(f"{folder}/state/pytorch_model_fsdp_0", f"{folder}/merged")
        found["merged"] = safetensors.torch.load_file(f"{folder}/merged/model.safetensors")
        runtime = model.__dict__["_fullshard"]
        found |= {"syncs": runtime.comm.step, "units": [u.name for u in runtime.units]}
        found["strategy"] = runtime.options.strategy
        found["homes"] = {lane.home.kind for lane in runtime.lanes}
    return found


def test_loop_takes_the_steps_of_one_process_however_fsdp_is_asked_for(tmp_path: Path) -> None:
    (plain,) = ranks.run(_loop, 1, str(tmp_path / "alone"), "alone", timeout_s=120)
    strategies = {"environment": "zero3", "version 1": "zero2", "version 2": "zero3", "fp16": "zero3"}
    for how, strategy in strategies.items():
        first, second = ranks.run(_loop, 2, str(tmp_path / how), how, timeout_s=120)
        tolerance = 2e-2 if how == "fp16" else 2e-5
        for mine in (first, second):
            assert mine["type"] == "FSDP"
            assert mine["strategy"] == strategy
            hf_runs.compare(mine["first"] + mine["second"], plain["first"] + plain["second"], tolerance)
            assert mine["repeated"] == mine["second"]
            assert torch.allclose(mine["predictions"], plain["predictions"], atol=tolerance)
            assert mine["unwrapped"]
            assert mine["syncs"] == 3 * 3
            _assert_close(mine["saved"], plain["saved"], tolerance)
            assert mine["merged"].keys() == mine["saved"].keys()
            assert all(torch.equal(mine["merged"][name], value) for name, value in mine["saved"].items())
        _assert_close(first["state"], plain["state"], tolerance)
        assert second["state"] == {}
        if how == "environment":
            assert first["units"] == ["", "blocks.0", "blocks.1", "blocks.2"]
        if how == "version 2":
            blocks = [f"blocks.{i}" for i in range(3)]
            assert first["units"] == ["", *(name for block in blocks for name in (block, f"{block}.inner"))]


def _assert_close(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], tolerance: float) -> None:
    assert list(mine) == list(theirs)
    for name, value in theirs.items():
        assert torch.allclose(mine[name], value, atol=tolerance), name
