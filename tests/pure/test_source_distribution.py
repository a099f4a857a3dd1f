"""The source distribution can be tested: it holds what `make check` and `make test` read."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from fullshard import extras

ROOT = Path(__file__).resolve().parents[2]
KINDS = {".py", ".md", ".toml", ".txt", ".yml", ".yaml", ".json", ".svg", ".png", ".css", ".safetensors", ""}
CACHES = {"__pycache__", ".hypothesis", ".pytest_cache", ".mypy_cache", ".ruff_cache"}


def test_it_holds_sources_tests_documents_examples_and_benchmarks(tmp_path: Path) -> None:
    code = f"from setuptools import build_meta; print(build_meta.build_sdist({str(tmp_path / 'dist')!r}))"
    copy = tmp_path / "copy"  # building leaves a folder beside the package
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", "site", *CACHES))
    (tmp_path / "dist").mkdir()
    subprocess.run([sys.executable, "-c", code], cwd=copy, check=True, capture_output=True, timeout=700)
    (archive,) = (tmp_path / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        held = {name.partition("/")[2] for name in packed.getnames()}
    for top in ("src/fullshard", "tests", "docs", "examples", "bench"):
        for file in (ROOT / top).rglob("*"):
            if file.is_file() and file.suffix in KINDS and not CACHES & set(file.parts):
                assert str(file.relative_to(ROOT)) in held
    for name in ("CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "constraints.txt", "mkdocs.yml", "LICENSE"):
        assert name in held
    assert not [name for name in held if "__pycache__" in name]


class _Installed:
    def __init__(self, record: Any) -> None:
        self._record = record

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return None if self._record is None else json.dumps(self._record)


@pytest.mark.parametrize(
    ("record", "command"),
    [
        (None, "pip install 'fullshard[hf]'"),  # from an index
        ({"url": "file:///a%20b", "dir_info": {"editable": True}}, "pip install -e '/a b[hf]'"),
        ({"url": "file:///src", "dir_info": {}}, "pip install 'fullshard[hf] @ file:///src'"),
        ({"url": "file:///f.whl", "archive_info": {}}, "pip install 'fullshard[hf] @ file:///f.whl'"),
        (
            {"url": "https://host/r.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "pip install 'fullshard[hf] @ git+https://host/r.git@abc'",
        ),
    ],
)
def test_remedy_names_an_install_that_exists(
    record: Any, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "distribution", lambda _: _Installed(record))
    assert extras.install_command("hf") == command


def test_remedy_without_an_installation_names_the_checkout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(name: str) -> Any:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(extras, "distribution", missing)
    assert extras.install_command("cli") == f"pip install 'fullshard[cli] @ {ROOT.as_uri()}'"
