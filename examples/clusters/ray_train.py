"""fullshard in Ray Train: every report has a checkpoint, from which Ray goes on when a worker is lost.

python examples/clusters/ray_train.py --storage /shared/ray
python examples/clusters/ray_train.py --storage /shared/ray --workers 1:4    # elastic
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import ray.train
import torch
from ray.train import (
    Checkpoint,
    CheckpointConfig,
    CheckpointUploadMode,
    FailureConfig,
    RunConfig,
    ScalingConfig,
)
from ray.train.torch import TorchTrainer
from torch import nn

import fullshard as fs

NUM_SAMPLES, BATCH, FEATURES = 256, 32, 8


def train_on_worker(config: dict[str, Any]) -> None:
    """What each worker runs. Ray has started the process group, and fs.shard uses it."""
    torch.manual_seed(0)
    model = fs.shard(nn.Sequential(nn.Linear(FEATURES, 32), nn.ReLU(), nn.Linear(32, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(NUM_SAMPLES, FEATURES, generator=generator)
    targets = torch.randn(NUM_SAMPLES, 1, generator=generator)

    context = ray.train.get_context()
    rank, ranks = context.get_world_rank(), context.get_world_size()
    batches, share = fs.Batches(NUM_SAMPLES, batch_size=BATCH), BATCH // ranks
    start = 0
    # After a failure, on any number of workers. Not ray.train.get_checkpoint(): Ray's controller asks workers
    # for their reports once in a while, and has not heard of one that was made right before a failure.
    if path := fs.latest(config["folder"]):
        start = fs.load(path, model, optimizer)["step"] + 1
    for step in range(start, config["steps"]):
        mine = batches.indices(step)[rank * share : (rank + 1) * share]
        loss = nn.functional.mse_loss(model(inputs[mine]), targets[mine])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == config.get("lose_a_worker_at") and rank == ranks - 1 and start == 0:
            os._exit(1)  # to try it out: as if its machine were gone
        if (step + 1) % config["save_every"] == 0 or step == config["steps"] - 1:
            metrics = {"loss": loss.item(), "step": step, "ranks": ranks, "start": start}
            report(config["folder"], model, optimizer, metrics)


def report(folder: str, model: nn.Module, optimizer: torch.optim.Optimizer, metrics: dict[str, Any]) -> None:
    """All workers save into one folder of the storage, each its part of the model; rank 0 hands it to Ray."""
    path = os.path.join(folder, f"step-{metrics['step']:06}")
    fs.save(path, model, optimizer, extra={"step": metrics["step"]})
    is_first = ray.train.get_context().get_world_rank() == 0
    ray.train.report(
        metrics,
        checkpoint=Checkpoint.from_directory(path) if is_first else None,
        checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD,  # it is in the storage already
    )


def fit(storage: str, workers: int | tuple[int, int], config: dict[str, Any]) -> ray.train.Result:
    run = RunConfig(
        name="fullshard",
        storage_path=storage,
        failure_config=FailureConfig(max_failures=3),
        checkpoint_config=CheckpointConfig(num_to_keep=2),
    )
    config = config | {"folder": os.path.join(storage, "fullshard", "checkpoints")}
    scaling = ScalingConfig(num_workers=workers, use_gpu=torch.cuda.is_available())
    trainer = TorchTrainer(train_on_worker, train_loop_config=config, scaling_config=scaling, run_config=run)
    return trainer.fit()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--storage", required=True, help="a folder that all hosts reach by the same path")
    parser.add_argument("--workers", default="2", help="a number, or MIN:MAX to follow what the cluster has")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--save-every", type=int, default=4)
    parser.add_argument("--lose-a-worker-at", type=int, default=-1, metavar="STEP")
    arguments = parser.parse_args()
    numbers = tuple(int(word) for word in arguments.workers.split(":"))
    config = {
        "steps": arguments.steps,
        "save_every": arguments.save_every,
        "lose_a_worker_at": arguments.lose_a_worker_at,
    }
    workers = numbers[0] if len(numbers) == 1 else (numbers[0], numbers[1])
    result = fit(os.path.abspath(arguments.storage), workers, config)
    print("result", result.metrics, result.checkpoint)


if __name__ == "__main__":
    main()
