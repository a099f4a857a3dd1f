"""The code blocks of README and docs run, and the site with its API reference builds."""

from __future__ import annotations

import ast
import os
import re
import runpy
import subprocess
import sys
import time
import tomllib
import urllib.parse
from pathlib import Path
from typing import Any

import pytest

import documents
import ranks
import warm
from documents import Block, Page

PAGES = documents.pages()
PROJECT = tomllib.loads((documents.ROOT / "pyproject.toml").read_text())["project"]
SHELL_TIMEOUT_S = 1200  # ends a hang; a page of many commands took 240 s while four files ran at a time


def _run_page(page: Page, folder: str, commands: str) -> None:
    """Run a page on every rank; the first rank writes files and runs shell blocks while the others wait."""
    rank, environment = int(os.environ["RANK"]), _without_ranks(os.environ, commands)
    os.chdir(folder)
    names: dict[str, Any] = {"__name__": "__main__", "__file__": page.name}
    for number, block in enumerate(block for block in page.blocks if block.kind != "text"):
        if block.kind == "python" and block.title is None:
            exec(compile("\n" * (block.line - 1) + block.code, page.name, "exec"), names)
            continue
        Path(f".reached-{number}-{rank}").touch()
        done = Path(f".done-{number}")
        if rank == 0:  # when no rank writes a file any more, by the Python before
            _wait_for(*(Path(f".reached-{number}-{other}") for other in range(page.ranks)))
            if block.title is not None:
                Path(block.title).write_text(block.code)
            elif block.kind == "bash":
                _run_shell(page, block, environment)
            done.touch()
        _wait_for(done)


def _wait_for(*paths: Path) -> None:
    while not all(path.exists() for path in paths):
        time.sleep(0.02)


def _without_ranks(environment: Any, commands: str) -> dict[str, str]:
    removed = {
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
    }
    kept = {name: value for name, value in environment.items() if name not in removed}
    path = f"{commands}:{Path(sys.executable).parent}:{kept['PATH']}"
    return {**kept, "PATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "110"}


def _run_shell(page: Page, block: Block, environment: dict[str, str]) -> None:
    where, commands = f"{page.name}:{block.line}", documents.lines_of(block.instead or block.code)
    if block.instead is not None:
        missing = documents.options_of(block.code) - documents.options_of(block.instead)
        assert not missing, f"{where} is run without {missing}"
        assert commands[0].split()[:2] == documents.lines_of(block.code)[0].split()[:2]
    executed = [command for command in commands if not _checked_otherwise(command)]
    command = ["bash", "-euo", "pipefail", "-c", "\n".join(executed)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SHELL_TIMEOUT_S)
    assert done.returncode == 0, f"{where}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


def _checked_otherwise(command: str) -> bool:
    """`make` and `pip install` would change the environment of the tests: what they name must exist."""
    if command.startswith("make "):
        targets = [word for word in command.split()[1:] if "=" not in word]
        dry = ["make", "-n", "-C", str(documents.ROOT), *targets]
        assert subprocess.run(dry, capture_output=True, timeout=300).returncode == 0, command
        return True
    if re.match(r"(python -m )?pip install ", command):
        for extras in re.findall(r"\[([\w,]+)\]", command):
            unknown = set(extras.split(",")) - set(PROJECT["optional-dependencies"])
            assert not unknown, f"{command} names {unknown}"
        return True
    return command.startswith(("cd ", "git clone "))


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_code_blocks_of_a_page_run(page: Page, tmp_path: Path) -> None:
    library = documents.library_of(page)
    arguments = page, str(tmp_path), warm.commands(library)
    ranks.run(_run_page, page.ranks, *arguments, library=library, timeout_s=SHELL_TIMEOUT_S)


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_code_blocks_of_a_page_say_what_they_are(page: Page) -> None:
    unknown = {f"line {b.line}: {b.kind!r}" for b in page.blocks if b.kind not in documents.KINDS}
    assert not unknown, unknown


def test_a_broken_block_is_found(tmp_path: Path) -> None:
    broken = tmp_path / "page.md"
    broken.write_text("<!-- ranks 1 -->\n\n```python\nassert 1 + 1 == 3\n```\n")
    page = documents.read(broken)
    with pytest.raises(ranks.RankFailure, match=r"page\.md.*line 4"):
        ranks.run(_run_page, 1, page, str(tmp_path), "")


def test_argument_lines_of_a_docstring_become_a_section() -> None:
    make = runpy.run_path(str(documents.ROOT / "docs" / "arguments.py"))["with_section"]
    text = "Does it.\n\nmodel: a module,\n    of any kind.\nranks: how many.\n\nNote: none."
    assert make(text, {"model", "ranks"}) == (
        "Does it.\n\nArgs:\n    model: a module,\n        of any kind.\n    ranks: how many.\n\nNote: none."
    )
    assert make(text, {"model"}) == text


DOORS = ("fullshard.torch_fsdp", "fullshard.hugging_face", "fullshard.lightning")


def _exported(module: str) -> list[str]:
    """`__all__`, without importing the module, which may patch its library."""
    tree = ast.parse((documents.ROOT / "src" / module.replace(".", "/") / "__init__.py").read_text())
    lists = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    return list(ast.literal_eval(lists[0]))


def _check_links_from_disk(site: Path) -> None:
    """Opened as files, pages lead to each other, and search finds its index in a script."""
    for page in site.rglob("*.html"):
        if page.name == "404.html":  # a server's own
            continue
        for target in re.findall(r'(?:href|src)="([^"#]+)', page.read_text()):
            if not re.match(r"(https?|mailto|data|javascript):", target):
                file = page.parent / urllib.parse.unquote(target.partition("?")[0])
                assert not target.startswith("/"), f"{page.name} has the absolute link {target}"
                assert file.is_file(), f"{page.name} links to {target}"
    assert (site / "search" / "search_index.js").is_file()


LONGEST = 100  # characters of a line of code; docs/styles/wide.css makes room for them


@pytest.mark.parametrize("page", documents.pages(), ids=lambda page: page.name)
def test_code_blocks_fit_the_page(page: Page) -> None:
    for block in page.blocks:
        if not block.hidden:
            long = [line for line in block.code.splitlines() if len(line) > LONGEST]
            assert not long, f"{page.name}, in the block of line {block.line}: {long[0]}"


def test_site_is_built_without_a_warning_and_its_reference_has_every_public_name(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=documents.ROOT, capture_output=True, text=True, timeout=700)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "index.html").is_file()
    reference = (tmp_path / "site" / "api.html").read_text()
    for door in DOORS:
        for name in _exported(door):
            assert f'id="{door}.{name}"' in reference, f"{door}.{name}"
    for name in set(_exported("fullshard")) - {"__version__"}:
        assert re.search(rf'id="fullshard\.(api\.|errors\.)?{name}"', reference), name
    arguments = reference.split('id="fullshard.shard"')[1].split('id="fullshard.api.plan"')[0]
    assert "Parameters:" in arguments
    _check_links_from_disk(tmp_path / "site")
