"""Text from the trained model."""

from __future__ import annotations

import torch
from torch import nn

from fullshard.training.models import Subject
from fullshard.training.settings import Sample
from fullshard.training.tokenizers import Tokenizer


@torch.no_grad()
def write_sample(
    model: nn.Module, subject: Subject, tokenizer: Tokenizer, settings: Sample, device: torch.device
) -> str:
    """The prompt, continued. Every rank must call it, and gets the same text: all draw the same numbers.

    Each token is a forward over the full context, without a key-value cache: fast enough for a few hundred
    tokens, and the same forward as in training.
    """
    ids: list[int] = [int(i) for i in tokenizer.encode(settings.prompt.encode(), "'sample.prompt'")]
    if not ids:
        ids = [tokenizer.end if tokenizer.end is not None else 0]
    prompt_length, dice = len(ids), torch.Generator().manual_seed(0)
    was_training = model.training
    model.eval()
    while len(ids) < prompt_length + settings.tokens:
        window = ids[-subject.context :] if subject.context is not None else ids
        scores = subject.logits(model, torch.tensor([window], device=device))[0, -1].float().cpu()
        # A vocabulary may be wider than the tokenizer's; ids beyond it mean nothing.
        chances = torch.softmax(scores[: tokenizer.size] / settings.temperature, dim=0)
        ids.append(int(torch.multinomial(chances, 1, generator=dice)))
        if ids[-1] == tokenizer.end:
            break
    model.train(was_training)
    return printable(tokenizer.decode(ids))


def printable(text: str) -> str:
    """The text without what could steer a terminal: an untrained model may write anything."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
