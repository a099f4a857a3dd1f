"""Reads pickles without running anything, and without allocating more than their size justifies.

Whatever a pickle would call becomes a record of the call, a dict a list of its pairs, and an object its class
and state. So reading takes time and memory proportional to the pickle's bytes, whatever they are; what the
records mean is decided by the caller, which visits them under the same Budget. Python's own readers were
rejected: they copy states, join arguments and hash keys while they read, each of which a pickle of less than
a kilobyte can make exponential.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fullshard.checkpoint.format.budget import Budget
from fullshard.errors import DamagedCheckpoint

_PAGE_BYTES = 2**16
_MAX_NAME_BYTES = 1000  # of a module or class
_SMALL, _SLOT, _MEMO = 56, 8, 40  # bytes of a small object; of a place in a container; of a memo's entry


@dataclass(frozen=True, slots=True)
class Name:
    """A class or function, which is not imported."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(slots=True, eq=False)
class Record:
    """A call of something with arguments, or an object of a class; what was done to the result."""

    of: Name
    args: Any
    state: Any = None
    items: list[Any] = field(default_factory=list)  # appended, or pairs that were set


class Pairs(list[tuple[Any, Any]]):
    """A dict, as its pairs in order."""


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """What a persistent id refers to: for torch, a storage."""

    description: Any


class Stream:
    """The bytes of a pickle, read in pages. `read_at(begin, end)` returns bytes."""

    def __init__(self, read_at: Callable[[int, int], bytes], size_bytes: int) -> None:
        self._read_at, self._size = read_at, size_bytes
        self._page, self._begin, self._at = b"", 0, 0  # the page, its position, and ours in it

    def take(self, count: int) -> bytes:
        end = self._at + count
        if end > len(self._page):
            here = self._begin + self._at
            if count > self._size - here:
                raise ValueError("it was cut short")
            self._page = self._read_at(here, min(self._size, here + max(count, _PAGE_BYTES)))
            self._begin, self._at, end = here, 0, count
        taken = self._page[self._at : end]
        self._at = end
        return taken

    def line(self) -> str:
        taken = bytearray()
        while (one := self.take(1)) != b"\n":
            taken += one
            if len(taken) > _MAX_NAME_BYTES:
                raise ValueError("a name that is too long")
        return taken.decode()


def read(stream: Stream, budget: Budget, allows: Callable[[str, str], bool]) -> Any:
    """The records of a pickle. `allows(module, name)` says whether a class or function may occur."""
    return _Machine(stream, budget, allows).run()


def refused(where: str, what: str) -> DamagedCheckpoint:
    return DamagedCheckpoint(
        f"{where!r} refers to {what[:200]}, which no checkpoint needs; none of it was run",
        "Do not load it: it may have been made to run code.",
    )


class NotAllowed(Exception):
    """A class or function that a pickle may not contain."""


class _Machine:
    """The stack of a pickle, and the operations that files of torch contain."""

    def __init__(self, stream: Stream, budget: Budget, allows: Callable[[str, str], bool]) -> None:
        self._take, self._line, self._charge, self._allows = stream.take, stream.line, budget.charge, allows
        self._stack: list[Any] = []
        self._outer: list[list[Any]] = []  # the stacks below the marks
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        take, operations = self._take, _OPERATIONS
        while True:
            code = take(1)[0]
            if code == _STOP:
                return self._stack.pop()
            operation = operations.get(code)
            if operation is None:
                raise ValueError(f"operation {code:#04x}, which such files do not contain")
            operation(self)

    def _skip(self, count: int) -> None:
        self._take(count)

    # ---- values

    def _push(self, value: Any, size: int = _SLOT) -> None:
        self._charge(size + _SLOT)
        self._stack.append(value)

    def _number(self, form: str) -> None:
        value = struct.unpack(form, self._take(struct.calcsize(form)))[0]
        self._push(value, 32)

    def _long(self) -> None:
        self._push(int.from_bytes(self._take(self._length("<B")), "little", signed=True), 320)

    def _text(self, form: str) -> None:
        count = self._length(form)
        self._charge(_SMALL + 5 * count)
        self._push(str(self._take(count), "utf-8", "surrogatepass"))

    def _bytes(self, form: str) -> None:
        count = self._length(form)
        self._charge(_SMALL + 2 * count)
        self._push(self._take(count))

    def _length(self, form: str) -> int:
        return int(struct.unpack(form, self._take(struct.calcsize(form)))[0])

    # ---- containers

    def _mark(self) -> None:
        self._charge(_SMALL)
        self._outer.append(self._stack)
        self._stack = []

    def _since_mark(self) -> list[Any]:
        items, self._stack = self._stack, self._outer.pop()
        return items

    def _tuple(self, count: int | None = None) -> None:
        if count is None:
            items = self._since_mark()
        else:
            items = self._stack[len(self._stack) - count :]
            if len(items) < count:
                raise IndexError("an empty stack")
            del self._stack[len(self._stack) - count :]
        self._push(tuple(items), _SMALL + _SLOT * len(items))

    def _append(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if isinstance(target, Record):
            target = target.items
        if not isinstance(target, list) or isinstance(target, Pairs):
            raise ValueError(f"an item of a {type(target).__name__}")
        self._charge(_SLOT * len(items))
        target.extend(items)

    def _set(self, items: list[Any]) -> None:
        target: Any = self._stack[-1]
        if isinstance(target, Record):
            target = target.items
        elif not isinstance(target, Pairs):
            raise ValueError(f"an entry of a {type(target).__name__}")
        self._charge((_SMALL + 2 * _SLOT) * (len(items) // 2))
        target.extend(zip(items[::2], items[1::2], strict=True))

    def _popped(self, count: int) -> list[Any]:
        if len(self._stack) < count:
            raise IndexError("an empty stack")
        items = self._stack[-count:]
        del self._stack[-count:]
        return items

    # ---- memo

    def _put(self, key: int) -> None:
        self._charge(_MEMO)
        self._memo[key] = self._stack[-1]

    def _memoize(self) -> None:
        self._put(len(self._memo))

    def _get(self, key: int) -> None:
        self._push(self._memo[key])

    # ---- classes and calls

    def _name(self, module: Any, name: Any) -> None:
        if not (isinstance(module, str) and isinstance(name, str)):
            raise ValueError("a class that is not named by strings")
        if not self._allows(module, name):
            raise NotAllowed(f"{module[:200]}.{name[:200]}")
        self._push(Name(module, name), _SMALL)

    def _global(self) -> None:
        module = self._line()
        self._name(module, self._line())

    def _call(self) -> None:
        args = self._stack.pop()
        of = self._stack.pop()
        if not isinstance(of, Name) or not isinstance(args, tuple):
            raise ValueError("a call of something that is not a class or function")
        self._push(Record(of, args), 3 * _SMALL)

    def _build(self) -> None:
        state, target = self._stack.pop(), self._stack[-1]
        if isinstance(target, Name):
            raise NotAllowed(f"a change of {target}")
        if not isinstance(target, Record):
            raise ValueError(f"a state of a {type(target).__name__}")
        target.state = state

    def _persistent(self) -> None:
        self._push(Stored(self._stack.pop()), _SMALL)


_STOP = ord(".")
_OPERATIONS: dict[int, Callable[[_Machine], None]] = {
    0x80: lambda m: m._skip(1),  # the protocol
    0x95: lambda m: m._skip(8),  # a frame: its length is of no use here
    ord("("): _Machine._mark,
    ord("N"): lambda m: m._push(None),
    0x88: lambda m: m._push(True),
    0x89: lambda m: m._push(False),
    ord("J"): lambda m: m._number("<i"),
    ord("K"): lambda m: m._number("<B"),
    ord("M"): lambda m: m._number("<H"),
    0x8A: _Machine._long,
    ord("G"): lambda m: m._number(">d"),
    0x8C: lambda m: m._text("<B"),
    ord("X"): lambda m: m._text("<I"),
    ord("C"): lambda m: m._bytes("<B"),
    ord("B"): lambda m: m._bytes("<I"),
    ord(")"): lambda m: m._push(()),
    0x85: lambda m: m._tuple(1),
    0x86: lambda m: m._tuple(2),
    0x87: lambda m: m._tuple(3),
    ord("t"): _Machine._tuple,
    ord("]"): lambda m: m._push([], _SMALL),
    ord("a"): lambda m: m._append(m._popped(1)),
    ord("e"): lambda m: m._append(m._since_mark()),
    ord("}"): lambda m: m._push(Pairs(), _SMALL),
    ord("s"): lambda m: m._set(m._popped(2)),
    ord("u"): lambda m: m._set(m._since_mark()),
    ord("c"): _Machine._global,
    0x93: lambda m: m._name(*m._popped(2)),
    ord("R"): _Machine._call,
    0x81: _Machine._call,  # an object of a class
    ord("b"): _Machine._build,
    0x94: _Machine._memoize,
    ord("q"): lambda m: m._put(m._take(1)[0]),
    ord("r"): lambda m: m._put(m._length("<I")),
    ord("h"): lambda m: m._get(m._take(1)[0]),
    ord("j"): lambda m: m._get(m._length("<I")),
    ord("Q"): _Machine._persistent,
}
