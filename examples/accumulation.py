"""Gradient accumulation in bf16: one optimizer step for several micro-batches.

python examples/accumulation.py
torchrun --standalone --nproc-per-node 2 examples/accumulation.py
"""

import inspect
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fullshard as fs
from fullshard.training.gpt import GPT, GPTConfig

NUM_STEPS = 10
NUM_MICRO_BATCHES = 4
BATCH_SIZE = 2  # per rank and micro-batch
CONFIG = GPTConfig(num_layers=2, num_heads=4, width=64, context=64, vocabulary=256)


def sample_batch(text: Tensor, dice: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random windows of the text, and the same windows one byte later."""
    starts = torch.randint(len(text) - CONFIG.context, (BATCH_SIZE, 1), generator=dice)
    positions = starts + torch.arange(CONFIG.context)
    return text[positions], text[positions + 1]


def main() -> None:
    torch.manual_seed(0)
    # Compute and communication in bf16; parameters at rest, gradient sums and AdamW's state stay in fp32.
    model = fs.shard(GPT(CONFIG), strategy="zero2", precision="bf16")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    source = "".join(inspect.getsource(module) for module in (inspect, nn.modules.module))
    text = torch.tensor(list(source.encode()))
    dice = torch.Generator().manual_seed(dist.get_rank())  # each rank draws its own data

    for step in range(NUM_STEPS):
        step_loss = 0.0
        for micro_batch in range(NUM_MICRO_BATCHES):
            is_last = micro_batch == NUM_MICRO_BATCHES - 1
            tokens, targets = sample_batch(text, dice)
            # The gradients are the same without the context; with it, less is sent.
            with nullcontext() if is_last else fs.accumulate(model):
                loss = model(tokens, targets).loss / NUM_MICRO_BATCHES
                loss.backward()
            step_loss += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step:2}  loss {step_loss:.4f}")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
