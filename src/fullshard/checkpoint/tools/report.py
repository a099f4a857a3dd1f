"""The report of `fullshard inspect`, `verify` and `export`: one record, printed as text or as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Progress = Callable[[int, int], None]  # bytes done, bytes in total
Row = tuple[str, ...]  # one cell is a line; two are a label and its text
_LABEL_CHARS = 9


@dataclass(frozen=True)
class Field:
    """One fact: `value` under `name` in the JSON, `rows` in the text. Either may be absent."""

    name: str
    value: Any = None
    rows: tuple[Row, ...] = ()
    heading: str = ""  # printed above the rows
    in_json: bool = True


@dataclass(frozen=True)
class Report:
    """What a command found out about a path."""

    path: str
    headline: str
    fields: tuple[Field, ...]
    damaged: bool = False

    def data(self) -> dict[str, Any]:
        """The facts for programs."""
        return {"path": self.path} | {field.name: field.value for field in self.fields if field.in_json}

    def text(self) -> str:
        """The facts for people. No text of a file is printed in a way that could control the terminal."""
        lines, label = [f"{self.path}: {self.headline}"], ""
        for field in self.fields:
            lines += ["", field.heading] if field.heading and field.rows else []
            for row in field.rows:
                if len(row) == 1:
                    lines.append(f"  {row[0]}")
                    continue
                repeated = row[0] == label and not row[0].isupper()
                lines.append(f"  {'' if repeated else row[0]:<{_LABEL_CHARS}}  {row[1]}")
                label = row[0] or label
        return "\n".join(map(printable, lines))


def text_rows(texts: Iterable[str]) -> tuple[Row, ...]:
    return tuple((text,) for text in texts)


def labelled(label: str, texts: Iterable[str]) -> tuple[Row, ...]:
    """Rows with one label, which is printed once; in upper case, on every row."""
    return tuple((label, text) for text in texts)


def columns(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Rows of cells as aligned lines; the columns `right` are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def quiet(_done: int, _total: int) -> None:
    """Progress that is not shown."""


def as_bytes_text(count: int) -> str:
    """1234567 as '1.2 MB'."""
    value, unit = float(count), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 999.95 or unit == "TB":
            break
        value /= 1000
    return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"


def plural(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def printable(text: str) -> str:
    """The text with control characters escaped."""
    return text if text.isprintable() else repr(text)[1:-1]
