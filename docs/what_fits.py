"""The tables of docs/offload.md of what fits on common machines, by the functions of `fullshard plan`.

python docs/what_fits.py
"""

from __future__ import annotations

from functools import cache

from fullshard.planning import answers
from fullshard.planning.answers import Question
from fullshard.planning.needs import Step
from fullshard.planning.offloading import Request
from fullshard.planning.sizes import Shape
from fullshard.planning.subjects import Batch, decoder

GIB = 2**30
CARDS, RANKS, HOSTS, DISK = (24, 48, 80), (1, 4, 8), (64, 128, 256, 512, 1024), 4096


def llama(layers: int, width: int, feed: int) -> Shape:
    """With heads of 128, of which 8 share a key, and a vocabulary of 128 Ki."""
    return Shape(layers, width, width // 128, 8, feed, 128256, 8192)


# Each about 1.4 times as large as the one before.
FAMILY = [
    llama(16, 2048, 8192),
    llama(24, 2560, 8960),
    llama(28, 3072, 8192),
    llama(32, 3584, 9728),
    llama(32, 4096, 14336),
    llama(36, 4608, 15360),
    llama(40, 5120, 17408),
    llama(44, 6144, 20480),
    llama(56, 6144, 23552),
    llama(64, 7168, 22528),
    llama(64, 8192, 28672),
    llama(80, 8192, 28672),
    llama(88, 9216, 32768),
    llama(96, 10240, 36864),
    llama(96, 12288, 43008),
    llama(112, 13312, 45056),
    llama(120, 15360, 49152),
    llama(126, 16384, 53248),
]
QUESTION = Question(memory_bytes=80 * GIB, strategies=("zero3",), recompute=True)


@cache
def traced(index: int) -> Step:
    subject = decoder("", FAMILY[index], Batch(1, 4096))
    return answers.step_of(subject, QUESTION)[0]


def fits(index: int, card: int, ranks: int, request: Request | None) -> bool:
    question = Question(ranks, card * GIB, ("zero3",), recompute=True, offload=request)
    return question.fits(answers._need(traced(index), question, "zero3"))


def requests(host: int) -> list[Request]:
    """Of a cell with three numbers."""
    return [
        Request("optimizer", host * GIB),
        Request("auto", host * GIB),
        Request("auto", host * GIB, DISK * GIB),
    ]


def shown(index: int) -> str:
    """Billions of parameters; '-': not even the smallest."""
    if index < 0:
        return "-"
    billions = FAMILY[index].num_parameters / 1e9
    return f"{billions:.1f}" if billions < 10 else f"{billions:.0f}"


def largest(card: int, ranks: int, request: Request | None) -> str:
    low, high = -1, len(FAMILY)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle, card, ranks, request) else (low, middle)
    return shown(low)


def page() -> str:
    rows = ["| devices | `None` | " + " | ".join(f"{host} GiB" for host in HOSTS) + " |"]
    rows.append("| --- | ---: |" + " ---: |" * len(HOSTS))
    for card in CARDS:
        for ranks in RANKS:
            cells = [" / ".join(largest(card, ranks, one) for one in requests(host)) for host in HOSTS]
            rows.append(
                f"| {ranks} x {card} GiB | {largest(card, ranks, None)} | " + " | ".join(cells) + " |"
            )
    return "\n".join(rows)


if __name__ == "__main__":
    print(page())
