"""`checkpoint_activations=True` changes memory and time, nothing else."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import engines
import ranks

Result = tuple[list[float], dict[str, torch.Tensor]]  # losses, values


def _normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 6))


def _spectral() -> nn.Module:
    return nn.Sequential(parametrizations.spectral_norm(nn.Linear(6, 6)), nn.Tanh(), nn.Linear(6, 6))


def _dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6))


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": _normalised,
    "spectral norm": _spectral,
    "dropout": _dropping,
}


def _train(kind: str, recompute: bool) -> Result:
    import fullshard as fs

    torch.manual_seed(0)
    model = nn.Sequential(*[BLOCKS[kind]() for _ in range(3)], nn.Linear(6, 1))
    engines.shard_blocks(model, checkpoint_activations=recompute)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(int(os.environ["RANK"]))
    torch.manual_seed(1)
    losses = []
    for _ in range(4):
        loss = model(torch.randn(8, 6, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    with fs.full(model, writeback=False):
        values = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return losses, values


def _assert_recomputing_changes_nothing(train: Callable[[str, bool], Result], case: str) -> None:
    plain, recomputed = (ranks.run(train, 2, case, recompute) for recompute in (False, True))
    for (losses, values), (other_losses, other_values) in zip(plain, recomputed, strict=True):
        assert losses == other_losses
        for name, value in values.items():
            assert torch.equal(value, other_values[name]), name


@pytest.mark.parametrize("kind", BLOCKS)
def test_recomputation_leaves_losses_parameters_and_buffers_bitwise_alone(kind: str) -> None:
    _assert_recomputing_changes_nothing(_train, kind)


def _train_cached(family: str, recompute: bool) -> Result:
    """Hugging Face models fill a key-value cache in training unless told otherwise."""
    import transformers

    import fullshard as fs

    torch.manual_seed(0)
    if family == "llama":
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = transformers.LlamaConfig(vocab_size=64, num_key_value_heads=2, use_cache=True, **sizes)
        model: nn.Module = transformers.LlamaForCausalLM(config)
    else:
        sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
        config = transformers.T5Config(vocab_size=64, dropout_rate=0.0, decoder_start_token_id=0, **sizes)
        model = transformers.T5ForConditionalGeneration(config)
    fs.shard(model, checkpoint_activations=recompute)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(int(os.environ["RANK"]))
    tokens = torch.randint(1, 64, (2, 7), generator=generator)
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    losses = []
    for _ in range(3):
        loss = model(input_ids=tokens, attention_mask=mask, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    with fs.full(model, writeback=False):
        return losses, {name: value.detach().clone() for name, value in model.named_parameters()}


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_recomputation_does_not_fill_a_cache_twice(family: str) -> None:
    _assert_recomputing_changes_nothing(_train_cached, family)
