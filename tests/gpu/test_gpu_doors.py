"""The front doors on a real GPU: a world of one over NCCL, and two ranks that share the card over gloo."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def _needs(*names: str) -> pytest.MarkDecorator:
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(128), nn.Linear(128, 512), nn.Linear(512, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(128, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _net(device: str = "cuda") -> Net:
    torch.manual_seed(0)
    return Net().to(device)


def _batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(8, 128, generator=torch.Generator().manual_seed(10 * step + rank)).cuda()


def _exact() -> None:
    torch.cuda.set_device(0)
    torch.backends.cuda.matmul.allow_tf32 = False


def _train(model: Any, batches: list[torch.Tensor]) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    norms = []
    for x in batches:
        model(x).square().mean().backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def _expected(world: int) -> list[float]:
    return _train(_net(), [torch.cat([_batch(step, r) for r in range(world)]) for step in range(3)])


def _through_torchs_signatures(world: int, rank: int) -> list[list[float]]:
    from fullshard.torch_fsdp import FullyShardedDataParallel, fully_shard
    from fullshard.torch_fsdp.wrap import ModuleWrapPolicy

    mine = [_batch(step, rank) for step in range(3)]
    norms = []
    for device in ("cuda", "cpu"):  # torch's moves a model to the device of the mesh, or to device_id
        second = _net(device)
        for block in second.blocks:
            fully_shard(block)
        fully_shard(second)
        where = {"device_id": 0} if device == "cpu" else {}
        first = FullyShardedDataParallel(_net(device), auto_wrap_policy=ModuleWrapPolicy({Block}), **where)
        norms += [_train(second, mine), _train(first, mine)]
    return norms


def _offloaded_by_torchs_signatures(world: int, rank: int) -> list[list[float]]:
    """Parameters rest on the host, and batches too: both signatures move them, as torch does."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    from fullshard.torch_fsdp import CPUOffload, FullyShardedDataParallel, fully_shard
    from fullshard.torch_fsdp.wrap import ModuleWrapPolicy

    mine = [_batch(step, rank).cpu() for step in range(3)]
    norms = []
    for device in ("cuda", "cpu"):
        second = _net(device)
        for block in second.blocks:
            fully_shard(block, offload_policy=CPUOffloadPolicy())
        fully_shard(second, offload_policy=CPUOffloadPolicy())
        first = FullyShardedDataParallel(
            _net(device), cpu_offload=CPUOffload(True), auto_wrap_policy=ModuleWrapPolicy({Block})
        )
        norms += [_train(second, mine), _train(first, mine)]
        for model in (second, first):
            assert {p.device.type for p in model.parameters()} == {"cpu"}
            model.to("cuda")  # it computes there: nothing to do
        weight = second.head.weight.full_tensor()
        assert (weight.device.type, weight.shape) == ("cpu", (8, 128))
    with torch.device("meta"):
        last = Net()
    fully_shard(last, offload_policy=CPUOffloadPolicy())
    last.to_empty(device="cpu")
    last.load_state_dict(_net("cpu").state_dict())
    return [*norms, _train(last, mine)]


def _signatures() -> tuple[list[float], list[list[float]]]:
    _exact()
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    found = _through_torchs_signatures(world, rank) + _offloaded_by_torchs_signatures(world, rank)
    return _expected(world), found


@pytest.mark.parametrize("world", [1, 2])
def test_torchs_signatures_give_the_norms_of_one_process(world: int) -> None:
    for expected, found in ranks.run(_signatures, world, init=True, timeout_s=120):
        for norms in found:
            torch.testing.assert_close(torch.tensor(norms), torch.tensor(expected), rtol=1e-4, atol=1e-6)


def _tensor_parallel() -> tuple[list[float], list[float]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    import fullshard as fs

    _exact()
    expected = _train(_net(), [_batch(step, 0) for step in range(3)])
    mesh = init_device_mesh("cuda", (1, 1), mesh_dim_names=("dp", "tp"))
    model = _net()
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fs.shard(model, mesh=mesh["dp"])
    return expected, _train(model, [_batch(step, 0) for step in range(3)])


def test_tensor_parallel_model_trains_on_a_gpu() -> None:
    (expected, found), *_ = ranks.run(_tensor_parallel, 1, fresh=True, timeout_s=120)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-4, atol=1e-6)


def _inference() -> dict[str, Any]:
    import fullshard as fs

    _exact()
    rank = torch.distributed.get_rank()
    plain = _net()
    model = fs.shard(copy.deepcopy(plain), merge_units=0, keep_full=0)
    x = _batch(0, rank)
    with torch.no_grad():
        expected = plain(x)
    resting = torch.cuda.memory_allocated()
    with fs.inference(model) as kept:
        for _ in range(2 + rank):
            found = model(x)
        inside = torch.cuda.memory_allocated()
    again = _train(model, [_batch(step, rank) for step in range(2)])
    return {
        "close": torch.allclose(found, expected, atol=1e-5),
        "everything": kept.everything,
        "grew": inside - resting,
        "bytes": kept.num_bytes,
        "norms": again,
    }


def test_units_stay_full_on_a_gpu_as_long_as_inference_lasts() -> None:
    for said in ranks.run(_inference, 2, init=True, timeout_s=120):
        assert said["close"]
        assert said["everything"]
        assert said["grew"] >= 0.9 * said["bytes"] > 0


def _llama(device: str = "cuda") -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=128, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(device).eval()


def _generates() -> tuple[list[int], list[list[int]]]:
    import fullshard as fs

    _exact()
    rank = torch.distributed.get_rank()
    plain = _llama()
    prompt = torch.randint(3, 128, (1, 4 + 2 * rank), generator=torch.Generator().manual_seed(rank)).cuda()
    how = {"max_new_tokens": 6 + 3 * rank, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    expected = plain.generate(prompt, **how)
    found = [fs.shard(_llama(), offload=offload).generate(prompt, **how) for offload in (None, "host")]
    return expected.tolist(), [tokens.tolist() for tokens in found]


@_needs("transformers")
def test_ranks_generate_different_lengths_on_a_gpu() -> None:
    for expected, found in ranks.run(_generates, 2, init=True, timeout_s=180):
        assert found == [expected, expected]


def _exports(folder: Path) -> bool:
    import fullshard as fs
    from fullshard.onnx import files

    _exact()
    model = fs.shard(_llama())
    ids = torch.randint(3, 128, (2, 9)).cuda()
    files.export(model, folder / "m.onnx", {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    return (folder / "m.onnx").is_file()


@_needs("transformers", "onnx", "onnxruntime", "onnxscript")
def test_live_model_on_a_gpu_is_exported(tmp_path: Path) -> None:
    assert ranks.run(_exports, 1, tmp_path, init=True, timeout_s=240) == [True]


CONFIG = """
output: run
model: {gpt: {layers: 2, heads: 2, width: 64}}
data: {train: [text.txt]}
training: {steps: 12, sequence_length: 32, batch_size: 4, learning_rate: 1.0e-2}
sharding: {precision: bf16, offload: OFFLOAD}
checkpoints: {every: 5}
logging: {tensorboard: false}
device: cuda
"""


def _lesson(folder: str, offload: str) -> dict[str, Any]:
    import json

    from fullshard.training.command import train

    path = Path(folder)
    (path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 400)
    (path / "config.yaml").write_text(CONFIG.replace("OFFLOAD", offload))
    code = train(path / "config.yaml", [], None, True)
    rows = [json.loads(line) for line in (path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    return {"code": code, "losses": losses, "report": (path / "run" / "report.html").is_file()}


@_needs("yaml", "rich")
@pytest.mark.parametrize("offload", ["null", "host"])
def test_train_command_learns_on_a_gpu(offload: str, tmp_path: Path) -> None:
    said = _lesson(str(tmp_path), offload)
    assert said["code"] == 0
    assert said["report"]
    assert said["losses"][-1] < said["losses"][0] - 0.5


def _trainer(folder: str, fsdp: str | None) -> list[tuple[float, float]]:
    """Losses and gradient norms of a Trainer, and what it saved is loaded again."""
    from importlib.metadata import version

    from fullshard import extras

    if fsdp is not None:
        for library in ("accelerate", "transformers"):  # this is about the device, not about versions
            extras.TRIED[library] = (".".join(version(library).split(".")[:2]),)
        import fullshard.hugging_face  # noqa: F401
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    _exact()
    rows = torch.randint(3, 128, (32, 16), generator=torch.Generator().manual_seed(5))
    data = [{"input_ids": row, "labels": row} for row in rows]
    args = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=8,
        max_steps=4,
        learning_rate=1e-2,
        logging_steps=1,
        save_steps=2,
        report_to="none",
        disable_tqdm=True,
        **({"fsdp": fsdp} if fsdp is not None else {}),
    )
    trainer = Trainer(model=_llama("cpu").train(), args=args, train_dataset=data)
    trainer.train()
    if fsdp is not None:
        trainer.save_model(f"{folder}/final")
        assert "_fullshard" in vars(trainer.model)
        again = AutoModelForCausalLM.from_pretrained(f"{folder}/final")
        assert sum(p.numel() for p in again.parameters()) == sum(p.numel() for p in _llama().parameters())
    return [(row["loss"], row["grad_norm"]) for row in trainer.state.log_history if "grad_norm" in row]


@_needs("transformers", "accelerate")
def test_trainer_with_fsdp_gives_the_losses_of_one_process_on_a_gpu(tmp_path: Path) -> None:
    plain = ranks.run(_trainer, 1, str(tmp_path / "plain"), None, fresh=True, timeout_s=240)[0]
    for fsdp in ("full_shard auto_wrap", "full_shard offload auto_wrap"):
        # One rank: accelerate's barrier wants a GPU for each.
        found = ranks.run(_trainer, 1, str(tmp_path / "ours"), fsdp, fresh=True, timeout_s=240)[0]
        torch.testing.assert_close(torch.tensor(found), torch.tensor(plain), rtol=2e-3, atol=1e-3)


def _lightning(folder: str, options: dict[str, Any] | None) -> list[float]:
    import lightning
    from torch.utils.data import DataLoader, TensorDataset

    from fullshard.lightning import FullShardStrategy

    _exact()
    norms: list[float] = []

    class Lit(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = Net()

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            assert self.device == batch[0].device  # what a step makes tensors on
            return self.net(batch[0]).square().mean()

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in self.parameters()])))

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    data = TensorDataset(torch.cat([_batch(step, 0) for step in range(4)]).cpu())
    trainer = lightning.Trainer(
        strategy="auto" if options is None else FullShardStrategy(**options), accelerator="gpu", devices=1,
        max_epochs=1,
        logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        use_distributed_sampler=False,
    )  # fmt: skip
    module = Lit()
    trainer.fit(module, DataLoader(data, batch_size=8))
    if options is not None:
        trainer.save_checkpoint(f"{folder}/run.ckpt")
        trainer.fit(Lit(), DataLoader(data, batch_size=8), ckpt_path=f"{folder}/run.ckpt")
    return norms


@_needs("lightning")
def test_lightning_strategy_gives_the_norms_of_plain_lightning_on_a_gpu(tmp_path: Path) -> None:
    plain = ranks.run(_lightning, 1, str(tmp_path), None, fresh=True, timeout_s=180)[0]
    for options in ({}, {"cpu_offload": True}):
        found = ranks.run(_lightning, 1, str(tmp_path), options, fresh=True, timeout_s=180)[0]
        torch.testing.assert_close(torch.tensor(found), torch.tensor(plain), rtol=1e-4, atol=1e-6)
