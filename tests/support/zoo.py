"""Model families people train, each with a tiny random configuration, no download, no dropout.

A batch is made from a seed alone; give each rank and step its own. Everything is in train mode.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 32
VOCABULARY = 61  # odd, so that no cut falls on a row
LENGTH = 7
BATCH = 2


@dataclass(frozen=True)
class Family:
    """One kind of model: how to build it, a batch for a seed, and the loss of a model on a batch."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    loss: Callable[[nn.Module, Any], Tensor]


def build(family: Family, seed: int = 0) -> nn.Module:
    """The family's model with the values that `seed` gives, in train mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return family.build().train()


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(10_000 + seed)


def _own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def _tokens(seed: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=_generator(seed))


def _causal(seed: int) -> dict[str, Tensor]:
    tokens = _tokens(seed)
    return {"input_ids": tokens, "labels": tokens}


def _image(seed: int) -> dict[str, Tensor]:
    generator = _generator(seed)
    return {
        "pixel_values": torch.randn(4, 3, 16, 16, generator=generator),
        "labels": torch.randint(0, 5, (4,), generator=generator),
    }


# --- text ---------------------------------------------------------------------------------------------


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            intermediate_size=56,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
            use_cache=False,
        )
    )


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=32,
            n_embd=WIDTH,
            n_layer=3,
            n_head=4,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=48,
            max_position_embeddings=32,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def _masked(seed: int) -> dict[str, Tensor]:
    tokens = _tokens(seed)
    masked = torch.rand(tokens.shape, generator=_generator(seed)) < 0.3
    masked[:, 0] = True
    return {
        "input_ids": tokens.masked_fill(masked, VOCABULARY - 1),
        "labels": tokens.masked_fill(~masked, -100),
        "attention_mask": torch.ones_like(tokens),
    }


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY,
            d_model=WIDTH,
            d_kv=8,
            d_ff=48,
            num_layers=2,
            num_decoder_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            use_cache=False,
            decoder_start_token_id=0,
        )
    )


def _mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=8,
            num_experts_per_tok=2,
            max_position_embeddings=32,
            use_cache=False,
            router_jitter_noise=0.0,
            output_router_logits=True,  # a loss on what inner modules gave, recorded beside the block outputs
            router_aux_loss_coef=0.1,
        )
    )


def _causal_narrow(seed: int) -> dict[str, Tensor]:
    """On odd seeds every token is the same, so all positions go to the same experts and the rest get none."""
    tokens = _tokens(seed)
    if seed % 2:
        tokens = tokens[:1, :1].expand(BATCH, LENGTH).contiguous()
    return {"input_ids": tokens, "labels": tokens}


class ExpertList(nn.Module):
    """A mixture whose experts are modules of their own; one that gets no tokens is not called at all."""

    def __init__(self, num_experts: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, num_experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH)) for _ in range(num_experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        flat = self.norm(x).reshape(-1, WIDTH)
        weight, choice = self.router(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for index in choice.unique().tolist():
            rows = (choice == index).nonzero().squeeze(1)
            out = out.index_add(0, rows, self.experts[index](flat[rows]) * weight[rows, None])
        return x + out.view_as(x)


class ExpertListLM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(ExpertList() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def _next_token_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    tokens = batch["input_ids"]
    logits = model(tokens)
    return F.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1))


def _mamba() -> nn.Module:
    from transformers import MambaConfig, MambaForCausalLM

    return MambaForCausalLM(
        MambaConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            state_size=4,
            num_hidden_layers=2,
            conv_kernel=3,
            expand=2,
            time_step_rank=4,
            use_cache=False,
        )
    )


class LSTMLanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.lstm(self.embed(tokens))[0])
        return logits


def _lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules=["q_proj", "v_proj", "down_proj"])
    model: nn.Module = get_peft_model(_llama(), config)  # type: ignore[arg-type]
    # peft starts B at zero, which leaves A without a gradient in the first step.
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


# --- pictures -----------------------------------------------------------------------------------------


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            image_size=16,
            patch_size=8,
            hidden_size=WIDTH,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=48,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            num_labels=5,
        )
    )


def _clip() -> nn.Module:
    from transformers import CLIPConfig, CLIPModel

    text = {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 16,
        "eos_token_id": VOCABULARY - 1,
        "bos_token_id": 0,
        "pad_token_id": 1,
    }
    vision = {
        "hidden_size": WIDTH,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 16,
        "patch_size": 8,
    }
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=16))


def _pairs(seed: int) -> dict[str, Any]:
    generator = _generator(seed)
    tokens = torch.randint(2, VOCABULARY - 1, (4, LENGTH), generator=generator)
    tokens[:, -1] = VOCABULARY - 1
    pixels = torch.randn(4, 3, 16, 16, generator=generator)
    return {"input_ids": tokens, "pixel_values": pixels, "return_loss": True}


def _resnet() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(
        ResNetConfig(
            num_channels=3,
            embedding_size=8,
            hidden_sizes=[16, 32],
            depths=[2, 2],
            layer_type="basic",
            num_labels=5,
        )
    )


class WeightNormed(nn.Module):
    """Blocks whose weights are computed from a magnitude and a direction at every use."""

    def __init__(self) -> None:
        super().__init__()
        weight_norm = nn.utils.parametrizations.weight_norm
        self.blocks = nn.Sequential(
            *(nn.Sequential(weight_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh()) for _ in range(3))
        )
        self.head = weight_norm(nn.Linear(WIDTH, 5))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(x))
        return logits


def _vectors(seed: int) -> tuple[Tensor, Tensor]:
    generator = _generator(seed)
    return torch.randn(6, WIDTH, generator=generator), torch.randint(0, 5, (6,), generator=generator)


def _classify(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family("llama", _llama, _causal, _own_loss),
        Family("gpt2_tied", _gpt2, _causal, _own_loss),
        Family("bert", _bert, _masked, _own_loss),
        Family("t5", _t5, _causal, _own_loss),
        Family("vit", _vit, _image, _own_loss),
        Family("clip", _clip, _pairs, _own_loss),
        Family("mixtral", _mixtral, _causal_narrow, _own_loss),
        Family("experts_skipped", ExpertListLM, _causal_narrow, _next_token_loss),
        Family("mamba", _mamba, _causal, _own_loss),
        Family("resnet_batchnorm", _resnet, _image, _own_loss),
        Family("lstm", LSTMLanguageModel, _causal, _next_token_loss),
        Family("lora", _lora, _causal, _own_loss),
        Family("weight_norm", WeightNormed, _vectors, _classify),
    )
}
