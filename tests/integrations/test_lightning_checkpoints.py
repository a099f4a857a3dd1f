"""Checkpoints of Lightning's Trainer on shards: resumed exactly, on other ranks, and by plain Lightning."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning, EarlyStopping, ModelCheckpoint

import fullshard as fs
import ranks
from fullshard.errors import CheckpointError
from fullshard.lightning import consolidate, read_checkpoint
from lightning_cases import (
    Gan,
    Lit,
    Seen,
    assert_same_run,
    batches,
    loader,
    mean,
    place,
    quietly,
    sharded,
    trainer,
    whole_weights,
)


class Kept(Lit):
    """With values of its own in the checkpoint, one of which is no plain data."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = {"numbers": torch.arange(3), "odd": {1, 2}, "rank": place()[0]}
        checkpoint["complex"] = [complex(1, 2)]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen.other = {"mine": checkpoint["mine"], "complex": checkpoint["complex"]}


def _fit(module: Any, run: Any, ckpt_path: Any = None, val: bool = True) -> Seen:
    rank, count = place()
    with quietly():
        run.fit(
            module,
            loader(batches(rank, count)),
            loader(batches(rank, count, 2, seed=5)) if val else None,
            ckpt_path=ckpt_path,
        )
    module.seen.weights = whole_weights(module)
    return module.seen  # type: ignore[no-any-return]


def _keeper(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(folder, "{epoch}", monitor="val", save_top_k=1, save_last=True)


def _save_and_go_on(folder: Path, dropout: float) -> dict[str, Any]:
    keeper = _keeper(folder / "kept")
    run = trainer(sharded(), max_epochs=3, callbacks=[keeper], enable_checkpointing=True)
    module = Kept(dropout=dropout)
    seen = _fit(module, run)
    run.save_checkpoint(folder / "by hand.ckpt")
    run.save_checkpoint(folder / "weights.ckpt", weights_only=True)
    again = {
        "best": keeper.best_model_path,
        "tested": run.test(ckpt_path="best", dataloaders=loader(batches(*place(), 2, seed=5)), verbose=False),
        "score": float(keeper.best_model_score),
    }
    return {"seen": seen} | again


def _stop_after_one(folder: Path, dropout: float) -> Seen:
    run = trainer(sharded(), max_epochs=1)
    seen = _fit(Kept(dropout=dropout), run)
    run.save_checkpoint(folder / "one epoch.ckpt")
    return seen


def _resume(path: Path, dropout: float, strategy: str) -> Seen:
    torch.manual_seed(123)
    return _fit(Kept(dropout=dropout), trainer(sharded(strategy=strategy), max_epochs=3), path)


def _resumed_everywhere(folder: Path) -> dict[str, Any]:
    """Everything that two ranks do with checkpoints of each other and of plain Lightning."""
    found: dict[str, Any] = {}
    for dropout in (0.0, 0.3):
        place_of = folder / str(dropout)
        found[f"never stopped {dropout}"] = _save_and_go_on(place_of, dropout)
        found[f"first {dropout}"] = _stop_after_one(place_of, dropout)
        found[f"resumed {dropout}"] = _resume(place_of / "one epoch.ckpt", dropout, "zero3")
    found["resumed zero2"] = _resume(folder / "0.0" / "one epoch.ckpt", 0.0, "zero2")
    found["from plain"] = _resume(folder / "plain.ckpt", 0.0, "zero3")
    return found


def _plain(folder: Path) -> dict[str, Seen]:
    run = trainer(max_epochs=1)
    first = _fit(Kept(), run)
    run.save_checkpoint(folder / "plain.ckpt")
    return {"first": first, "all": _fit(Kept(), trainer(max_epochs=3))}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Seen], list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("lightning")
    plain = _plain(folder)
    return folder, plain, ranks.run(_resumed_everywhere, 2, folder, timeout_s=240)


def _rest(seen: Seen) -> Seen:
    """The last two of three epochs."""
    return Seen(seen.losses[4:], seen.norms[4:], seen.evaluated[1:], seen.rates[4:], weights=seen.weights)


def test_fit_resumed_from_a_checkpoint_goes_on_with_the_same_bits(runs: Any) -> None:
    _, _, found = runs
    for run in found:
        for dropout in (0.0, 0.3):
            never, resumed = run[f"never stopped {dropout}"]["seen"], run[f"resumed {dropout}"]
            assert resumed.losses == never.losses[4:]
            assert resumed.norms == never.norms[4:]
            assert resumed.rates == never.rates[4:]
            for name, value in never.weights.items():
                assert torch.equal(resumed.weights[name], value), name


def test_fit_and_its_resumption_with_another_strategy_have_the_numbers_of_plain_lightning(runs: Any) -> None:
    _, plain, found = runs
    assert_same_run([run["never stopped 0.0"]["seen"] for run in found], plain["all"])
    assert_same_run([run["resumed zero2"] for run in found], _rest(plain["all"]))


def test_plain_checkpoint_of_one_process_is_resumed_on_shards(runs: Any) -> None:
    _, plain, found = runs
    assert_same_run([run["from plain"] for run in found], _rest(plain["all"]))


def _alone(path: Path) -> Seen:
    return _resume(path, 0.0, "zero3")


def test_checkpoint_of_two_ranks_is_resumed_on_one(runs: Any) -> None:
    folder, plain, _ = runs
    assert_same_run(
        ranks.run(_alone, 1, folder / "0.0" / "one epoch.ckpt", timeout_s=120), _rest(plain["all"])
    )


def test_checkpoint_holds_what_the_module_put_in_it_as_the_first_rank_had_it(runs: Any) -> None:
    _, _, found = runs
    for run in found:
        other = run["resumed 0.0"].other
        assert other["mine"]["numbers"].tolist() == [0, 1, 2]
        assert other["mine"]["odd"] == {1, 2}
        assert other["mine"]["rank"] == 0
        assert other["complex"] == [complex(1, 2)]


def test_model_checkpoint_keeps_the_best_and_the_last_and_test_loads_the_best(runs: Any) -> None:
    folder, plain, found = runs
    for run in found:
        kept = run["never stopped 0.0"]
        best = min(range(3), key=lambda epoch: plain["all"].evaluated[epoch])
        assert Path(kept["best"]).name == f"epoch={best}.ckpt"
        assert kept["tested"][0]["test"] == pytest.approx(kept["score"], rel=1e-5)
    here = {entry.name for entry in (folder / "0.0" / "kept").iterdir()}
    assert here == {f"epoch={best}.ckpt", "last.ckpt"}
    assert fs.latest(folder / "0.0" / "kept") is not None


def test_consolidated_checkpoint_is_a_plain_one(runs: Any, tmp_path: Path) -> None:
    folder, plain, _ = runs
    one = tmp_path / "one.ckpt"
    consolidate(folder / "0.0" / "one epoch.ckpt", one)
    assert_same_run([_fit(Kept(), trainer(max_epochs=3), one)], _rest(plain["all"]))
    loaded = Lit.load_from_checkpoint(one)
    assert loaded.hparams == Lit().hparams
    for name, value in plain["first"].weights.items():
        torch.testing.assert_close(
            dict(loaded.named_parameters())[name].detach(), value, rtol=1e-5, atol=1e-6
        )
    with pytest.raises(CheckpointError, match="exists"):
        consolidate(folder / "0.0" / "one epoch.ckpt", one)
    weights = read_checkpoint(folder / "0.0" / "weights.ckpt")
    assert "optimizer_states" not in weights
    assert weights["state_dict"].keys() == Lit().state_dict().keys()


def test_lightnings_own_readers_read_the_folder(runs: Any) -> None:
    folder, plain, _ = runs
    one = folder / "0.0" / "one epoch.ckpt"
    loaded = Lit.load_from_checkpoint(one, map_location=lambda storage, _: storage, lr=0.5)
    assert loaded.hparams == Lit(lr=0.5).hparams
    for name, value in plain["first"].weights.items():
        torch.testing.assert_close(
            dict(loaded.named_parameters())[name].detach(), value, rtol=1e-5, atol=1e-6
        )
    assert_same_run([_fit(Kept(), trainer(max_epochs=3), one)], _rest(plain["all"]))


# --- callbacks that change the optimizer ------------------------------------------------------------------


class Thaw(BaseFinetuning):
    """Trains the blocks from the second epoch on."""

    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.net.blocks)

    def finetune_function(self, module: Any, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.net.blocks, optimizer, lr=0.01)


class Thawed(Lit):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        self.seen.norms.append(float(torch.nn.utils.get_total_norm(grads)))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.02, eps=1e-4)


def _thawed(folder: Path) -> tuple[Seen, Seen]:
    path = folder / f"thawed on {place()[1]}.ckpt"
    run = trainer(sharded() if place()[1] > 1 else "auto", max_epochs=2, callbacks=[Thaw()])
    first = _fit(Thawed(), run, val=False)
    run.save_checkpoint(path)
    again = trainer(sharded() if place()[1] > 1 else "auto", max_epochs=3, callbacks=[Thaw()])
    return first, _fit(Thawed(), again, path, val=False)


def test_layers_unfrozen_by_a_callback_are_trained_saved_and_resumed(tmp_path: Path) -> None:
    found = ranks.run(_thawed, 2, tmp_path, timeout_s=120)
    for ours, plain in zip(zip(*found, strict=True), _thawed(tmp_path), strict=True):
        assert_same_run(list(ours), plain)


# --- two optimizers, and what is refused -----------------------------------------------------------------


class Factored(Lit):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor(self.parameters(), lr=0.05)


class WithMuon(Thawed):
    """Muon for matrices, AdamW for the others, stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.net.parameters() if p.dim() == 2]
        others = [p for p in self.net.parameters() if p.dim() != 2]
        return torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01, eps=1e-4)

    def training_step(self, batch: Any, index: int) -> None:
        x, y = batch
        loss = (self.net(x) - y).square().mean()
        self.manual_backward(loss)
        self.seen.losses.append(loss.item())
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.step()
        self.net.zero_grad()


def _on_entire_tensors(folder: Path) -> list[tuple[Seen, Seen]]:
    found = []
    for make in (Factored, WithMuon):
        path = folder / f"{make.__name__} on {place()[1]}.ckpt"
        run = trainer(sharded() if place()[1] > 1 else "auto", max_epochs=1)
        first = _fit(make(), run, val=False)
        run.save_checkpoint(path)
        again = trainer(sharded() if place()[1] > 1 else "auto", max_epochs=2)
        found.append((first, _fit(make(), again, path, val=False)))
    return found


def test_steps_on_entire_tensors_are_those_of_plain_lightning_and_resume(tmp_path: Path) -> None:
    found = ranks.run(_on_entire_tensors, 2, tmp_path, timeout_s=120)
    for of_ranks, plain in zip(zip(*found, strict=True), _on_entire_tensors(tmp_path), strict=True):
        for ours, theirs in zip(zip(*of_ranks, strict=True), plain, strict=True):
            # Products in bf16 turn a last bit of a gradient into a last bit of bf16.
            assert_same_run(list(ours), theirs, rtol=2e-2, atol=2e-3)


def _gan(folder: Path) -> dict[str, Any]:
    run = trainer(sharded(), max_epochs=1)
    first = _fit(Gan(), run, val=False)
    run.save_checkpoint(folder / "gan.ckpt")
    resumed = _fit(Gan(), trainer(sharded(), max_epochs=2), folder / "gan.ckpt", val=False)
    uninterrupted = _fit(Gan(), trainer(sharded(), max_epochs=2), val=False)
    return {"first": first, "resumed": resumed, "uninterrupted": uninterrupted}


def test_two_optimizers_are_saved_and_resumed(tmp_path: Path) -> None:
    found = ranks.run(_gan, 2, tmp_path, timeout_s=120)
    for run in found:
        assert run["first"].losses + run["resumed"].losses == run["uninterrupted"].losses
    plain = _fit(Gan(), trainer(max_epochs=2), val=False)
    torch.testing.assert_close(
        mean([run["uninterrupted"].losses for run in found]), plain.losses, rtol=1e-5, atol=1e-6
    )
    consolidate(tmp_path / "gan.ckpt", tmp_path / "plain.ckpt")
    rest = _fit(Gan(), trainer(max_epochs=2), tmp_path / "plain.ckpt", val=False)
    torch.testing.assert_close(rest.losses, plain.losses[8:], rtol=1e-5, atol=1e-6)


def _refused(folder: Path) -> dict[str, str]:
    class Edited(Lit):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["state_dict"] = {k: v for k, v in checkpoint["state_dict"].items() if "head" not in k}

    class Reads(Lit):
        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["state_dict"]

    def refusal(call: Any) -> str:
        with pytest.raises(fs.FullshardError) as caught:
            call()
        return f"{type(caught.value).__name__}: {caught.value}"

    run = trainer(sharded())
    edited = Edited()
    _fit(edited, run)
    found = {"edited": refusal(lambda: run.save_checkpoint(folder / "edited.ckpt"))}
    run = trainer(sharded())
    _fit(Lit(), run)
    run.save_checkpoint(folder / "good.ckpt")
    run.save_checkpoint(folder / "weights.ckpt", weights_only=True)
    (folder / f"file-{place()[0]}").write_text("mine")
    found["reads"] = refusal(lambda: _fit(Reads(), trainer(sharded()), folder / "good.ckpt"))
    found["weights"] = refusal(lambda: _fit(Lit(), trainer(sharded()), folder / "weights.ckpt"))
    found["missing"] = refusal(lambda: _fit(Lit(), trainer(sharded()), folder / "nothing.ckpt"))
    found["other model"] = refusal(lambda: _fit(Gan(), trainer(sharded()), folder / "good.ckpt", val=False))
    found["over a file"] = refusal(lambda: run.save_checkpoint(folder / "file-0"))
    return found


def test_checkpoints_that_cannot_be_honoured_are_refused_by_name(tmp_path: Path) -> None:
    for found in ranks.run(_refused, 2, tmp_path, timeout_s=120):
        assert "on_save_checkpoint" in found["edited"]
        assert "net.head" in found["edited"]
        assert "on_load_checkpoint" in found["reads"]
        assert "on_train_start" in found["reads"]  # on_fit_start comes before a checkpoint is read
        assert "saved without an optimizer" in found["weights"]
        assert "nothing.ckpt" in found["missing"]
        assert found["other model"].startswith("CheckpointError")
        assert "left as it is" in found["over a file"]
    assert (tmp_path / "file-0").read_text() == "mine"
    assert not (tmp_path / "edited.ckpt").exists()


class Thing:
    """No plain data."""


class WithThing(Lit):
    def __init__(self, thing: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()


def _with_object(folder: Path) -> list[float]:
    run = trainer(sharded(), max_epochs=1)
    first = _fit(WithThing(Thing()), run)
    run.save_checkpoint(folder / "thing.ckpt")
    resumed = _fit(WithThing(Thing()), trainer(sharded(), max_epochs=2), folder / "thing.ckpt")
    return first.losses + resumed.losses


def test_object_among_the_hyperparameters_hinders_no_fit_and_is_read_only_when_trusted(
    tmp_path: Path,
) -> None:
    for losses in ranks.run(_with_object, 2, tmp_path, timeout_s=120):
        assert len(losses) == 8
    with pytest.raises(CheckpointError, match=r"'hyper_parameters'.*weights_only=False"):
        read_checkpoint(tmp_path / "thing.ckpt")
    trusted = read_checkpoint(tmp_path / "thing.ckpt", weights_only=False)
    assert type(trusted["hyper_parameters"]["thing"]).__name__ == "Thing"


def _first_rank_saves(folder: Path) -> str:
    run = trainer(sharded())
    _fit(Lit(), run)
    error = ""
    if place()[0] == 0:
        with pytest.raises(fs.FullshardError) as caught:
            run.save_checkpoint(folder / "alone.ckpt")
        error = f"{type(caught.value).__name__}: {caught.value}"
    torch.distributed.barrier()  # where the other rank waits meanwhile
    return error


def test_save_on_the_first_rank_alone_is_an_error_not_a_hang(tmp_path: Path) -> None:
    error, _ = ranks.run(_first_rank_saves, 2, tmp_path, timeout_s=90)
    assert error.startswith("Stalled")
    assert "save" in error
    assert not (tmp_path / "alone.ckpt").exists()


def _stops_early() -> tuple[int, bool]:
    stopper = EarlyStopping("val", patience=1, min_delta=100.0)
    run = trainer(sharded(), max_epochs=9, callbacks=[stopper])
    _fit(Lit(), run)
    return run.current_epoch, os.path.exists("lightning_logs")


def test_early_stopping_stops_all_ranks_at_once() -> None:
    assert {epoch for epoch, _ in ranks.run(_stops_early, 2, timeout_s=120)} == {2}
