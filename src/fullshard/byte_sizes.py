"""Sizes in bytes, as people write them."""

from __future__ import annotations

from math import ceil, floor

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


def size(num_bytes: float) -> str:
    """'24.0 GiB', to be read."""
    for suffix in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024 or suffix == "GiB":
            return f"{num_bytes:.0f} {suffix}" if suffix == "B" else f"{num_bytes:.1f} {suffix}"
        num_bytes /= 1024
    raise AssertionError


def size_option(num_bytes: int, at_most: bool = False) -> str:
    """'24.1GiB', to be written as an option: `parse_size` gives at least as much, or at most as much."""
    rounded = floor if at_most else ceil
    for suffix in ("GiB", "MiB", "KiB"):
        if num_bytes >= _UNITS[suffix]:
            return f"{rounded(num_bytes / _UNITS[suffix] * 10) / 10:.1f}{suffix}"
    return str(num_bytes)
