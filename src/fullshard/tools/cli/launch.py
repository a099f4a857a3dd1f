"""`fullshard launch`: a thin face over torchrun, whose options all pass through."""

from __future__ import annotations

import argparse
import contextlib
import shlex
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from fullshard.environment import cores, set_default_variables, torchrun_defaults
from fullshard.errors import OptionError
from fullshard.tools.cli.commands import Command

MOST_CPU_RANKS = 8  # beyond that, threads of one rank do more than further ranks, which all hold torch
_RENDEZVOUS = {
    "standalone",
    "rdzv_backend",
    "rdzv_endpoint",
    "rdzv_id",
    "rdzv_conf",
    "master_addr",
    "master_port",
    "node_rank",
}
_OURS = ("--dry", "--mod")  # and what argparse takes for them


class _Parser(argparse.ArgumentParser):
    """torchrun's parser with our errors."""

    def error(self, message: str) -> NoReturn:
        words = [word for word in message.split() if word.startswith("--")]
        known = list(self._option_string_actions)
        near = [option for word in words for option in known if option.startswith(word.partition("=")[0])]
        near = near or [m for word in words for m in get_close_matches(word, known, 1)]
        meant = f"Did you mean {near[0]}? " if near and "unrecognized" in message else ""
        raise OptionError(
            message, f"{meant}See fullshard launch --help, and torchrun --help for its options."
        )

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """What a shortened option may mean. argparse asks that of the script's own options too, and ends with
        an error where `--n` could be two of torchrun's: those are left to the script."""
        found: list[Any] = super()._get_option_tuples(option_string)
        return found if len(found) == 1 else []


@dataclass(frozen=True)
class Launching:
    """What will be started: torchrun's options, the script, and what we set beside them."""

    options: tuple[str, ...]
    is_module: bool
    script: tuple[str, ...]  # and its arguments
    variables: dict[str, str]
    why: str

    @property
    def words(self) -> list[str]:
        """For torchrun: each rank runs `launched`, and that the script."""
        target = ["-m", *self.script] if self.is_module else list(self.script)
        return [*self.options, "-m", "fullshard.tools.cli.launched", *target]


def _launch(
    context: typer.Context,
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[OPTIONS] SCRIPT [ARGS]...", help="As torchrun takes them.")
    ] = None,
) -> int:
    said = [*(words or []), *context.args]
    if said[:1] in (["--help"], ["-h"], []):
        print(context.get_help())
        return 0 if said else 2
    launching, only_show = parse(said)
    if only_show:
        said_first = [f"{name}={value}" for name, value in launching.variables.items()]
        print(" ".join([*said_first, shlex.join(["torchrun", *launching.words])]))
        return 0
    set_default_variables(launching.variables)
    print(f"fullshard: {launching.why}", file=sys.stderr)
    return start(launching)


def parse(said: Sequence[str]) -> tuple[Launching, bool]:
    """torchrun's own parser reads the options; we add what nobody said."""
    parser = _parser()
    at = _script_at(parser, said)
    # Not the script's own arguments: argparse would take a `--` among them for itself.
    given: dict[str, Any] = {**torchrun_defaults(), **vars(parser.parse_args(list(said[: at + 1])))}
    script, options = tuple(said[at:]), list(said[:at])
    options = [word for word in options if word not in ("-m", "--") and not word.startswith(_OURS)]
    is_module = _flag(given, "module")
    _refuse(given)
    _require_script(script[0], is_module)
    nodes = str(given.get("nnodes", "1"))
    if nodes in ("1", "1:1") and not _RENDEZVOUS & set(given):
        options = ["--standalone", *options]
    if "nproc_per_node" not in given:
        given["nproc_per_node"] = str(_local_ranks())
        options = [f"--nproc-per-node={given['nproc_per_node']}", *options]
    local = str(given["nproc_per_node"])
    why = _why(script[0], is_module, local, nodes)
    launching = Launching(tuple(options), is_module, script, _variables(local, nodes), why)
    return launching, _flag(given, "dry_run")


def _script_at(parser: argparse.ArgumentParser, said: Sequence[str]) -> int:
    """Where the options of torchrun end. A wrong one is left for the parser to name."""
    at = 0
    while at < len(said):
        word = said[at]
        if word == "--":
            return at + 1
        if not word.startswith("-"):
            return at
        name, equals, _ = word.partition("=")
        near = parser._get_option_tuples(name) if name.startswith("--") else []
        action = parser._option_string_actions.get(name) or (near[0][0] if near else None)
        takes_next = action is not None and not equals and action.nargs != 0
        at += 2 if takes_next else 1
    return at


def _flag(given: dict[str, Any], name: str) -> bool:
    return str(given.get(name, "0")) not in ("0", "False", "")


def _parser() -> argparse.ArgumentParser:
    """Only what was said ends up in the namespace."""
    from torch.distributed.run import get_args_parser

    theirs = get_args_parser()
    theirs.__class__ = _Parser
    theirs.add_argument("--dry-run", "--dry_run", action="store_true")
    for action in theirs._actions:
        if action.option_strings:
            action.default = argparse.SUPPRESS
    return theirs


def _refuse(given: dict[str, Any]) -> None:
    if _flag(given, "no_python"):
        raise OptionError(
            "--no-python starts a program that is not Python, and fullshard cannot be turned on in it",
            "Use torchrun for it.",
        )
    local = str(given.get("nproc_per_node", "1"))
    if local.lstrip("-").isdecimal() and int(local) < 1:
        raise OptionError(f"--nproc-per-node is {local}", "Give at least 1, or leave it out.")
    if _flag(given, "run_path"):
        raise OptionError(
            "--run-path is how torchrun runs a script inside its own process",
            "Leave it out: every rank of fullshard launch runs the script by its path.",
        )


def _require_script(script: str, is_module: bool) -> None:
    if not is_module:
        if not Path(script).exists():
            beside = f" Did you mean {script}.py?" if Path(f"{script}.py").exists() else ""
            raise OptionError(
                f"there is no script {script!r}", f"Check the path, or give -m for a module.{beside}"
            )
        return
    if not _is_there(script):
        raise OptionError(
            f"there is no module {script!r}",
            "Check its name: it must be installed, or lie in the current folder.",
        )


def _is_there(name: str) -> bool:
    """Whether a module can be found, without importing what is around it."""
    first, *parts = name.split(".")
    where = str(Path.cwd())
    spec = PathFinder.find_spec(first, [where]) or _found(first)
    for i, _ in enumerate(parts):
        if spec is None or spec.submodule_search_locations is None:
            return False
        spec = PathFinder.find_spec(".".join([first, *parts[: i + 1]]), list(spec.submodule_search_locations))
    return spec is not None


def _found(name: str) -> Any:
    try:
        return find_spec(name)
    except (ValueError, ImportError):
        return None


def _local_ranks() -> int:
    import torch

    return torch.cuda.device_count() or min(cores(), MOST_CPU_RANKS)


def _variables(local_ranks: str, nodes: str) -> dict[str, str]:
    found = {}
    if local_ranks.isdecimal() and int(local_ranks) > 1:
        # torchrun says 1, which leaves the other cores idle.
        found["OMP_NUM_THREADS"] = str(max(1, cores() // int(local_ranks)))
    first, _, last = nodes.partition(":")
    if last and first != last:
        # Nodes that come later are not let in while the store of the first rendezvous is used again.
        found["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    return found


def _why(script: str, is_module: bool, local_ranks: str, nodes: str) -> str:
    import torch

    gpus = torch.cuda.device_count()
    where = f"{gpus} GPUs here" if gpus else f"no GPU, {cores()} cores here"
    what = f"module {script}" if is_module else script
    ranks = "1 rank" if local_ranks == "1" else f"{local_ranks} ranks"
    return f"{what} on {ranks}{'' if nodes == '1' else f' of each of {nodes} nodes'} ({where})"


def _torchruns(words: Sequence[str]) -> argparse.Namespace:
    """What torchrun reads in its command line, with its defaults."""
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    parser.__class__ = _Parser
    return parser.parse_args(list(words))


@contextlib.contextmanager
def _place_for_logs(asked: argparse.Namespace) -> Iterator[None]:
    """Where nobody asked for logs, torchrun leaves an empty folder of every run behind. Ours goes with it."""
    none = {None, "", "0"}
    if asked.log_dir or asked.logs_specs or not {asked.redirects, asked.tee} <= none:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="fullshard-launch-", ignore_cleanup_errors=True) as folder:
        asked.log_dir = folder
        yield


def start(launching: Launching) -> int:
    """Run torchrun in this process. The exit code is that of the rank that failed first."""
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    asked = _torchruns(launching.words)
    try:
        with _place_for_logs(asked):
            torchrun.run(asked)  # type: ignore[no-untyped-call, unused-ignore]
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode
        name = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        recorded: Any = failure.message  # a dict where the rank wrote one, whatever its annotation says
        about = f": {recorded.get('message', '')}" if isinstance(recorded, dict) else ""
        print(f"fullshard: rank {rank} was the first to fail, with {name}{about}", file=sys.stderr)
        return 128 - code if code < 0 else code or 1
    except SignalException as error:
        print(f"fullshard: stopped by {signal.Signals(error.sigval).name}", file=sys.stderr)
        return 128 + int(error.sigval)
    except (ValueError, AssertionError) as error:  # an option's value, which torchrun looks at only now
        raise OptionError(str(error), "See torchrun --help.") from error
    return 0


LAUNCH = Command(
    "launch",
    _launch,
    "run a training script on all GPUs of this machine, or on several machines",
    """\
A thin face over torchrun: all its options pass through (--nnodes, --rdzv-endpoint,
--max-restarts, --tee, -m, ...; `torchrun --help` lists them). It adds three things.

1. In every rank the Hugging Face door is open: a script that says
   TrainingArguments(fsdp="full_shard auto_wrap") trains on fullshard, unchanged. Other
   scripts run as with python.
2. What you leave out is chosen: as many ranks as there are GPUs, or without any one for
   each core, 8 at most; a rendezvous of its own (--standalone) on a single machine, so
   that two runs do not meet; OMP_NUM_THREADS as the cores allow; for elastic runs
   (--nnodes 1:4) the setting without which nodes that join later wait for ever.
3. A script that is not there is an error before any process is started, tracebacks show
   your lines alone, and the exit code is that of the rank that failed first.

Of its own it has --dry-run, which prints the command and starts nothing. Options come
before SCRIPT; what comes after is the script's.""",
    """\
examples:
  fullshard launch train.py --epochs 3
  fullshard launch --nproc-per-node 2 train.py
  fullshard launch --nnodes 2 --rdzv-backend c10d --rdzv-endpoint host:29400 train.py
  fullshard launch -m my_package.train --lr 1e-4
  fullshard launch --dry-run train.py

Exit code 0: the script is done; 2: what was asked is wrong; else the script's own, or
128 and the number of the signal that ended it.""",
    {"ignore_unknown_options": True, "allow_interspersed_args": False, "help_option_names": []},
)
