"""Draws docs/pictures/rooms.svg: `python docs/pictures/rooms.py`.

The boxes and arrows are the table ARROWS of tests/pure/test_structure.py. One that follows from others is
left out; `tests/pure/test_pictures.py` compares the file with the table.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "docs" / "pictures" / "rooms.svg"
ABOUT = {
    "base": "options, precision, policy, errors, environment",
    "plan": "units, layout, schedule: pure",
    "comm": "every call of torch.distributed",
    "engine": "one training step",
    "state": "values outside a step",
    "model_libraries": "what models of transformers need",
    "planning": "memory and time of a step, before it runs",
    "elastic": "the agent of a host",
    "checkpoint": "fs.save, fs.load, foreign formats",
    "api": "fs.shard, fs.full, fs.plan, ...",
    "doctor": "fullshard doctor, fs.check",
    "public names": "import fullshard as fs",
    "torch_fsdp": "FSDP1, FSDP2",
    "hugging_face": "Trainer, Accelerate",
    "lightning": "Trainer, Fabric",
    "onnx": "export",
    "training": "fullshard train",
    "tools": "command line, simulator",
}
WIDTH, BOX_HEIGHT, ROW_HEIGHT, MARGIN = 900, 40, 66, 12


def arrows() -> dict[str, set[str]]:
    """ARROWS, read without importing the test."""
    tree = ast.parse((ROOT / "tests" / "pure" / "test_structure.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "ARROWS" and node.value:
            pairs = ast.parse(ast.unparse(node.value).replace("set()", "[]"), mode="eval")
            return {room: set(imports) for room, imports in ast.literal_eval(pairs).items()}
    raise LookupError("tests/pure/test_structure.py has no table ARROWS")


def reachable(table: dict[str, set[str]], room: str) -> set[str]:
    return table[room].union(*(reachable(table, other) for other in table[room]))


def drawn_arrows(table: dict[str, set[str]]) -> list[tuple[str, str]]:
    """Those that do not follow from others."""
    return [
        (room, other)
        for room, imports in table.items()
        for other in sorted(imports)
        if not any(other in reachable(table, between) for between in imports - {other})
    ]


def height(table: dict[str, set[str]], room: str) -> int:
    return max((1 + height(table, other) for other in table[room]), default=0)


def draw(table: dict[str, set[str]]) -> str:
    lowest = {room: height(table, room) for room in table}
    # A box reaches up to the row below the first room that imports it, so that no arrow crosses another box.
    highest = {
        room: min((lowest[other] - 1 for other in table if room in table[other]), default=lowest[room])
        for room in table
    }
    top = max(highest.values())
    places: dict[str, tuple[float, float, float, float]] = {}  # left, top, width, height
    for level in range(top + 1):
        rooms = [room for room in table if lowest[room] <= level <= highest[room]]
        rooms.sort(key=lambda room: highest[room] - lowest[room])
        width = (WIDTH - MARGIN * (len(rooms) + 1)) / len(rooms)
        for i, room in enumerate(rooms):
            tall = BOX_HEIGHT + (level - lowest[room]) * ROW_HEIGHT
            places[room] = (MARGIN + i * (width + MARGIN), MARGIN + (top - level) * ROW_HEIGHT, width, tall)
    total = (top + 1) * ROW_HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {total}" role="img" '
        'font-family="sans-serif" font-size="13" text-anchor="middle" fill="#334155">',
        f'<rect width="{WIDTH}" height="{total}" fill="#ffffff"/>',
        '<marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M0 0L8 4L0 8z"/></marker>',
    ]
    for room, other in drawn_arrows(table):
        (x, y, width, tall), (to_x, to_y, to_width, _) = places[room], places[other]
        # Where one box is wide and the other narrow, the arrow is straight.
        start, end = x + width / 2, to_x + to_width / 2
        start, end = (end, end) if to_width < width else (start, start)
        line = f'x1="{start:.0f}" y1="{y + tall:.0f}" x2="{end:.0f}" y2="{to_y:.0f}"'
        parts.append(
            f'<line {line} stroke="#334155" marker-end="url(#tip)">'
            f"<title>{room} imports {other}</title></line>"
        )
    for room, (x, y, width, tall) in places.items():
        middle, words = x + width / 2, y + (tall - BOX_HEIGHT) / 2
        parts += [
            f'<rect x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{tall:.0f}" rx="6" '
            'fill="#dbeafe" stroke="#3b82f6"/>',
            f'<text x="{middle:.0f}" y="{words + 17:.0f}" font-weight="bold">{room}</text>',
            f'<text x="{middle:.0f}" y="{words + 33:.0f}" font-size="12">{ABOUT[room]}</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    FILE.write_text(draw(arrows()))
