"""The shape of the package: which room imports which, how much is public, what the documents list."""

from __future__ import annotations

import ast
import functools
import re
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import fullshard as fs
from fullshard import extras

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "fullshard"

BASE = {
    "byte_sizes",
    "host_memory",
    "shares",
    "crc",
    "errors",
    "version",
    "extras",
    "keywords",
    "lazy_names",
    "offload",
    "option_table",
    "options",
    "policy",
    "muon",
    "precision",
    "environment",
    "leaving",
    "stop_signals",
    "link_speeds",
    "text_files",
    "integrations",
    "patches",
}
API = {"api", "build", "data", "guard", "stopping"}
# Each room and the rooms that it may import from. Inside a room the order is free.
ARROWS: dict[str, set[str]] = {
    "base": set(),
    "plan": {"base"},
    "comm": {"base", "plan"},
    "elastic": {"base", "comm"},
    "engine": {"base", "plan", "comm"},
    "state": {"base", "plan", "comm", "engine"},
    "model_libraries": {"base", "engine"},
    "planning": {"base", "plan", "comm", "engine"},
    "api": {
        "base",
        "plan",
        "comm",
        "elastic",
        "engine",
        "state",
        "checkpoint",
        "model_libraries",
        "planning",
    },
    "checkpoint": {"base", "plan", "comm", "elastic", "engine", "state"},
    "doctor": {"base", "plan", "comm", "engine", "api", "checkpoint"},
    "public names": {"base", "api", "checkpoint", "doctor", "planning"},
    "torch_fsdp": {"base", "plan", "comm", "engine", "state", "api", "checkpoint"},
    "hugging_face": {"base", "plan", "comm", "engine", "state", "api", "checkpoint", "model_libraries"},
    "lightning": {"base", "plan", "comm", "engine", "state", "api", "checkpoint"},
    "onnx": {"base", "comm", "engine", "state", "api", "checkpoint"},
    "training": {"base", "plan", "comm", "engine", "api", "checkpoint"},
    "tools": {
        "base",
        "plan",
        "comm",
        "elastic",
        "engine",
        "planning",
        "doctor",
        "api",
        "checkpoint",
        "hugging_face",
        "onnx",
        "training",
    },
}


def _files() -> dict[str, Path]:
    """Every module, by its name inside the package: `plan.units`, say."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


FILES = _files()


def _room(module: str) -> str:
    first = module.split(".")[0]
    if module == "":
        return "public names"
    if module in BASE:
        return "base"
    return "api" if module in API else "tools" if first == "__main__" else first


@functools.cache
def _imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        module = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
        if f"{module}.".startswith("fullshard."):
            base = module.removeprefix("fullshard").lstrip(".")
            names = {f"{base}.{alias.name}".lstrip(".") for alias in node.names}
            found |= (names & set(FILES)) or {base}
    return found


def test_rooms_import_along_the_arrows_alone() -> None:
    wrong = [
        f"{name} imports {other}"
        for name, path in FILES.items()
        for other in _imports(path)
        if _room(other) not in ARROWS[_room(name)] | {_room(name)}
    ]
    assert not wrong, wrong


def test_there_is_no_cycle_of_rooms_or_of_modules() -> None:
    TopologicalSorter(ARROWS).prepare()
    TopologicalSorter({name: _imports(path) - {""} for name, path in FILES.items()}).prepare()


def test_design_lists_every_module_once_and_under_its_room() -> None:
    text = (ROOT / "docs" / "design.md").read_text().split("\n## Rooms\n")[1].split("\n## ")[0]
    listed: list[str] = []
    for section in text.split("\n### ")[1:]:
        rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
        names = [name for row in rows for name in re.findall(r"`([\w.]+)`", row)]
        folder = re.match(r"`(\w+)/`", section)
        for name in names:
            assert folder is None or name.startswith(f"{folder[1]}."), (
                f"{name} under {section.splitlines()[0]}"
            )
        listed += names
    modules = [name for name, path in FILES.items() if path.stem != "__init__"]
    assert sorted(listed) == sorted(modules)


def test_only_comm_runs_collectives() -> None:
    for name, path in FILES.items():
        if _room(name) != "comm":
            assert "import torch.distributed as dist" not in path.read_text(), path
        if name != "tools.simulation.group":  # whose collectives are those of the simulated ranks
            assert "from torch import distributed" not in path.read_text(), path


def test_torch_signatures_use_the_named_engine_interface_alone() -> None:
    for path in (PACKAGE / "torch_fsdp").glob("*.py"):
        inside = re.findall(r"runtime\.(?:gathering|reduction|lanes|units|root)\b", path.read_text())
        assert not inside, f"{path.name} reads {inside}"


def test_core_knows_no_library_and_no_simulator_by_name() -> None:
    for name, path in FILES.items():
        if _room(name) in ("plan", "comm", "engine", "state"):
            text = path.read_text().replace("simulated ranks", "")  # figures are from simulated clusters
            words = re.findall(r"transformers|peft|accelerate\b|lightning|simulat", text, re.IGNORECASE)
            assert not words, f"{name} names {words}"


def test_rivals_are_imported_only_to_compare_with() -> None:
    for name, path in FILES.items():
        if name != "tools.simulation.rivals":
            assert "torch.distributed.fsdp" not in path.read_text(), path
        assert "deepspeed" not in path.read_text().lower(), path
        if name not in ("tools.simulation.run", "tools.cluster_parity"):
            assert "tools.simulation.rivals" not in _imports(path), path


def test_only_one_module_reads_the_environment() -> None:
    for path in FILES.values():
        assert path.stem == "environment" or "environ" not in path.read_text().replace("environment", ""), (
            path
        )


def test_public_names_are_at_most_nineteen_and_all_there() -> None:
    assert len(fs.__all__) <= 19
    for name in fs.__all__:
        assert getattr(fs, name).__doc__, f"fs.{name} has no docstring"


# Bytes of one piece of a file: a checkpoint of pieces of the usual size would be one of gigabytes.
SIZES_OF_PIECES = {"FILE_BYTES", "CHUNK_BYTES", "_ITEM_BYTES", "INLINE_BYTES", "PIECE_BYTES"}


def _overwritten_constants(path: Path) -> set[str]:
    """Constants of the package's modules to which a file assigns, by `=` or by `setattr`."""
    text = path.read_text()
    if not re.search(r"\._?[A-Z][A-Z0-9_]+\b[^\n()]*=|setattr\(", text):
        return set()  # most files: no need to parse them
    tree = ast.parse(text)
    ours = {
        (alias.asname or alias.name).split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        if f"{getattr(node, 'module', None) or alias.name}.".startswith("fullshard.")
    }
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            target, name = node.value, node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("setattr") and len(node.args) > 2:
            target, name = node.args[0], getattr(node.args[1], "value", "")
        else:
            continue
        if isinstance(name, str) and re.fullmatch(r"_?[A-Z][A-Z0-9_]+", name):
            found |= {name} if ast.unparse(target).split(".")[0] in ours else set()
    return found


def test_tests_and_benchmarks_run_the_engine_that_users_get() -> None:
    """A threshold of the engine is an option that a test sets, never a constant that it overwrites."""
    for folder in ("tests", "bench", "examples"):
        for path in (ROOT / folder).rglob("*.py"):
            assert not _overwritten_constants(path) - SIZES_OF_PIECES, path


DOCUMENTS = [ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING")]
DOCUMENTS += sorted((ROOT / "docs").glob("*.md"))


@pytest.mark.parametrize("path", DOCUMENTS, ids=[path.name for path in DOCUMENTS])
def test_relative_links_of_a_document_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", path.read_text()):
        assert (path.parent / target).exists(), f"{path.name} links to {target}"


def test_extras_install_the_versions_that_doors_were_tried_with() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [entry for entries in project["optional-dependencies"].values() for entry in entries]
    for library, versions in extras.TRIED.items():
        named = [entry for entry in wanted if re.match(rf"{library}\b(?!-)", entry) and "==" in entry]
        if library != "pytorch-lightning":  # comes with lightning
            assert [entry.partition("==")[2].removesuffix(".*") for entry in named] == list(versions), library
