"""What was measured on a cluster, remembered in a file in the user's cache folder: bandwidth and latency of
its links, and the rates of its devices.

One JSON file: a version, and an entry per cluster for each of both. It is replaced in one rename. A file that
cannot be read, or that another version wrote, is ignored with a warning, and replaced by the next
measurement. A rank reads its own host's file: ranks have to agree on what they read before they act on it.
"""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fullshard.environment import cache_folder, cluster_name
from fullshard.text_files import replace_text

VERSION = 1
_REMEDY = "Measure again with fullshard env --probe or --rates, which replace it."


@dataclass(frozen=True)
class LinkSpeed:
    """One level: what each of `ranks` ranks sends, one way, while all ranks send; and the time of one hop."""

    ranks: int
    bandwidth_bytes_s: float
    latency_s: float


@dataclass(frozen=True)
class ClusterSpeeds:
    """Inside a node and across nodes; None where no two ranks are."""

    backend: str
    device: str
    ranks: int
    inside: LinkSpeed | None
    across: LinkSpeed | None
    measured: str  # when, in UTC


def cluster_key(device: str) -> str:
    """The name of this cluster in the file: hosts that differ in their numbers only are one cluster."""
    name = re.sub(r"[0-9]+", "#", cluster_name())
    return f"{hashlib.sha256(name.encode()).hexdigest()[:12]} {device}"


def device_name() -> str:
    """Of this rank's device; ranks on CPUs have one name."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def speeds_file() -> Path:
    return cache_folder() / "links.json"


def recall_speeds() -> ClusterSpeeds | None:
    """What was measured on this cluster with devices such as this rank's, or None."""
    return _read(speeds_file()).get(cluster_key(device_name()))


def remember_speeds(speeds: ClusterSpeeds) -> Path:
    """Adds this cluster's entry; returns the file. A level that was not measured keeps its earlier speed."""
    path, key = speeds_file(), cluster_key(speeds.device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is about to be replaced
        entries, rates = _read(path), _read_rates(path)
    before = entries.get(key)
    if before is not None and before.backend == speeds.backend:
        inside, across = speeds.inside or before.inside, speeds.across or before.across
        speeds = replace(speeds, inside=inside, across=across)
    entries[key] = speeds
    return _write(path, entries, rates)


def recall_rates() -> dict[str, Any] | None:
    """The rates of devices such as this rank's, as `remember_rates` was given them, or None."""
    return _read_rates(speeds_file()).get(cluster_key(device_name()))


def remember_rates(rates: dict[str, Any]) -> Path:
    """Adds the rates of this rank's device; returns the file."""
    path = speeds_file()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        entries, before = _read(path), _read_rates(path)
    return _write(path, entries, before | {cluster_key(device_name()): rates})


def _write(path: Path, entries: dict[str, ClusterSpeeds], rates: dict[str, dict[str, Any]]) -> Path:
    clusters = {key: asdict(entry) for key, entry in entries.items()}
    content = {"version": VERSION, "clusters": clusters, "rates": rates}
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, json.dumps(content, indent=1))
    return path


def _read_rates(path: Path) -> dict[str, dict[str, Any]]:
    """Of files that have none, or cannot be read, nothing: `_read` warns of those."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["version"] != VERSION:
            return {}
        return {str(key): dict(value) for key, value in content.get("rates", {}).items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def _read(path: Path) -> dict[str, ClusterSpeeds]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["version"] != VERSION:
            _warn(f"{path.name} was written by another version ({content['version']!r}) and is ignored")
            return {}
        return {str(key): _entry(value) for key, value in content["clusters"].items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        _warn(f"{path.name} with measured link speeds cannot be read and is ignored ({type(error).__name__})")
        return {}


def _entry(value: dict[str, Any]) -> ClusterSpeeds:
    texts = {name: str(value[name]) for name in ("backend", "device", "measured")}
    return ClusterSpeeds(
        **texts, ranks=int(value["ranks"]), inside=_level(value["inside"]), across=_level(value["across"])
    )


def _level(value: dict[str, Any] | None) -> LinkSpeed | None:
    if value is None:
        return None
    speed = LinkSpeed(int(value["ranks"]), float(value["bandwidth_bytes_s"]), float(value["latency_s"]))
    if not (0 < speed.bandwidth_bytes_s < float("inf") and 0 <= speed.latency_s < float("inf")):
        raise ValueError(f"a link of {speed}")
    return speed


def _warn(what: str) -> None:
    warnings.warn(f"{what}. {_REMEDY}", stacklevel=4)
