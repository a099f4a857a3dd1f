"""Where the other ranks stand when an operation does not complete: who is late, and what it does.

Ranks of this host by their files, ranks of others by their hosts' summaries.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from fullshard.comm import run_secrets
from fullshard.comm.flight_recorder import FlightRecorder
from fullshard.comm.host_summary import ranks_on, silent_hosts
from fullshard.comm.recorder_files import Note, Peer, Place, cpu_time, process_state
from fullshard.environment import host_name, launch

_MOST_NAMED = 16
_BUSY = 0.2  # of a processor; threads that only serve connections use far less
_STATES = {
    "T": "stopped by a signal (SIGSTOP, Ctrl-Z)",
    "t": "stopped by a debugger",
    "D": "waiting for a disk or a network file system",
}


@dataclass(frozen=True)
class Standing:
    """One rank, seen from another that waits in an operation."""

    place: Place
    begun: bool  # it has issued the operation, or a later one
    state: str  # as in /proc
    used_s: float  # processor time of the process and of all that it started
    note: Note | None
    read_s: float  # by the clock of its host
    silent: bool = False  # nothing is heard of its host any more

    @property
    def stopped(self) -> bool:
        return self.state in ("T", "t")

    @property
    def late(self) -> bool:
        """It holds up the operation: it has not issued it, or cannot go on with it."""
        return not self.place.alive or self.state in _STATES or not self.begun or self.silent

    def describe(self, earlier: Standing | None) -> str:
        """In a sentence; what it does is derived from the processor time since `earlier`."""
        text = f"{self.place.who} (pid {self.place.pid}): {self.place.doing}"
        if not self.place.alive:
            return text
        text += f"; it is {self._doing(earlier)}"
        return f"{text}, at {self.note.at}" if self.note is not None and self.note.at else text

    def _doing(self, earlier: Standing | None) -> str:
        if self.state in _STATES:
            return _STATES[self.state]
        if self.state == "R":
            return "computing"
        if earlier is None or self.read_s - earlier.read_s < 0.5:
            return "alive"
        share = (self.used_s - earlier.used_s) / (self.read_s - earlier.read_s)
        return "computing" if share > _BUSY else "sleeping, or waiting for something else"


def standings(recorder: FlightRecorder, channel: str, number: int) -> dict[int, Standing]:
    """All other ranks that have a part in the operation and of which something is known. For any thread."""
    found = {}
    for rank, remote in recorder.remote.items():
        entry = remote.entry(channel, number)
        if rank in recorder.others(channel) and entry is not None:
            begun, row = entry.number >= number, remote.row
            found[rank] = Standing(
                remote.place(), begun, row.state, row.used_s, row.note, remote.clock_s, remote.is_silent
            )
    for rank in sorted(recorder.others(channel).intersection(recorder.folder.ranks())):
        peer = Peer.open(recorder.folder, rank, recorder.ranks)
        if peer is None:
            continue
        try:
            place, entry, note = peer.place(), peer.entry(channel, number), peer.note()
        finally:
            peer.close()
        if place is not None and entry is not None:
            if note is not None and note.written_ns < time.monotonic_ns() - place.since_s * 1e9:
                note = None  # of an earlier time
            used_s, state = cpu_time(place.pid), process_state(place.pid)
            found[rank] = Standing(place, entry.number >= number, state, used_s, note, time.monotonic())
    return found


def late_texts(
    recorder: FlightRecorder, channel: str, now: dict[int, Standing], earlier: dict[int, Standing]
) -> list[str]:
    """Who holds up the operation, in a sentence each; hosts that are not heard of, with all their ranks."""
    late = [standing for standing in now.values() if standing.late]
    texts = [s.describe(earlier.get(s.place.rank)) for s in late if not s.silent]
    if len(texts) > _MOST_NAMED:
        texts = [*texts[:_MOST_NAMED], f"and {len(texts) - _MOST_NAMED} more ranks"]
    remote = [recorder.remote.get(s.place.rank) for s in late if s.silent]
    texts += silent_hosts(peer for peer in remote if peer is not None)
    unknown = _unknown_texts(recorder, channel, now)
    if unknown and recorder.store_unreachable and recorder.store_unreachable not in texts:
        texts.append(recorder.store_unreachable)
    return texts + unknown


def _unknown_texts(recorder: FlightRecorder, channel: str, now: dict[int, Standing]) -> list[str]:
    """Ranks that left no sign: they have not come yet, or their host was lost before its first summary."""
    hosts = run_secrets.hosts(recorder.members)
    if not hosts and launch().local_ranks == launch().ranks:
        hosts = [host_name()] * recorder.ranks
    if not hosts:
        return []
    unknown: dict[str, list[int]] = {}
    for rank in sorted(recorder.others(channel) - now.keys()):
        unknown.setdefault(hosts[rank], []).append(rank)
    heard = {host_name(), *(hosts[rank] for rank in now)}
    return [
        f"{ranks_on(ranks, host)}: "
        + ("not come to this call yet" if host in heard else "nothing was heard of this host yet")
        for host, ranks in list(unknown.items())[:_MOST_NAMED]
    ]


def warning(
    recorder: FlightRecorder, waited_s: float, now: dict[int, Standing], earlier: dict[int, Standing]
) -> str | None:
    """What this rank should report after waiting so long; None where another rank of the host reports it."""
    own = Peer.open(recorder.folder, recorder.rank, recorder.ranks)
    place = own.place() if own is not None else None
    if own is not None:
        own.close()
    if place is None or not place.waiting:
        return None
    waiting = [s.place for s in now.values() if s.place.waiting and not s.late and not s.place.host]
    if any(other.rank < recorder.rank for other in waiting):
        return None  # the first rank of this host that waits reports it, for all
    who = f"rank {place.rank} (pid {place.pid} on {host_name()})"
    here = f"{who} has waited {waited_s:.0f} s in {place.operation}"
    texts = late_texts(recorder, place.channel, now, earlier)
    if texts:
        return f"{here}. Late: " + "; ".join(texts)
    if recorder.rank > 0 or waited_s < QUIET_S:
        return None
    if not recorder.others(place.channel) - now.keys():
        return f"{here}: all ranks take part in it, and the data is not there yet"
    return f"{here}: the ranks of this host take part in it, some on other hosts do not; see their output"


QUIET_S = 30.0  # nobody of this host is late: the data is slow, or another host is at fault and reports it
