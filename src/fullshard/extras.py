"""Optional libraries: installed in a tested version, or an error that names what to install."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fullshard.errors import MissingExtra

# The versions that the tests run with, major and minor: other versions have other internals, and an
# integration that half works is worse than none. Libraries used by their public interface are not listed.
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


def is_tested(library: str) -> bool:
    """Whether the installed version of `library` is one that the tests run with, or none is installed."""
    try:
        refuse_untried(library)
    except MissingExtra:
        return False
    return True


def refuse_untried(library: str) -> None:
    """A library whose internals are patched must be installed in a version that the tests run with."""
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
