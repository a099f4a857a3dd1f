"""Lightning's Trainer on shards beyond a fit: evaluation, meta, tuning, two fits, refusals."""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import (
    Callback,
    EMAWeightAveraging,
    ModelSummary,
    StochasticWeightAveraging,
)
from torch import Tensor, nn
from torch.utils.data import IterableDataset

import fullshard as fs
import ranks
from fullshard.errors import MissingExtra, NotSupported, OptionError
from fullshard.lightning import FullShardStrategy
from lightning_cases import (
    Lit,
    Net,
    assert_same_run,
    batches,
    fitted,
    loader,
    place,
    quietly,
    sharded,
    trainer,
)

# --- evaluation ----------------------------------------------------------------------------------------


class Stream(IterableDataset[Any]):
    """Batches whose number nobody knows before they are over."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __iter__(self) -> Any:
        return iter(self.items)


def _uneven(each: list[int], last: int = 1) -> list[Any]:
    """As many batches as this rank gets, the last of `last` samples; rank after rank they are one list."""
    rank, count = place()
    items = batches(0, 1, sum(each), each=2, seed=7)
    mine = items[sum(each[:rank]) : sum(each[: rank + 1])] if count > 1 else items
    return [
        tuple(t[:last] for t in item) if i == len(mine) - 1 and rank == count - 1 else item
        for i, item in enumerate(mine)
    ]


def _evaluated(strategy: Any) -> dict[str, Any]:
    run, module = trainer(strategy), Lit()
    found: dict[str, Any] = {}
    with quietly():
        found["validate"] = run.validate(module, loader(_uneven([3, 1])), verbose=False)
        found["test"] = run.test(module, loader(_uneven([1, 4])), verbose=False)
        found["predict"] = run.predict(module, loader(_uneven([3, 1])))
        found["stream"] = run.predict(module, loader(Stream(_uneven([2, 3]))))  # type: ignore[arg-type]
        run.fit(module, loader(batches(*place())))
        found["after fit"] = run.predict(module, loader(_uneven([1, 3])))
        run.fit(module, loader(batches(*place())))
        found["after two"] = run.test(module, loader(batches(*place(), 2)), verbose=False)
    return found


def _evaluated_on_shards() -> dict[str, Any]:
    return _evaluated(sharded())


def test_evaluation_with_other_numbers_of_batches_on_each_rank_ends_with_the_numbers_of_one() -> None:
    found, plain = ranks.run(_evaluated_on_shards, 2, timeout_s=120), _evaluated("auto")
    for name in ("predict", "stream", "after fit"):
        together = [tensor for run in found for tensor in run[name]]
        torch.testing.assert_close(together, plain[name], rtol=1e-5, atol=1e-6)
    for name in ("validate", "test", "after two"):
        assert found[0][name] == found[1][name]  # sync_dist
    torch.testing.assert_close(found[0]["after two"], plain["after two"], rtol=1e-5, atol=1e-6)


class Several(Lit):
    def validation_step(self, batch: Any, index: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, index)

    def predict_step(self, batch: Any, index: int, dataloader_idx: int = 0) -> Tensor:
        return super().predict_step(batch, index)


def _several(strategy: Any, each: list[list[int]], wrap: Any, **options: Any) -> dict[str, Any]:
    """Dataloaders with so many batches on each rank, one after the other; metrics are summed over ranks."""
    run, module = trainer(strategy, **options), Several()
    module.allow_zero_length_dataloader_with_multiple_devices = wrap is list and not all(map(all, each))
    loaders = [loader(wrap(_uneven(counts, last=2))) for counts in each]
    with quietly():
        # A rank without a batch has logged nothing, and sums nothing.
        values = run.validate(module, loaders, verbose=False) if all(map(all, each)) else None
        predicted = run.predict(module, loaders)
    return {"values": values, "predicted": predicted}


CASES: dict[str, tuple[list[list[int]], Any, dict[str, Any]]] = {
    "lengths": ([[3, 1], [1, 3]], list, {}),
    "streams": ([[2, 1], [1, 2]], Stream, {}),
    "a stream that ends before the limit": (
        [[2, 1]],
        Stream,
        {"limit_val_batches": 3, "limit_predict_batches": 3},
    ),
    "nothing on one rank": ([[2, 0]], Stream, {}),
    "no length on one rank": ([[2, 0]], list, {}),
}


def _several_on_shards() -> dict[str, Any]:
    return {name: _several(sharded(), each, wrap, **o) for name, (each, wrap, o) in CASES.items()}


def test_dataloaders_with_other_lengths_on_each_rank_end_one_after_the_other_on_all() -> None:
    found = ranks.run(_several_on_shards, 2, timeout_s=120)
    for name, (each, wrap, _) in CASES.items():
        plain = _several("auto", each, wrap)
        for run in found:
            torch.testing.assert_close(run[name]["values"], plain["values"], rtol=1e-5, atol=1e-6)
        mine = [run[name]["predicted"] for run in found]
        together = [a + b for a, b in zip(*mine, strict=True)] if len(each) > 1 else mine[0] + mine[1]
        torch.testing.assert_close(together, plain["predicted"], rtol=1e-5, atol=1e-6)


# --- building ------------------------------------------------------------------------------------------


class OnMeta(Lit):
    """Its network is built in configure_model without memory; its values come when the fit starts."""

    def __init__(self) -> None:
        super().__init__()
        self.net: Any = None

    def configure_model(self) -> None:
        if self.net is None:
            with torch.device("meta"):
                self.net = Net()

    def on_fit_start(self) -> None:
        if "_fullshard" in self.__dict__:
            self.load_state_dict(Lit().state_dict())


class Metric(nn.Module):
    """Keeps a tensor that is neither parameter nor buffer, as metrics do; `_apply` moves it."""

    def __init__(self) -> None:
        super().__init__()
        self.total, self.moved = torch.zeros(1), False

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self.total, self.moved = fn(self.total), True
        return super()._apply(fn, recurse)


class Measured(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.metric = Metric()


@pytest.fixture(scope="module")
def meta_runs() -> Any:
    return ranks.run(_on_meta, 2, timeout_s=120)


def _on_meta() -> Any:
    module = Measured()
    fitted(lambda: module, sharded())
    seen = fitted(OnMeta, sharded())
    seen.other = {"moved": module.metric.moved}
    return seen


def test_metric_in_a_module_goes_where_the_shards_go(meta_runs: Any) -> None:
    assert all(seen.other["moved"] for seen in meta_runs)


def test_network_built_on_meta_in_configure_model_trains_as_one_that_had_memory(meta_runs: Any) -> None:
    assert_same_run(meta_runs, fitted(Lit))


class Steps(Callback):
    """Counts reductions of gradients: one a step, whatever the number of micro-batches."""

    def __init__(self) -> None:
        self.postponed: list[bool] = []

    def on_before_backward(self, run: Any, module: Any, loss: Tensor) -> None:
        self.postponed.append(module.__dict__["_fullshard"].reduction.postponing)


def _used(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    counter = Steps()
    fitted(Lit, FullShardStrategy(strategy="zero1"), micro=3, accumulate_grad_batches=3, callbacks=[counter])
    found["postponed"] = counter.postponed
    # The table of layers counts unsharded parameters.
    printed = io.StringIO()
    with redirect_stdout(printed):
        fitted(Lit, "fullshard", callbacks=[ModelSummary()], enable_model_summary=True)
    summary = ModelSummary()
    run, module = trainer(sharded(), callbacks=[summary], enable_model_summary=True), Lit()
    with quietly():
        run.fit(module, loader(batches(*place())))
    table = summary._summary(run, module)
    found["counted"] = (table.total_parameters, table.trainable_parameters, table.param_nums)
    found["at rest"] = sum(p.numel() for p in module.parameters())
    # Tuning saves, trains and restores.
    run, module = trainer(sharded(), default_root_dir=folder, max_epochs=3), Lit()
    before = {n: p.clone() for n, p in Lit().named_parameters()}
    with quietly():
        tuned = lightning.pytorch.tuner.Tuner(run).lr_find(
            module, loader(batches(*place(), 16)), num_training=8, update_attr=False
        )
    assert tuned is not None
    found["tried"] = tuned.results["lr"]
    with fs.full(module, writeback=False):
        found["restored"] = all(torch.equal(p, before[n]) for n, p in module.named_parameters())
    found["left behind"] = sorted(entry.name for entry in folder.iterdir())
    return found


def test_trainer_accumulates_counts_and_tunes_on_shards(tmp_path: Path) -> None:
    unsharded = sum(p.numel() for p in Lit().parameters())
    found = ranks.run(_used, 2, tmp_path, timeout_s=120)
    for run in found:
        assert run["postponed"] == [True, True, False] * 4
        assert run["counted"][:2] == (unsharded, unsharded)
        assert run["counted"][2] == [unsharded - 3]
        assert run["at rest"] < unsharded
        assert len(run["tried"]) == 8
        assert run["restored"]
        assert run["left behind"] == []
    assert sum(run["at rest"] for run in found) == unsharded


# --- what is refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"start_method": "spawn"}, NotSupported, "start_method='spawn'"),
        ({"start_method": "fork"}, NotSupported, "start_method='fork'"),
        ({"find_unused_parameters": True}, OptionError, "'find_unused_parameters'"),
        ({"ranks_inside": 2}, OptionError, "hybrid"),
        ({"ranks_inside": 0, "strategy": "hybrid"}, OptionError, "ranks_inside is 0"),
    ],
)
def test_option_that_means_nothing_here_is_refused(options: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        FullShardStrategy(**options)


def _refused() -> dict[str, str]:
    from lightning.pytorch.plugins import AsyncCheckpointIO, FSDPPrecision

    class Batched(Lit):
        def __init__(self) -> None:
            super().__init__()
            self.net.first = nn.Sequential(self.net.first, nn.BatchNorm1d(8))  # type: ignore[assignment]

    class Rebuilds(Lit):
        def configure_model(self) -> None:
            self.net = Net()

    def other_numbers_of_batches() -> str:
        with pytest.raises(fs.FullshardError) as caught, quietly():
            trainer(sharded()).fit(Lit(), loader(batches(*place(), 4 - place()[0])))
        return str(caught.value)

    def refusal(make: Any, ours: dict[str, Any] | None = None, **options: Any) -> str:
        with pytest.raises(fs.FullshardError) as caught:
            fitted(make, sharded(**(ours or {})), **options)
        return f"{type(caught.value).__name__}: {caught.value}"

    twice = Lit()
    fitted(lambda: twice, sharded())
    again = Rebuilds()
    fitted(lambda: again, sharded())
    return {
        "sync_batchnorm": refusal(Batched, sync_batchnorm=True),
        "StochasticWeightAveraging": refusal(Lit, callbacks=[StochasticWeightAveraging(0.1)]),
        "EMAWeightAveraging": refusal(Lit, callbacks=[EMAWeightAveraging()]),
        "AsyncCheckpointIO": refusal(Lit, plugins=[AsyncCheckpointIO()]),
        "FSDPPrecision": refusal(Lit, plugins=[FSDPPrecision("bf16-mixed")]),
        "torch.compile": refusal(lambda: torch.compile(Lit())),
        "strategy='zero3'": refusal(lambda: twice, {"strategy": "zero2"}),
        "configure_model": refusal(lambda: again),
        "unknown strategy": refusal(Lit, {"strategy": "zero9"}),
        "4 on rank 0, 3 on rank 1": other_numbers_of_batches(),
    }


def test_what_cannot_be_honoured_is_refused_by_name() -> None:
    for found in ranks.run(_refused, 2, timeout_s=120):
        for name, message in found.items():
            assert name in message, message


def test_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.startswith("fullshard.lightning")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("lightning", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtra, match=r"\[lightning\]"):
        import fullshard.lightning
    monkeypatch.delitem(sys.modules, "lightning")
    monkeypatch.setattr("fullshard.extras.version", lambda library: "2.5.1")
    with pytest.raises(MissingExtra, match=r"lightning 2.5.1 is installed.*2\.6"):
        import fullshard.lightning  # noqa: F401
