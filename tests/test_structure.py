"""The shape of the package: what imports what, how much is public, what the documents say about it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import fullshard as fs
from fullshard import extras

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "fullshard"


def _modules_in_order() -> list[str]:
    table = (ROOT / "docs" / "design.md").read_text().split("## Modules, in the order data flows")[1]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    return [name for row in rows for name in re.findall(r"`([\w.]+)`", row)]


def _files() -> dict[str, Path]:
    """Every module, by the name that the design gives it: `simulation.network`, say."""
    paths = [path for path in PACKAGE.rglob("*.py") if path.stem != "__init__"]
    return {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in paths}


def _imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        module = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
        if not f"{module}.".startswith("fullshard."):
            continue
        names = {".".join([*module.split(".")[1:], alias.name]) for alias in node.names}
        modules = names & set(_files())
        found |= modules or {module.removeprefix("fullshard.")}
    return found


def test_design_lists_every_module_once() -> None:
    assert sorted(_modules_in_order()) == sorted(_files())


def test_module_imports_only_from_those_above_it() -> None:
    order, files = _modules_in_order(), _files()
    for position, name in enumerate(order):
        below = _imports(files[name]) - set(order[:position])
        assert not below, f"{name} imports {below}, which the design lists below it"


def test_training_does_not_import_the_simulation() -> None:
    for name, path in _files().items():
        if not name.startswith(("simulation.", "cli.", "planning.")):
            assert not any(i.startswith("simulation") for i in _imports(path)), name


def test_only_two_modules_run_collectives() -> None:
    for name, path in _files().items():
        if name not in ("collectives", "agreements"):  # in a step, and outside one
            assert "import torch.distributed as dist" not in path.read_text(), path
        if name != "simulation.group":  # whose collectives are those of the simulated ranks
            assert "from torch import distributed" not in path.read_text(), path


def test_rivals_are_imported_only_to_compare_with() -> None:
    for name, path in _files().items():
        if name != "simulation.rivals":
            assert "torch.distributed.fsdp" not in path.read_text(), path
        assert "deepspeed" not in path.read_text().lower(), path
        if name != "simulation.run":
            assert "simulation.rivals" not in _imports(path), path


def test_only_one_module_reads_the_environment() -> None:
    for path in _files().values():
        assert path.stem == "world" or "environ" not in path.read_text(), path


def test_public_names_are_at_most_fifteen_and_all_there() -> None:
    assert len(fs.__all__) <= 15
    for name in fs.__all__:
        assert getattr(fs, name).__doc__, f"fs.{name} has no docstring"


def test_no_module_grows_beyond_a_few_screens() -> None:
    for path in _files().values():
        assert len(path.read_text().splitlines()) <= 420, path


def test_import_needs_torch_alone() -> None:
    code = (
        "import sys, fullshard; "
        "extra = {'transformers', 'accelerate', 'lightning', 'peft', 'rich', 'typer', 'yaml', "
        "'onnx', 'matplotlib', 'hypothesis', 'pytest'} & set(sys.modules); "
        "extra |= {name for name in sys.modules if name.startswith('fullshard.simulation')}; "
        "assert not extra, extra"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


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
