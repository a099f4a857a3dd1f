"""Sizes in bytes, as people write them."""

from __future__ import annotations

from fullshard.errors import OptionError

_UNITS = {
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}


def parse_size(text: str, option: str, remedy: str) -> int:
    """'24GiB' in bytes."""
    number, factor = text.strip(), 1
    for suffix, bytes_each in _UNITS.items():
        if number.endswith(suffix):
            number, factor = number.removesuffix(suffix), bytes_each
            break
    try:
        return round(float(number) * factor)
    except (ValueError, OverflowError):
        raise OptionError(f"{option} is {text!r}", remedy) from None
