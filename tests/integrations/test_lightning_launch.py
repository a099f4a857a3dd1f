"""A model of transformers in a LightningModule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import torch

import fullshard as fs
import ranks
from lightning_cases import loader, place, quietly, sharded, trainer


class Causal(lightning.LightningModule):
    """A model of transformers in a LightningModule."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        self.model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=32,
                hidden_size=16,
                intermediate_size=24,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=1,
            )
        )
        self.losses: list[float] = []

    def training_step(self, batch: Any, index: int) -> Any:
        loss = self.model(input_ids=batch, labels=batch).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4)


def _tokens(rank: int, count: int) -> list[Any]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 32, (4, 6), generator=generator).chunk(count)[rank] for _ in range(3)]


def _causal(folder: Path) -> list[float]:
    module = Causal()
    with quietly():
        trainer(sharded()).fit(module, loader(_tokens(*place())))
    with fs.full(module.model, writeback=False):
        if place()[0] == 0:
            module.model.save_pretrained(folder)
    return module.losses


def test_model_of_transformers_trains_and_is_saved_for_from_pretrained(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    module = Causal()
    with quietly():
        trainer().fit(module, loader(_tokens(0, 1)))
    found = ranks.run(_causal, 2, tmp_path / "whole", timeout_s=120)
    losses = [sum(pair) / 2 for pair in zip(*found, strict=True)]
    torch.testing.assert_close(losses, module.losses, rtol=1e-5, atol=1e-6)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    for name, value in module.model.named_parameters():
        torch.testing.assert_close(dict(loaded.named_parameters())[name], value, rtol=1e-4, atol=1e-5)
