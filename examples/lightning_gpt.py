"""Train a small sharded GPT with Lightning, resume it, and convert its checkpoint to a plain one.

python examples/lightning_gpt.py                                # Lightning starts the second rank
torchrun --standalone --nproc-per-node 2 examples/lightning_gpt.py
"""

import tempfile
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fullshard.lightning import FullShardStrategy, consolidate

TEXT = str(__doc__).encode() * 50
CONTEXT = 32


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norms[0](x)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], x.device, x.dtype)
        x = x + self.attention(hidden, hidden, hidden, attn_mask=mask, is_causal=True, need_weights=False)[0]
        return x + self.mlp(self.norms[1](x))


class GPT(lightning.LightningModule):
    def __init__(self, width: int = 64, layers: int = 4, lr: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 256)

    def forward(self, bytes_: Tensor) -> Tensor:
        x = self.tokens(bytes_) + self.positions.weight[: bytes_.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = nn.functional.cross_entropy(self(batch[0][:, :-1]).flatten(0, 1), batch[0][:, 1:].flatten())
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])


def main() -> None:
    lightning.seed_everything(0, verbose=False)
    text = torch.frombuffer(bytearray(TEXT), dtype=torch.uint8).long()
    sequences = text[: len(text) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)
    loader = DataLoader(TensorDataset(sequences), batch_size=16, shuffle=True)

    def trainer(epochs: int, folder: str) -> lightning.Trainer:
        return lightning.Trainer(
            strategy=FullShardStrategy(strategy="zero3"),
            accelerator="cpu",
            devices=2,
            max_epochs=epochs,
            gradient_clip_val=1.0,
            callbacks=[ModelCheckpoint(folder, "{epoch}", save_top_k=-1)],
            logger=False,
            enable_progress_bar=False,
        )

    with tempfile.TemporaryDirectory() as folder:  # rank 0's folder is used by all
        run = trainer(1, folder)
        run.fit(GPT(), loader)
        first = float(run.callback_metrics["loss"])
        saved = run.checkpoint_callback.best_model_path

        again = trainer(2, folder)
        again.fit(GPT(), loader, ckpt_path=saved)  # a new module, as in a new run
        if again.is_global_zero:
            print(f"loss after one epoch {first:.3f}, after two {float(again.callback_metrics['loss']):.3f}")
            plain = Path(folder) / "plain.ckpt"
            consolidate(saved, plain)  # readable by Lightning without fullshard
            print("loaded as a plain", type(GPT.load_from_checkpoint(plain)).__name__)


if __name__ == "__main__":
    main()
