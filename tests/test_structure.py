"""The shape of the package: what imports what, how much is public, what the documents say about it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fullshard as fs

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "fullshard"


def _modules_in_order() -> list[str]:
    table = (ROOT / "docs" / "design.md").read_text().split("## Modules, in the order data flows")[1]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    return [name for row in rows for name in re.findall(r"`(\w+)`", row)]


def _imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "fullshard":
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fullshard."):
            found.add((node.module or "").split(".")[1])
    return found


def test_design_lists_every_module_once() -> None:
    files = sorted(path.stem for path in PACKAGE.glob("*.py") if path.stem != "__init__")
    assert sorted(_modules_in_order()) == files


def test_module_imports_only_from_those_above_it() -> None:
    order = _modules_in_order()
    for position, name in enumerate(order):
        below = _imports(PACKAGE / f"{name}.py") - set(order[:position])
        assert not below, f"{name} imports {below}, which the design lists below it"


def test_only_one_module_runs_collectives() -> None:
    for path in PACKAGE.glob("*.py"):
        text = path.read_text()
        if path.stem != "collectives":
            assert "import torch.distributed as dist" not in text, path
        assert "torch.distributed.fsdp" not in text, path
        assert "deepspeed" not in text.lower(), path


def test_only_one_module_reads_the_environment() -> None:
    for path in PACKAGE.glob("*.py"):
        assert path.stem == "world" or "environ" not in path.read_text(), path


def test_public_names_are_at_most_fifteen_and_all_there() -> None:
    assert len(fs.__all__) <= 15
    for name in fs.__all__:
        assert getattr(fs, name).__doc__, f"fs.{name} has no docstring"


def test_no_module_grows_beyond_a_few_screens() -> None:
    for path in PACKAGE.glob("*.py"):
        assert len(path.read_text().splitlines()) <= 420, path


def test_import_needs_torch_alone() -> None:
    code = (
        "import sys, fullshard; "
        "extra = {'transformers', 'peft', 'rich', 'matplotlib', 'hypothesis', 'pytest'} & set(sys.modules); "
        "assert not extra, extra"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("document", ["README.md", "docs/design.md", "CHANGELOG.md"])
def test_relative_links_of_a_document_lead_somewhere(document: str) -> None:
    path = ROOT / document
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", path.read_text()):
        assert (path.parent / target).exists(), f"{document} links to {target}"
