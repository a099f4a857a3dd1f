"""Optional libraries: present in a tested version, or an error that names what to install."""

from __future__ import annotations

import json
import shlex
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

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
        what = f"{library.partition('.')[0]} is not installed"
        raise MissingExtra(what, f"Run: {install_command(extra)}") from None


def need_installed(library: str, extra: str) -> None:
    """As `need`, without importing it."""
    if find_spec(library) is None:
        raise MissingExtra(f"{library} is not installed", f"Run: {install_command(extra)}")


def install_command(extra: str) -> str:
    """The command that adds an extra to this installation, from where it was installed: a folder, an archive,
    a repository, or an index."""
    checkout = Path(__file__).resolve().parents[2]
    try:
        record = json.loads(distribution("fullshard").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        record = {"url": checkout.as_uri()} if (checkout / "pyproject.toml").is_file() else {}
    url = record.get("url")
    if url is None:
        return f"pip install 'fullshard[{extra}]'"
    if record.get("dir_info", {}).get("editable"):
        folder = url2pathname(urlsplit(url).path)
        return f"pip install -e {shlex.quote(f'{folder}[{extra}]')}"
    if "vcs_info" in record:
        url = f"{record['vcs_info']['vcs']}+{url}@{record['vcs_info']['commit_id']}"
    return f"pip install {shlex.quote(f'fullshard[{extra}] @ {url}')}"


def is_tested(library: str) -> bool:
    """Whether the installed version of `library` is one that the tests run with, or none is installed."""
    try:
        refuse_untried(library)
    except MissingExtra:
        return False
    return True


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
