"""`fullshard env`: versions and devices for a bug report."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fullshard.environment import cores
from fullshard.extras import TRIED
from fullshard.tools.cli.commands import Command
from fullshard.tools.cli.printing import as_json_text, table
from fullshard.tools.cli.shared import AsJson
from fullshard.version import VERSION

_OTHERS = ("numpy", "safetensors", "peft", "isal", "typer", "rich", "onnx", "onnxruntime", "onnxscript")


def _machine(json: AsJson = False) -> int:
    facts = _facts()
    if json:
        as_json_text(facts)
        return 0
    rows = [(name, str(value)) for name, value in facts.items() if name != "libraries"]
    rows += [(name, _library(state)) for name, state in facts["libraries"].items()]
    table(("what", "here"), rows, left=(0, 1))
    return 0


def _facts() -> dict[str, Any]:
    import torch

    backends = torch.distributed
    available = {
        "gloo": backends.is_gloo_available(),
        "nccl": backends.is_nccl_available(),
        "mpi": backends.is_mpi_available(),
    }
    devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return {
        "fullshard": VERSION,
        "python": platform.python_version(),
        "system": platform.platform(),
        "torch": torch.__version__,
        "CUDA of torch": torch.version.cuda,
        "backends": ", ".join(name for name, there in available.items() if there) or "none",
        "devices": ", ".join(f"{one.name} ({one.total_memory / 2**30:.0f} GiB)" for one in devices) or "CPU",
        "cores": cores(),
        "libraries": {name: _library_state(name) for name in (*TRIED, *_OTHERS)},
    }


def _library_state(name: str) -> dict[str, Any]:
    try:
        installed: str | None = version(name)
    except PackageNotFoundError:
        installed = None
    tested = TRIED.get(name)
    known = None if tested is None or installed is None else ".".join(installed.split(".")[:2]) in tested
    return {"version": installed, "tried": known, "tested_with": None if tested is None else list(tested)}


def _library(state: dict[str, Any]) -> str:
    if state["version"] is None:
        return "not installed"
    if state["tried"] is False:
        return f"{state['version']}, NOT TRIED: tests run with {' or '.join(state['tested_with'])}"
    return str(state["version"])


MACHINE = Command(
    "env",
    _machine,
    "print versions and devices, for a bug report",
    """\
Versions of fullshard, Python, torch and the libraries that integrations are tested with;
backends and devices. The output contains no path and no host name.""",
    """\
examples:
  fullshard env
  fullshard env --json

Exit code 0.""",
)
