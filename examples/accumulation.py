"""Gradient accumulation in bf16: several micro-batches to one optimizer step.

python examples/accumulation.py
torchrun --standalone --nproc-per-node 2 examples/accumulation.py
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from gpt import GPT, GPTConfig, sample_batch, standard_library_bytes

import fullshard as fs

NUM_STEPS = 20
NUM_MICRO_BATCHES = 4
CONFIG = GPTConfig(num_layers=2, num_heads=4, width=64, context=64)


def main() -> None:
    torch.manual_seed(0)
    # Compute and wire in bf16; the parameters at rest, the gradient sums and AdamW's state stay fp32.
    model = fs.shard(GPT(CONFIG), strategy="zero2", precision="bf16")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = standard_library_bytes(1_000_000)
    dice = torch.Generator().manual_seed(dist.get_rank())

    for step in range(NUM_STEPS):
        step_loss = 0.0
        for micro_batch in range(NUM_MICRO_BATCHES):
            is_last = micro_batch == NUM_MICRO_BATCHES - 1
            tokens, targets = sample_batch(text, batch_size=8, context=CONFIG.context, dice=dice)
            # Without the context the gradients are the same; with it there is less to send.
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
