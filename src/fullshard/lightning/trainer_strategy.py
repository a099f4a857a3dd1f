"""A mixin that makes Lightning's data parallel strategy for the Trainer a sharded one.

The base is Lightning's DDPStrategy: ranks, launcher, samplers, reductions and broadcasts are its own, and the
accelerator may be a CPU. Of its internals only the wrapping of the module is replaced. ModelParallelStrategy
was tried: it requires `configure_model`, refuses '16-mixed', and brings a mesh for tensor parallelism.

A mixin, because `lightning` and `pytorch_lightning` have a class of their own each: see `__init__` and
`pytorch_lightning`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import nn

from fullshard import api, environment
from fullshard.engine.runtime import is_sharded, runtime_of
from fullshard.engine.tensors import cast_floats
from fullshard.errors import NotSupported, RankMismatch, StateError
from fullshard.lightning import checkpoints, finetuning, summary
from fullshard.lightning.consolidation import read_values
from fullshard.lightning.precisions import engine_precision, is_mixed
from fullshard.lightning.sharding import Place, StrategyOptions, refuse_checkpoint_io, shard_module, split
from fullshard.lightning.step_forward import join_forward, run_in_forward
from fullshard.lightning.uneven_loaders import EvaluationLoaders, skip_together

if TYPE_CHECKING:
    from lightning.pytorch.strategies import DDPStrategy as _Base
else:
    _Base = object

_FITTING = "fit"  # trainer.state.fn is an enum of strings
_AVERAGING = ("StochasticWeightAveraging", "WeightAveraging")


class Metadata(dict[str, Any]):
    """Lightning's values of a checkpoint. Weights and optimizer state were read straight into the shards."""

    def __missing__(self, name: str) -> Any:
        if name in ("state_dict", "optimizer_states"):
            raise NotSupported(
                f"checkpoint[{name!r}] in on_load_checkpoint: it was read straight into the shards",
                "Change values in on_train_start instead, inside `with fs.full(self):`.",
            )
        if name in checkpoints.UNUSED:
            raise checkpoints.not_plain(name, "the checkpoint")
        raise KeyError(name)


class ShardedTrainer(_Base):
    """A mixin that shards the LightningModule, and saves and loads it on all ranks together."""

    def __init__(self, **options: Unpack[StrategyOptions]) -> None:
        self._options, of_base = split(dict(options), _base_of(type(self)))
        super().__init__(**of_base)
        self._plain_file = False  # whether the checkpoint that was loaded last is one plain file
        self._loaders: EvaluationLoaders

    # ---- setting up

    def setup(self, trainer: Any) -> None:
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        module = self._module
        self._refuse_unfit(trainer, module)
        self._set_launch()
        precision = engine_precision(self.precision_plugin, self._options.get("precision"))
        if not is_sharded(module):
            self.precision_plugin.convert_module(module)
        shard_module(module, self._options, precision, Place(self.root_device, self.world_size))
        self.model_to_device()  # its values are there; this sets the `device` of a LightningModule
        if trainer.state.fn == _FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        summary.count_unsharded(trainer)
        finetuning.compare_by_identity(trainer)
        skip_together(trainer, module, self._all_gather)

    def _refuse_unfit(self, trainer: Any, module: nn.Module) -> None:
        if self._layer_sync is not None:
            raise NotSupported(
                "Trainer(sync_batchnorm=True), which exchanges layers before and after each fit",
                "Call torch.nn.SyncBatchNorm.convert_sync_batchnorm on your layers yourself.",
            )
        if getattr(module, "_compiler_ctx", None) is not None:
            raise NotSupported(
                f"torch.compile of the entire {type(module).__name__}",
                "Compile its blocks: call block.compile() on each in on_fit_start.",
            )
        refuse_checkpoint_io(self._checkpoint_io)
        for callback in trainer.callbacks if trainer.state.fn == _FITTING else ():
            kinds = [c.__name__ for c in type(callback).__mro__]
            averaging = next((name for name in _AVERAGING if name in kinds), None)
            if averaging is not None:
                raise NotSupported(
                    f"the callback {type(callback).__name__}: it averages parameters of a copy that was "
                    "made before sharding",
                    "Average the shards in a callback of your own: on each rank, element by element.",
                )

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """`trainer.init_module(empty_init=True)` builds on meta: setup allocates unit by unit."""
        on_meta = torch.device("meta") if empty_init else nullcontext()
        with on_meta, self.precision_plugin.tensor_init_context():
            yield

    def teardown(self) -> None:
        # The base class would move the module to the host, which sharded modules refuse.
        kept, self._lightning_module = self._lightning_module, None
        try:
            super().teardown()
        finally:
            self._lightning_module = kept
            self._set_launch()  # Lightning resets the number of ranks, over which the module is still sharded

    def _set_launch(self) -> None:
        environment.fill_in(self.global_rank, self.world_size, self.local_rank, self.num_processes)

    @property
    def _module(self) -> Any:
        assert self.lightning_module is not None
        return self.lightning_module

    # ---- steps

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        step = super().training_step
        if not self._module.automatic_optimization:
            return step(*args, **kwargs)  # runs backward and optimizer itself, between passes of its own
        return self._run(step, args, kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate(super().validation_step, args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate(super().test_step, args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate(super().predict_step, args, kwargs)

    def _run(self, step: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        compute = runtime_of(self._module).options.precision.compute
        if compute is not None and not is_mixed(self.precision_plugin):
            args, kwargs = cast_floats(args, compute), cast_floats(kwargs, compute)
        return run_in_forward(self._module, step, args, kwargs)

    def _evaluate(self, step: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._loaders.uneven:
            return self._run(step, args, kwargs)
        self._all_gather(1)
        output = self._run(step, args, kwargs)
        self._finish_ended_loaders()
        return output

    def _all_gather(self, number: int) -> list[int]:
        return runtime_of(self._module).comm.all_gather_int(number)

    def _finish_ended_loaders(self) -> None:
        """Join the forwards of ranks that still have batches of the dataloaders that ended here."""
        for _ in range(self._loaders.count_ended()):
            while any(self._all_gather(0)):
                join_forward(self._module)

    def on_train_start(self) -> None:
        """Refuse different numbers of batches: a rank with more would wait at the end of the fit."""
        super().on_train_start()
        trainer = self._module.trainer
        own = trainer.num_training_batches  # infinite where it is not known
        counts = self._all_gather(own if isinstance(own, int) else -1)
        if len(set(counts)) > 1 and trainer.max_steps == -1:
            numbers = ", ".join(f"{n} on rank {rank}" for rank, n in enumerate(counts))
            raise RankMismatch(
                f"ranks have different numbers of training batches: {numbers}",
                "Give every rank the same number, for example by limit_train_batches, or set max_steps.",
            )

    def on_validation_start(self) -> None:
        super().on_validation_start()
        self._compare_lengths()

    def on_test_start(self) -> None:
        super().on_test_start()
        self._compare_lengths()

    def on_predict_start(self) -> None:
        super().on_predict_start()
        self._compare_lengths()

    def _compare_lengths(self) -> None:
        trainer = self._module.trainer
        loop = trainer.predict_loop if trainer.predicting else trainer._evaluation_loop
        self._loaders = EvaluationLoaders(loop, self._all_gather)
        if self._loaders.has_no_batch:
            self._finish_ended_loaders()

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """Run forward and backward before the step, not inside it, where our check of gradients comes first.

        An optimizer that calls its closure a second time runs them again.
        """
        results = iter((closure(),))

        def first_result_or_again() -> Any:
            for result in results:
                return result
            return closure()

        return super().optimizer_step(optimizer, first_result_or_again, model, **kwargs)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        with api.accumulate(self._module):
            yield

    # ---- checkpoints

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True  # values are loaded into shards, which must exist

    @property
    def lightning_restore_optimizer(self) -> bool:
        return self._plain_file  # otherwise load_checkpoint did

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """StateShards; plain, unsharded tensors inside `with fs.full(module, writeback=False):`."""
        return dict(self._module.state_dict())

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Empty: fs.save writes state from the shards, and a rank's part must not be taken for all of it."""
        return {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        if storage_options is not None:
            raise NotSupported("storage_options, which belong to a CheckpointIO", "Leave them out.")
        values = dict(checkpoint)
        self._refuse_changed(values.pop("state_dict", None))
        with_optimizers = values.pop("optimizer_states", None) is not None
        checkpoints.save_all(filepath, self._module, self.optimizers if with_optimizers else (), values)

    def _refuse_changed(self, state: Mapping[str, Any] | None) -> None:
        """on_save_checkpoint may edit what Lightning would write; here the shards are written."""
        if state is None:
            raise NotSupported("on_save_checkpoint that removes 'state_dict'", "Leave the weights in.")
        held = self._module.state_dict()
        changed = sorted(held.keys() ^ state.keys())
        changed = changed or [
            n for n, value in state.items() if getattr(value, "shape", None) != held[n].shape
        ]
        if changed:
            raise NotSupported(
                f"on_save_checkpoint that changes checkpoint['state_dict'] ({changed[0]!r} here)",
                "Save additional values under other names, and all weights as they are.",
            )

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        module = self._module
        if not is_sharded(module):
            raise StateError("a checkpoint is loaded before the module is sharded", "Load it by ckpt_path=.")
        weights_only = self._options.get("weights_only") if weights_only is None else weights_only
        optimizers = self.optimizers if module.trainer.state.fn == _FITTING else []
        control = checkpoints.joined_control_group(module, "load")
        path = Path(control.broadcast_object(checkpoint_path))
        self._plain_file = control.broadcast_object(path.is_file())
        if self._plain_file:
            read = partial(super().load_checkpoint, path, weights_only=weights_only)
            return control.together(read, "reading a checkpoint")
        strict, only = bool(module.strict_loading), weights_only
        if optimizers and finetuning.is_used(module.trainer):
            values = control.together(partial(read_values, path, weights_only), "reading Lightning's values")
            finetuning.rebuild_groups(module.trainer, module, values.get("callbacks", {}))
        return Metadata(checkpoints.load_all(path, module, optimizers, strict=strict, weights_only=only))

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """For a plain file, as on_load_checkpoint left it; a folder was read by load_checkpoint."""
        if self._plain_file:
            super().load_model_state_dict(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        finetuning.rebuild_groups(self._module.trainer, self._module, checkpoint.get("callbacks", {}))
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            checkpoints.load_plain(optimizer, saved)

    def remove_checkpoint(self, filepath: Any) -> None:
        if self.is_global_zero and not checkpoints.remove(filepath):
            super().remove_checkpoint(filepath)


def _base_of(kind: type) -> type:
    """Lightning's class, which follows the mixin."""
    mro = kind.__mro__
    return mro[mro.index(ShardedTrainer) + 1]
