"""From text to token ids and back: bytes, or a tokenizer of Hugging Face's."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from fullshard.errors import OptionError
from fullshard.extras import need

Ids = np.ndarray[Any, np.dtype[Any]]


class Tokenizer(Protocol):
    """What training needs of a tokenizer."""

    size: int  # ids are below it
    end: int | None  # the id that ends a document
    fingerprint: str

    def encode(self, text: bytes, name: str) -> Ids: ...

    def decode(self, ids: list[int]) -> str: ...

    def save(self, folder: Path) -> None: ...


class Bytes:
    """Every byte is a token; one more ends a document. No text is unknown to it."""

    size = 257
    end: int | None = 256
    fingerprint = "bytes 1"

    def encode(self, text: bytes, name: str) -> Ids:
        return np.frombuffer(text, dtype=np.uint8)

    def decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")

    def save(self, folder: Path) -> None:
        """There is nothing to save."""


class HuggingFace:
    """A tokenizer from a local folder or a tokenizer.json."""

    def __init__(self, path: Path, key: str) -> None:
        transformers = need("transformers", "hf")
        try:
            if path.is_file():
                self._inner = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path))
            else:
                self._inner = transformers.AutoTokenizer.from_pretrained(str(path), local_files_only=True)
        except Exception as error:  # whatever that library raises for files that are none of its own
            reason = str(error).strip().partition("\n")[0][:200]
            raise OptionError(
                f"{key!r}: {str(path)!r} holds no tokenizer that can be read "
                f"({type(error).__name__}: {reason})",
                "Give a folder with a tokenizer.json as data.tokenizer, or the word bytes.",
            ) from error
        # Ids may have gaps, so that the largest is beyond their number.
        self.size = max(len(self._inner), 1 + max(self._inner.get_vocab().values(), default=-1))
        self.end: int | None = self._inner.eos_token_id
        backend = getattr(self._inner, "backend_tokenizer", None)
        described = (
            backend.to_str() if backend is not None else json.dumps(self._inner.get_vocab(), sort_keys=True)
        )
        self.fingerprint = hashlib.sha256(f"{described} {self.end}".encode()).hexdigest()

    def encode(self, text: bytes, name: str) -> Ids:
        try:
            plain = text.decode("utf-8")
        except UnicodeDecodeError as error:
            raise OptionError(
                f"{name} is not UTF-8 text: {error.reason}",
                "Convert it, leave it out, or use data.tokenizer: bytes.",
            ) from None
        # No warning that the text is longer than the model's context: it is cut into sequences later.
        ids = self._inner(plain, add_special_tokens=False, verbose=False)["input_ids"]
        return np.asarray(ids, dtype=np.int64)

    def decode(self, ids: list[int]) -> str:
        return str(self._inner.decode(ids, skip_special_tokens=True))

    def save(self, folder: Path) -> None:
        self._inner.save_pretrained(str(folder))
