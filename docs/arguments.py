"""For the API reference: makes a list of `name: meaning` lines in a docstring a section of arguments.

Our docstrings describe arguments as plain lines, which read well in an editor; mkdocstrings' parser expects
them under `Args:` and indented. mkdocs.yml names this extension.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_LINE = re.compile(r"(\w+): ")


def with_section(text: str, parameters: set[str]) -> str:
    """`text` with the first paragraph that lists `parameters` under the heading that the parser expects."""
    paragraphs = text.split("\n\n")
    for i, paragraph in enumerate(paragraphs):
        lines = paragraph.splitlines()
        named = [match[1] for line in lines if (match := _LINE.match(line))]
        if lines and _LINE.match(lines[0]) and set(named) <= parameters:
            paragraphs[i] = "\n".join(["Args:", *(f"    {line}" for line in lines)])
            break
    return "\n\n".join(paragraphs)


class Arguments(griffe.Extension):  # type: ignore[misc]
    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        if func.docstring is not None:
            func.docstring.value = with_section(func.docstring.value, {p.name for p in func.parameters})
