"""Optional libraries: present in a tested version, or an error that names what to install."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fullshard.errors import MissingExtra

# Versions that the tests run with, by their first two numbers. Other versions have other internals, and an
# integration that half works is worse than none. Libraries used by their public functions only are not here.
TRIED: dict[str, tuple[str, ...]] = {
    "accelerate": ("1.15",),
    "transformers": ("5.22",),
    "trl": ("1.16",),
    "lightning": ("2.6",),
    "pytorch-lightning": ("2.6",),
}


def need(library: str, extra: str) -> Any:
    """Import `library`; a missing one is an error that names the extra which brings it."""
    try:
        return import_module(library)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{library}.".startswith(f"{error.name}."):
            raise  # it is installed, and one of its own dependencies is missing
        raise MissingExtra(
            f"{library.partition('.')[0]} is not installed", f"Run: pip install 'fullshard[{extra}]'"
        ) from None


def refuse_untried(library: str) -> None:
    """Refuse other versions than tested ones of a library whose internals we use."""
    try:
        installed = version(library)
    except PackageNotFoundError:
        return
    if ".".join(installed.split(".")[:2]) not in TRIED[library]:
        tried = " or ".join(f"{v}.*" for v in TRIED[library])
        raise MissingExtra(
            f"{library} {installed} is installed, and fullshard is tested with {tried}",
            f"Run: pip install '{library}=={TRIED[library][-1]}.*'",
        )
