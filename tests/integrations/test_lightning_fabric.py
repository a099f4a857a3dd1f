"""Lightning's Fabric on shards: the numbers of one plain process, step by step."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from torch import Tensor, nn

import fullshard as fs
import fullshard.lightning
import ranks
from fullshard.lightning import FullShardFabricStrategy, consolidate, read_checkpoint
from lightning_cases import Lit, Net, Seen, assert_same_run, batches, place, whole_weights


class Scaled(nn.Module):
    """With a parameter of its own, and a method beside forward that computes with it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net, self.scale = Net(), nn.Parameter(torch.empty(3))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * self.scale.mean()

    def doubled(self, x: Tensor) -> Tensor:
        return 2 * self.scale.mean() * self.net(x)


def _optimizer(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.02, eps=1e-4)


def _fabric(strategy: Any, **options: Any) -> lightning.Fabric:
    fabric = lightning.Fabric(accelerator="cpu", devices=place()[1], strategy=strategy, **options)
    fabric.launch()
    return fabric


def _loop(
    fabric: Any, model: Any, optimizer: Any, seen: Seen, micro: int = 1, clip: dict[str, float] | None = None
) -> None:
    parts = batches(*place(), 3 * micro)
    for index, (x, y) in enumerate(parts):
        last = index % micro == micro - 1
        with fabric.no_backward_sync(model, enabled=not last):
            loss = ((model(x) - y) ** 2).mean() / micro
            fabric.backward(loss)
        seen.losses.append(loss.item())
        if last:
            norm = fabric.clip_gradients(model, optimizer, **clip) if clip else None
            seen.norms.append(float(norm) if norm is not None else 0.0)
            optimizer.step()
            optimizer.zero_grad()


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "norm": ({}, {}, {"clip": {"max_norm": 0.5}}),
    "value": ({"strategy": "zero2"}, {}, {"clip": {"clip_val": 0.01}}),
    "accumulate": ({"strategy": "zero1"}, {}, {"micro": 2, "clip": {"max_norm": 0.5}}),
    "bf16-mixed": ({}, {"precision": "bf16-mixed"}, {"clip": {"max_norm": 0.5}}),
}


def _trained(strategy: Any, options: dict[str, Any], how: dict[str, Any]) -> Seen:
    fabric, seen, module = _fabric(strategy, **options), Seen(), Scaled()
    model, optimizer = fabric.setup(module, _optimizer(module))
    _loop(fabric, model, optimizer, seen, **how)
    seen.weights = whole_weights(module)
    return seen


def _cases() -> dict[str, Seen]:
    return {name: _trained(FullShardFabricStrategy(**a), b, c) for name, (a, b, c) in CASES.items()}


def test_fabric_loop_has_the_losses_norms_and_weights_of_plain_fabric() -> None:
    found = ranks.run(_cases, 2, timeout_s=120)
    for name, (_, options, how) in CASES.items():
        loose = 5e-2 if "bf16" in name else 1e-5
        assert_same_run([run[name] for run in found], _trained("auto", options, how), loose, loose)


def _used(folder: Path) -> dict[str, Any]:
    fabric = _fabric("fullshard")
    seen, found = Seen(), dict[str, Any]()
    with fabric.init_module(empty_init=True):
        module = Scaled()
    found["meta"] = module.net.head.weight.is_meta
    model = fabric.setup_module(module)
    model.load_state_dict(Scaled().state_dict())
    optimizer = fabric.setup_optimizers(_optimizer(model))
    _loop(fabric, model, optimizer, seen)
    state = {"model": model, "optimizer": optimizer, "step": 3, "list": [1, 2]}
    fabric.save(folder / "saved", state)
    rest = Seen()
    _loop(fabric, model, optimizer, rest)
    found["seen"], found["rest"] = seen, rest
    found["gathered"] = fabric.all_gather(torch.tensor(place()[0])).tolist()
    x = batches(*place())[0][0]
    with pytest.raises(fs.FullshardError, match="'doubled' of Scaled reads scale"):
        model.doubled(x)
    model.mark_forward_method("doubled")
    with torch.no_grad():
        found["marked"] = torch.allclose(model.doubled(x), 2 * model(x))
    found |= _loaded_again(folder)
    found["refused"] = _refused(fabric, folder, model, optimizer)
    return found


def _loaded_again(folder: Path) -> dict[str, Any]:
    """The checkpoint in another run: its own, of one raw module, and a plain file of Fabric's."""
    found: dict[str, Any] = {}
    fabric = _fabric(FullShardFabricStrategy(strategy="zero2"))
    for name in ("saved", "plain.ckpt"):
        module, seen = Scaled(), Seen()
        model, optimizer = fabric.setup(module, _optimizer(module))
        state = {"model": model, "optimizer": optimizer, "step": 0}
        left = fabric.load(folder / name, state)
        found[f"step of {name}"], found[f"left of {name}"] = state["step"], left
        _loop(fabric, model, optimizer, seen)
        found[f"rest of {name}"] = seen
    raw = Scaled()
    model = fabric.setup_module(raw)
    fabric.load_raw(folder / "raw.pt", model)
    found["raw"] = whole_weights(raw)
    fabric.load_raw(folder / "saved", model)
    found["raw folder"] = whole_weights(raw)
    return found


def _refused(fabric: Any, folder: Path, model: Any, optimizer: Any) -> dict[str, str]:
    other = fabric.setup_module(Scaled())
    calls = {
        "2 sharded models": lambda: fabric.save(folder / "x", {"a": model, "b": other}),
        "0 sharded models": lambda: fabric.save(folder / "x", {"step": 1}),
        "filter": lambda: fabric.save(folder / "x", {"model": model}, filter={"model": lambda *_: True}),
        "'epoch'": lambda: fabric.load(folder / "saved", {"model": model, "epoch": 1}),
        "read_checkpoint": lambda: fabric.load(folder / "saved"),
        "saved without an optimizer": lambda: fabric.load(folder / "alone", {"m": model, "o": optimizer}),
    }
    fabric.save(folder / "alone", {"m": model})
    found = {}
    for name, call in calls.items():
        with contextlib.suppress(fs.FullshardError):
            try:
                call()
            except fs.FullshardError as error:
                found[name] = str(error)
    return found


def test_fabric_saves_loads_gathers_and_marks_on_shards(tmp_path: Path) -> None:
    fabric, module = _fabric("auto"), Scaled()
    torch.save(Scaled().state_dict(), tmp_path / "raw.pt")
    model, optimizer = fabric.setup(module, _optimizer(module))
    seen, rest = Seen(), Seen()
    _loop(fabric, model, optimizer, seen)
    seen.weights = whole_weights(module)
    fabric.save(tmp_path / "plain.ckpt", {"model": model, "optimizer": optimizer, "step": 3, "list": [1, 2]})
    _loop(fabric, model, optimizer, rest)
    found = ranks.run(_used, 2, tmp_path, timeout_s=120)
    for run in found:
        assert run["meta"]
        assert run["gathered"] == [0, 1]
        assert run["marked"]
        assert run["rest of saved"].losses == pytest.approx(run["rest"].losses, rel=1e-6)
        assert run["step of saved"] == run["step of plain.ckpt"] == 3
        assert run["left of saved"] == run["left of plain.ckpt"] == {"list": [1, 2]}
        for name, value in Scaled().named_parameters():
            assert torch.equal(run["raw"][name], value)
            torch.testing.assert_close(run["raw folder"][name], seen.weights[name], rtol=1e-5, atol=1e-6)
        assert len(run["refused"]) == 6
        for words, message in run["refused"].items():
            assert words in message
    for name, reference in (
        ("seen", seen),
        ("rest", rest),
        ("rest of saved", rest),
        ("rest of plain.ckpt", rest),
    ):
        losses = [sum(pair) / 2 for pair in zip(*(run[name].losses for run in found), strict=True)]
        torch.testing.assert_close(losses, reference.losses, rtol=1e-5, atol=1e-6)
    unsharded = read_checkpoint(tmp_path / "saved")
    assert unsharded["step"] == 3
    plain = torch.load(tmp_path / "plain.ckpt")
    assert unsharded["optimizer"]["param_groups"] == plain["optimizer"]["param_groups"]
    torch.testing.assert_close(
        unsharded["optimizer"]["state"], plain["optimizer"]["state"], rtol=1e-4, atol=1e-6
    )
    consolidate(tmp_path / "saved", tmp_path / "one.ckpt")
    fresh = Scaled()
    fresh.load_state_dict(torch.load(tmp_path / "one.ckpt")["model"])


# --- a LightningModule in Fabric, and the other package ---------------------------------------------------


def _lightning_module() -> list[float]:
    fabric = _fabric(FullShardFabricStrategy())
    module = Lit()
    module.log = lambda *_, **__: None  # type: ignore[method-assign,assignment]
    model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters(), lr=0.02, eps=1e-4))
    for index, batch in enumerate(batches(*place())):
        fabric.backward(model.training_step(batch, index))
        optimizer.step()
        optimizer.zero_grad()
    return module.seen.losses


def _other_package() -> dict[str, Any]:
    import lightning_fabric
    import pytorch_lightning

    from fullshard.lightning.pytorch_lightning import FullShardFabricStrategy as ForFabric
    from fullshard.lightning.pytorch_lightning import FullShardStrategy as ForTrainer

    class Small(pytorch_lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.losses = Scaled(), list[float]()

        def training_step(self, batch: Any, index: int) -> Tensor:
            loss = ((self.net(batch[0]) - batch[1]) ** 2).mean()
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            return _optimizer(self)

    module = Small()
    run = pytorch_lightning.Trainer(
        strategy=ForTrainer(), accelerator="cpu", devices=2, max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False,
    )  # fmt: skip
    run.fit(module, torch.utils.data.DataLoader(batches(*place(), 3), batch_size=None))  # type: ignore[arg-type]
    fabric = lightning_fabric.Fabric(accelerator="cpu", devices=2, strategy=ForFabric())
    fabric.launch()
    seen, inner = Seen(), Scaled()
    model, optimizer = fabric.setup(inner, _optimizer(inner))
    _loop(fabric, model, optimizer, seen)
    return {"trainer": module.losses, "fabric": seen.losses}


def test_lightning_module_in_fabric_and_the_other_package_give_the_same_losses() -> None:
    plain = _trained("auto", {}, {}).losses
    for losses in (
        [run[name] for run in ranks.run(_other_package, 2, timeout_s=120)] for name in ("trainer", "fabric")
    ):
        torch.testing.assert_close(
            [sum(p) / 2 for p in zip(*losses, strict=True)], plain, rtol=1e-5, atol=1e-6
        )
    unsharded = Lit()
    optimizer = torch.optim.AdamW(unsharded.parameters(), lr=0.02, eps=1e-4)
    expected = []
    for batch in batches(0, 1):
        loss = unsharded.loss(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    found = ranks.run(_lightning_module, 2, timeout_s=120)
    torch.testing.assert_close([sum(p) / 2 for p in zip(*found, strict=True)], expected, rtol=1e-5, atol=1e-6)


def test_turning_off_puts_back_lightnings_readers_and_removes_the_name_of_the_strategy() -> None:
    from lightning.fabric.plugins.io import torch_io
    from lightning.fabric.strategies import STRATEGY_REGISTRY
    from lightning.fabric.utilities.cloud_io import _load
    from lightning.pytorch.core import saving
    from lightning.pytorch.strategies import StrategyRegistry

    registries: tuple[Any, ...] = (STRATEGY_REGISTRY, StrategyRegistry)
    fullshard.lightning.turn_off()
    try:
        assert torch_io.pl_load is _load
        assert saving.pl_load is _load
        assert not any("fullshard" in registry for registry in registries)
        fullshard.lightning.turn_off()
    finally:
        fullshard.lightning.turn_on()
    assert torch_io.pl_load is not _load
    assert saving.pl_load is not _load
    assert all("fullshard" in registry for registry in registries)
