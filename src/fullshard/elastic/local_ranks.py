"""The ranks of one host in one round, as its agent sees them: started, watched, stopped, ended."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fullshard.comm.recorder_files import Place, records_parent, records_prefix, remove_abandoned
from fullshard.comm.run_records import places_of
from fullshard.elastic import reports
from fullshard.elastic.rounds import Ending
from fullshard.environment import all_variables

GRACE_S = (
    3.0  # in which ranks notice by themselves that another one is gone, and raise an error that names it
)
TERMINATION_S = 2.0  # from SIGTERM to SIGKILL


class Nursery:
    """The process from which ranks are forked. It is started again if it is gone."""

    def __init__(self, target: str, modules: Sequence[str], folder: Path) -> None:
        self._words = [str(folder), target, *modules]
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._buffer = b""
        self._is_ready = self._failed = False

    @property
    def ready(self) -> bool:
        """Whether it has imported what ranks need; or has failed to, so that waiting for it is of no use."""
        return self._is_ready or self._failed

    def fileno(self) -> int:
        return -1 if self._channel is None else self._channel.fileno()

    def start(self) -> bool:
        """Whether it had to be started."""
        if self._channel is not None:
            return False
        self._channel, other = socket.socketpair()
        with other:
            command = [sys.executable, "-u", "-m", "fullshard.elastic.nursery", *self._words]
            self._process = subprocess.Popen(command, stdin=other.fileno(), start_new_session=True)
        return True

    def send(self, **message: Any) -> None:
        if self._channel is not None:
            with contextlib.suppress(OSError):  # gone: `receive` reports it
                self._channel.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]] | None:
        """What has arrived; None: it is gone, and with it all ranks."""
        assert self._channel is not None
        data = b""
        with contextlib.suppress(OSError):
            data = self._channel.recv(65536)
        if not data:
            self.close()
            return None
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        messages = [json.loads(line) for line in lines]
        if any("ready" in message for message in messages):
            self._is_ready, self._failed = True, False
        return messages

    def close(self) -> None:
        """It ends the ranks that are left, removes the folder, and ends."""
        if self._channel is not None and self._process is not None:
            self._channel.close()
            self._channel, self._buffer = None, b""
            if not self._is_ready:  # it has no ranks, and would import for seconds before it looks
                self._process.kill()
            self._is_ready, self._failed = False, not self._is_ready
            self._process.wait()


@dataclass(frozen=True)
class Round:
    """What an agent must know of a round."""

    number: int
    ranks: int  # of all hosts
    first: int  # of this host
    count: int  # of this host
    hosts: int
    host_index: int
    address: str  # of the store
    port: int


@dataclass(frozen=True)
class Command:
    """What each rank runs, and with what."""

    run: str
    words: tuple[str, ...]
    variables: dict[str, str] = field(default_factory=dict)


def variables_of(command: Command, round_: Round, place: int, folder: Path) -> dict[str, str]:
    """The environment of one rank, with the variables of torchrun."""
    rank = round_.first + place
    own: dict[str, Any] = {
        "RANK": rank,
        "LOCAL_RANK": place,
        "WORLD_SIZE": round_.ranks,
        "LOCAL_WORLD_SIZE": round_.count,
        "GROUP_RANK": round_.host_index,
        "GROUP_WORLD_SIZE": round_.hosts,
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": round_.ranks,
        "ROLE_NAME": "default",
        "MASTER_ADDR": round_.address,
        "MASTER_PORT": round_.port,
        "TORCHELASTIC_RUN_ID": command.run,
        "TORCHELASTIC_RESTART_COUNT": round_.number - 1,
        "TORCHELASTIC_MAX_RESTARTS": 10**6,
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the round's own store: no rank opens a port that is taken
        "FULLSHARD_AGENT": folder,
    }
    return {**all_variables(), **command.variables, **{name: str(value) for name, value in own.items()}}


@dataclass
class _Rank:
    number: int
    error_file: str
    pid: int = 0
    ending: Ending | None = None


class LocalRanks:
    """Those of the current round, or of none."""

    def __init__(self, nursery: Nursery, command: Command, folder: Path, host: str, logs: Any) -> None:
        self._nursery, self._command, self._folder, self._host = nursery, command, folder, host
        self._logs = logs
        self._ranks: list[_Rank] = []
        self._deadlines: list[tuple[float, int]] = []  # when to send which signal
        self._stopping = False
        self._killed: set[int] = set()  # places whose ranks the agent has sent a signal to end
        self.round: Round | None = None

    @property
    def running(self) -> bool:
        return any(rank.ending is None for rank in self._ranks)

    def start(self, round_: Round) -> None:
        reports.clear(self._folder)
        self.round, self._deadlines, self._stopping = round_, [], False
        variables = [
            variables_of(self._command, round_, place, self._folder) for place in range(round_.count)
        ]
        streams = self._logs.begin(variables)  # adds the files for errors
        self._ranks = []
        for place, (own, (stdout, stderr)) in enumerate(zip(variables, streams, strict=True)):
            self._ranks.append(_Rank(round_.first + place, own["TORCHELASTIC_ERROR_FILE"]))
            words = list(self._command.words)
            self._nursery.send(place=place, variables=own, words=words, stdout=stdout, stderr=stderr)

    def stop(self, grace_s: float = GRACE_S) -> None:
        """End the ranks that are left: by themselves within the grace, then by signals."""
        if not self._stopping:
            self._stopping = True
            term = time.monotonic() + grace_s
            self._deadlines = [(term, signal.SIGTERM), (term + TERMINATION_S, signal.SIGKILL)]

    def send_signal(self, number: int) -> None:
        places = [place for place, rank in enumerate(self._ranks) if rank.ending is None]
        self._nursery.send(signal=int(number), places=places)

    def look(self) -> None:
        """Send the signals that are due."""
        while self.running and self._deadlines and time.monotonic() >= self._deadlines[0][0]:
            _, number = self._deadlines.pop(0)
            self._killed = {place for place, rank in enumerate(self._ranks) if rank.ending is None}
            self.send_signal(number)

    def handle(self, message: dict[str, Any]) -> Ending | None:
        """A message of the nursery. Returns how a rank ended."""
        if "started" in message:
            self._ranks[message["started"]].pid = message["pid"]
        if "ended" not in message:
            return None
        return self._end(int(message["ended"]), int(message["code"]))

    def end_all(self) -> None:
        """The nursery is gone, and with it all ranks."""
        for place, rank in enumerate(self._ranks):
            if rank.ending is None:
                self._end(place, -signal.SIGKILL)

    def _end(self, place: int, code: int) -> Ending:
        rank, known = self._ranks[place], reports.read(self._folder, place)
        step, doing = self.standing(place)
        error, at_s = _error(rank.error_file)
        ending = Ending(
            rank.number,
            self._host,
            code,
            error,
            at_s or time.time(),
            step,
            known.loaded,
            place,
            left=known.left,
            doing=doing,
        )
        if place in self._killed and code < 0:
            ending = replace(ending, stopped=True)
        rank.ending = ending
        if not self.running:
            self._killed = set()
            self._logs.end()
            remove_abandoned(records_parent(), records_prefix())
        return ending

    def standing(self, place: int = 0) -> tuple[int | None, str]:
        """The step of a rank, and the operation in which it is or was last."""
        step = reports.read(self._folder, place).step
        where = self._places().get(self._ranks[place].pid)
        if where is None or not where.number:
            return step, ""
        return where.step if step is None else step, where.operation

    def endings(self) -> list[Ending]:
        return [rank.ending for rank in self._ranks if rank.ending is not None]

    def request_to_leave(self) -> None:
        reports.request_to_leave(self._folder)

    def progress(self) -> dict[str, Any]:
        """The newest step of the ranks, what they loaded and have saved."""
        known = [reports.read(self._folder, place) for place in range(len(self._ranks))]
        steps = [one.step for one in known if one.step is not None]
        counted = [place.step for place in self._places().values() if place.number]
        return {
            "step": max(steps, default=None),
            "counted": max(counted, default=0),
            "loaded": next((one.loaded for one in known if one.loaded), ""),
            "saved": next((one.saved for one in known if one.saved), ""),
        }

    def _places(self) -> dict[int, Place]:
        return places_of({rank.pid for rank in self._ranks if rank.pid})


def _error(file: str) -> tuple[str, float]:
    """What a rank wrote about the exception that ended it, and when; as torch's error handler has it."""
    try:
        message = json.loads(Path(file).read_text())["message"]["message"]
        return str(message), Path(file).stat().st_mtime  # its own time has no fractions of a second
    except (OSError, ValueError, KeyError, TypeError):
        return "", 0.0
