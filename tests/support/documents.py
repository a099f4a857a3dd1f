"""The code blocks of README and docs, as `test_documents` runs them.

A page is run as a script from top to bottom, in an empty folder of its own:

    ```python                 runs on two ranks; all blocks of a page share their names
    ```python title="a.py"    is written to a file
    ```yaml title="a.yaml"    is written to a file
    ```bash                   runs in a shell, once, while the ranks wait
    ```text                   is not run: output, pictures
    <!-- before ... -->       Python that is run here and hidden from readers
    <!-- ranks 1 -->          the Python of this page runs on one rank
    <!-- instead ... -->      run instead of the next shell block, which would take too long here:
                              the same command, with at least the same options

`make` and `pip install` are not run from inside the tests: what they name must exist.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_PIECE = re.compile(
    r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<code>.*?)^ *```$"
    r"|<!-- (?P<word>before|ranks|instead)\s(?P<content>.*?)-->",
    re.MULTILINE | re.DOTALL,
)
KINDS = {"python", "bash", "text", "yaml", "json", "toml"}


@dataclass(frozen=True)
class Block:
    kind: str
    code: str
    line: int
    title: str | None = None
    instead: str | None = None  # of a shell block
    hidden: bool = False  # from readers


@dataclass
class Page:
    path: Path
    ranks: int = 2
    blocks: list[Block] = field(default_factory=list)

    @property
    def name(self) -> str:
        return str(self.path.relative_to(ROOT) if self.path.is_relative_to(ROOT) else self.path.name)


def read(path: Path) -> Page:
    page, text, instead = Page(path), path.read_text(), None
    for match in _PIECE.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        if match["word"] == "ranks":
            page.ranks = int(match["content"])
        elif match["word"] == "instead":
            instead = match["content"].strip()
        elif match["word"] == "before":
            page.blocks.append(Block("python", match["content"], line, hidden=True))
        else:
            kind, _, rest = match["info"].strip().partition(" ")
            title = re.search(r'title="([^"]+)"', rest)
            code = re.sub(rf"^{match['indent']}", "", match["code"], flags=re.MULTILINE)
            page.blocks.append(Block(kind, code, line + 1, title[1] if title else None, instead))
            instead = None
    return page


def pages() -> list[Page]:
    return [
        read(path)
        for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
    ]


def library_of(page: Page) -> str:
    """The library that a page is about: ranks that have it imported already start sooner."""
    code = "\n".join(block.code for block in page.blocks if block.kind == "python")
    if "transformers" in code or "accelerate" in code:
        return "onnx" if "onnx" in code else "transformers"
    return "lightning" if "lightning" in code else ""


def options_of(command: str) -> set[str]:
    return set(re.findall(r"(?<!\S)--[a-z][\w-]*", command))


def lines_of(code: str) -> list[str]:
    """Commands of a shell block, continuation lines joined, comments left out."""
    joined = re.sub(r"\\\n\s*", "", code)
    return [bare for line in joined.splitlines() if (bare := re.sub(r"(^|\s+)#.*$", "", line).strip())]
