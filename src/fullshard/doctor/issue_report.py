"""`fullshard doctor --report`: what belongs into an issue report, without secrets.

Environment variables are taken from a list of harmless ones. In texts that others wrote (errors, arguments),
what looks like a secret, and the values of variables whose names look like one, are replaced.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from fullshard import environment
from fullshard.comm.run_records import standings
from fullshard.doctor.cluster import versions
from fullshard.doctor.judges import Event, of_kind
from fullshard.link_speeds import recall_speeds

HIDDEN = "[hidden]"
_WORDS = r"(?:token|secret|passw(?:or)?d|passphrase|credential|api[_-]?key|access[_-]?key|private[_-]?key)"
_SECRETS = (
    re.compile(rf"(?i)([\w.-]*{_WORDS}[\w.-]*[\"']?\s*[=:]\s*[\"']?)([^\s\"',;]+)"),
    re.compile(rf"(?i)(--[\w.-]*{_WORDS}[\w.-]*\s+[\"']?)([^\s\"',;]+)"),
    re.compile(r"(?i)(\bbearer\s+)([\w.~+/=-]{6,})"),
    re.compile(r"(\w+://)([^\s:/@]*:[^\s@]+|[^\s:/@]+)(?=@)"),  # a name may be a token
    re.compile(r"()\b((?:hf|sk|ghp|gho|ghs|github_pat|xox[abp]|glpat|wandb)[_-][\w-]{8,}|AKIA[0-9A-Z]{12,})"),
    re.compile(r"()\b(eyJ[\w-]{8,}\.[\w-]+\.[\w-]+)"),
)


def without_secrets(text: str) -> str:
    for value in environment.secret_values():
        text = text.replace(value, HIDDEN)
    for pattern in _SECRETS:
        text = pattern.sub(rf"\1{HIDDEN}", text)
    home = str(Path.home())
    return text.replace(home, "~") if len(home) > 1 else text


def collected(arguments: Sequence[str] = (), runs: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """Of this process and host; `runs` has what each rank of a script recorded, and how it ended."""
    speeds = recall_speeds()
    devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    report: dict[str, Any] = {
        "versions": versions(),
        "system": platform.platform(),
        "devices": [f"{one.name}, {one.total_memory / 2**30:.0f} GiB" for one in devices] or ["CPU"],
        "cores": environment.cores(),
        "variables": environment.harmless_variables(),
        "links": None if speeds is None else asdict(speeds),
        "flight recorder": standings(),
    }
    if arguments:
        report["script"] = without_secrets(" ".join(Path(word).name for word in arguments))
        report["ranks"] = [_of_rank(run) for run in runs]
    cleaned: dict[str, Any] = _cleaned(report)
    return cleaned


def _of_rank(run: dict[str, Any]) -> dict[str, Any]:
    events: list[Event] = run["events"]
    return {
        "error": run["error"],
        "last lines": run.get("log", [])[-40:],
        "models": [event["about"] for event in of_kind(events, "sharded")],
        "steps": max((event["step"] + 1 for event in of_kind(events, "step")), default=0),
        "stood": [event["places"] for event in of_kind(events, "stood")],
    }


def _cleaned(value: Any) -> Any:
    if isinstance(value, str):
        return without_secrets(value)
    if isinstance(value, dict):
        return {key: _cleaned(item) for key, item in value.items()}
    return [_cleaned(item) for item in value] if isinstance(value, list | tuple) else value


def as_text(report: dict[str, Any]) -> str:
    """Markdown, to paste."""
    lines = ["## fullshard report", ""]
    for key in ("system", "devices", "cores", "versions", "variables", "links"):
        lines += [f"**{key}**: {_inline(report[key])}", ""]
    lines += ["**flight recorder**", *(f"- {line}" for run in report["flight recorder"] for line in run), ""]
    for number, rank in enumerate(report.get("ranks", ())):
        lines += [
            f"**rank {number}** of {report['script']}: {rank['steps']} steps, {rank['error'] or 'no error'}"
        ]
        for model in rank["models"] if number == 0 else ():
            lines += ["", "```text", model["options"], model["topology"], model["plan"], "```"]
        for places in rank["stood"]:
            lines += [f"- {place}" for place in places]
        if rank["error"]:
            lines += ["", "```text", *rank["last lines"], "```"]
        lines.append("")
    return "\n".join(lines)


def _inline(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {item}" for name, item in value.items() if item is not None) or "none"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
