"""Text files that are there complete, or as they were before."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def replace_text(path: str | Path, text: str) -> None:
    """Write a file in one rename: a rank that reads or writes it at the same time never sees a part of it."""
    path = Path(path)
    staging = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with open(staging, "x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(staging, path)
    finally:
        staging.unlink(missing_ok=True)
