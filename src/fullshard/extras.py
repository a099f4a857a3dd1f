"""Libraries beside the core: there in a version that was tried, or an error that says what to install."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fullshard.errors import MissingExtra

# What the tests run with, as far as the first two numbers: other versions have other insides, and a door that
# half works is worse than one that is shut. Libraries that we only call, as anybody would, are not listed.
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
            raise  # it is there, and misses something of its own
        raise MissingExtra(
            f"{library.partition('.')[0]} is not installed", f"Run: pip install 'fullshard[{extra}]'"
        ) from None


def refuse_untried(library: str) -> None:
    """A library whose insides we reach into must be of a version that we have tests with."""
    try:
        found = version(library)
    except PackageNotFoundError:
        return
    if ".".join(found.split(".")[:2]) not in TRIED[library]:
        tried = " or ".join(f"{v}.*" for v in TRIED[library])
        raise MissingExtra(
            f"{library} {found} is installed, and fullshard is tested with {tried}",
            f"Run: pip install '{library}=={TRIED[library][-1]}.*'",
        )
