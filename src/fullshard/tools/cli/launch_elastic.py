"""`fullshard launch --elastic MIN:MAX`: from options to the agent of this host."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullshard.elastic.agent import Agent, Endpoint, Request
from fullshard.elastic.coordinator import Times
from fullshard.elastic.keeper import Keeper
from fullshard.elastic.local_ranks import Command, LocalRanks, Nursery
from fullshard.elastic.rounds import MAX_FRUITLESS, Limits
from fullshard.errors import OptionError
from fullshard.tools.cli.launch_signals import RANK_MODULE

# What most ranks import. None of it starts a thread or opens a device.
PRELOADED = (
    "torch",
    "torch._dynamo",
    "fullshard.api",
    "fullshard.data",
    "fullshard.checkpoint.save",
    "fullshard.checkpoint.load",
    "fullshard.checkpoint.newest",
    "fullshard.hugging_face",
    RANK_MODULE,
)
_PORT = 29400  # torchrun's
_JOIN_S, _LAST_CALL_S = 600.0, 30.0  # as torchrun's rendezvous
# Options of torchrun with a meaning here; each other one is refused.
_KNOWN = {
    *("elastic", "rounds", "nproc_per_node", "standalone", "rdzv_backend", "rdzv_endpoint", "rdzv_id"),
    *("rdzv_conf", "max_restarts", "module", "log_dir", "redirects", "tee", "local_ranks_filter"),
    *("shutdown_timeout", "dry_run", "training_script", "training_script_args"),
}
_INSTEAD = {
    "nnodes": "MIN:MAX counts ranks, over all hosts: leave --nnodes out.",
    "master_addr": "Give --rdzv-endpoint HOST:PORT.",
    "master_port": "Give --rdzv-endpoint HOST:PORT.",
    "node_rank": "Ranks are numbered anew in each round: leave it out.",
}


@dataclass(frozen=True)
class Elastic:
    """What --elastic and the options beside it ask for."""

    request: Request
    words: tuple[str, ...]  # of each rank: the script, or -m and the module, and its arguments
    log_dir: str
    redirects: str
    tee: str
    ranks_filter: str

    def __str__(self) -> str:
        request = self.request
        where = f", meeting at {request.endpoint.address}:{request.endpoint.port}"
        return (
            f"{request.limits.least} to {request.limits.most} ranks, {request.offer} of them here"
            f"{where if request.endpoint.address else ''}"
        )


def parse(given: dict[str, Any], words: Sequence[str], default_ranks: int) -> Elastic:
    """Read the options that torchrun's parser has found."""
    for name in given:
        if name not in _KNOWN:
            raise OptionError(
                f"--{name.replace('_', '-')} has no meaning with --elastic",
                _INSTEAD.get(name, "Leave it out, or use torchrun's own elastic runs: --nnodes 1:4."),
            )
    limits = Limits.parse(str(given["elastic"]))
    endpoint, times = _endpoint(given)
    offer = _offer(given, limits, default_ranks, bool(endpoint.address))
    run = str(given.get("rdzv_id", "none"))
    request = Request(
        run=run if endpoint.address else f"{run}-{secrets.token_hex(8)}",
        limits=limits,
        offer=offer,
        endpoint=endpoint,
        times=times,
        max_fruitless=_number(given.get("max_restarts", MAX_FRUITLESS), "--max-restarts"),
        shutdown_s=_number(given.get("shutdown_timeout", 30), "--shutdown-timeout"),
        record=Path(given["rounds"]) if given.get("rounds") else None,
    )
    logs = (str(given.get(name) or "") for name in ("log_dir", "redirects", "tee", "local_ranks_filter"))
    return Elastic(request, tuple(words), *logs)


def _endpoint(given: dict[str, Any]) -> tuple[Endpoint, Times]:
    backend = str(given.get("rdzv_backend", "c10d"))
    if backend not in ("c10d", "static"):
        raise OptionError(
            f"--rdzv-backend is {backend!r}", "Agents of --elastic meet by themselves: leave it out."
        )
    conf = _conf(str(given.get("rdzv_conf") or ""))
    text = str(given.get("rdzv_endpoint") or "")
    if not text:
        return Endpoint(), Times(_JOIN_S, 0.0)
    address, colon, port = text.rpartition(":")
    if not colon:
        address, port = text, str(_PORT)
    if not address or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise OptionError(f"--rdzv-endpoint is {text!r}", "Give HOST:PORT, the same on all hosts.")
    is_here = {"": None, "true": True, "1": True, "false": False, "0": False}.get(conf["is_host"].lower())
    times = Times(
        _number(conf["join_timeout"] or _JOIN_S, "join_timeout"),
        max(0.1, _number(conf["last_call_timeout"] or _LAST_CALL_S, "last_call_timeout")),
    )
    return Endpoint(address.strip("[]"), int(port), is_here), times


def _conf(text: str) -> dict[str, str]:
    known = {"join_timeout": "", "last_call_timeout": "", "is_host": ""}
    for pair in filter(None, text.split(",")):
        name, _, value = pair.partition("=")
        if name.strip() not in known:
            raise OptionError(
                f"--rdzv-conf has {pair!r}", f"With --elastic it may have {', '.join(known)}, as NAME=VALUE."
            )
        known[name.strip()] = value.strip()
    return known


def _offer(given: dict[str, Any], limits: Limits, default_ranks: int, others_join: bool) -> int:
    """How many ranks this host can have."""
    if "nproc_per_node" in given:
        from torch.distributed.run import determine_local_world_size

        offer: int = determine_local_world_size(str(given["nproc_per_node"]))
    else:
        import torch

        # On one host without GPUs MAX is how many are wanted; elsewhere the host decides.
        offer = default_ranks if others_join or torch.cuda.device_count() else limits.most
    offer = min(offer, limits.most)
    if offer < limits.least and not others_join:
        raise OptionError(
            f"--elastic {limits} needs {limits.least} ranks, and this host has {offer}",
            "Give a smaller MIN, a larger --nproc-per-node, or --rdzv-endpoint for further hosts to join.",
        )
    return offer


def _number(value: Any, name: str) -> Any:
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise OptionError(f"{name} is {value!r}", "Give a number of at least 0.")
    return int(number) if number.is_integer() else number


@contextlib.contextmanager
def _keeping(run: str) -> Iterator[dict[str, str]]:
    """The variables by which ranks find the memory that this process keeps for copies of their state."""
    if not hasattr(os, "memfd_create"):  # without Linux there are checkpoints on disk alone
        yield {}
        return
    with Keeper(run) as keeper:
        yield keeper.variables()


def print_line(text: str) -> None:
    print(f"fullshard: {text}", file=sys.stderr, flush=True)


def start(elastic: Elastic) -> int:
    """Be the agent of this host until the run is over; returns its exit code."""
    from fullshard.comm.recorder_files import records_parent
    from fullshard.comm.round_store import open_store
    from fullshard.elastic.rank_logs import RankLogs
    from fullshard.environment import host_name

    folder = Path(tempfile.mkdtemp(prefix="fullshard-agent-", dir=records_parent()))
    try:
        reports, logs = folder / "reports", folder / "logs"
        reports.mkdir()
        try:
            outputs = RankLogs(
                elastic.log_dir or str(logs),
                elastic.redirects or "0",
                elastic.tee or "0",
                elastic.ranks_filter,
            )
        except (ValueError, OSError) as error:
            raise OptionError(str(error), "See torchrun --help.") from error
        nursery = Nursery(RANK_MODULE, PRELOADED, folder)
        with _keeping(elastic.request.run) as variables:
            command = Command(elastic.request.run, elastic.words, variables)
            ranks = LocalRanks(nursery, command, reports, host_name(), outputs)
            return Agent(elastic.request, nursery, ranks, open_store, print_line).run()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        sys.stderr.flush()
