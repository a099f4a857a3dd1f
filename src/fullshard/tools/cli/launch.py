"""`fullshard launch`: a thin wrapper around torchrun, whose options all pass through."""

from __future__ import annotations

import argparse
import ast
import contextlib
import shlex
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeGuard

import typer

from fullshard.environment import cores, set_default_variables, torchrun_defaults
from fullshard.errors import OptionError
from fullshard.tools.cli import launch_elastic
from fullshard.tools.cli.commands import Command
from fullshard.tools.cli.launch_elastic import Elastic
from fullshard.tools.cli.launch_signals import RANK_MODULE, PassedOn

MAX_CPU_RANKS = 8  # beyond that, more threads per rank help more than further ranks, which each load torch
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
_OURS = ("--dry", "--mod")  # and the abbreviations that argparse accepts for them


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
        """The options that an abbreviation may stand for. argparse also expands the script's own options, and
        raises where `--n` could be two of torchrun's: those are left to the script."""
        matches: list[Any] = super()._get_option_tuples(option_string)
        return matches if len(matches) == 1 else []


@dataclass(frozen=True)
class Launching:
    """What is started: torchrun's options, the script, and the variables that we set."""

    options: tuple[str, ...]
    is_module: bool
    script: tuple[str, ...]  # and its arguments
    variables: dict[str, str]
    why: str
    elastic: Elastic | None = None  # with --elastic: torchrun is not used

    @property
    def words(self) -> list[str]:
        """The arguments of torchrun: each rank runs `launched`, which runs the script."""
        target = ["-m", *self.script] if self.is_module else list(self.script)
        return [*self.options, "-m", RANK_MODULE, *target]


def _launch(
    context: typer.Context,
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[OPTIONS] SCRIPT [ARGS]...", help="As for torchrun.")
    ] = None,
) -> int:
    arguments = [*(words or []), *context.args]
    if arguments[:1] in (["--help"], ["-h"], []):
        print(context.get_help())
        return 0 if arguments else 2
    launching, dry_run = parse(arguments)
    if dry_run:
        variables = [f"{name}={value}" for name, value in launching.variables.items()]
        words = ["torchrun", *launching.words]
        if launching.elastic is not None:
            words = [sys.executable, "-m", RANK_MODULE, *launching.elastic.words]
            print(f"fullshard: {launching.why}")
        print(" ".join([*variables, shlex.join(words)]))
        return 0
    set_default_variables(launching.variables)
    print(f"fullshard: {launching.why}", file=sys.stderr)
    return start(launching) if launching.elastic is None else launch_elastic.start(launching.elastic)


def parse(words: Sequence[str]) -> tuple[Launching, bool]:
    """torchrun's own parser reads the options; defaults of ours are added. The flag is --dry-run."""
    parser = _parser()
    at = _script_at(parser, words)
    # Without the script's own arguments: argparse would consume a `--` among them.
    given: dict[str, Any] = {**torchrun_defaults(), **vars(parser.parse_args(list(words[: at + 1])))}
    script, options = tuple(words[at:]), list(words[:at])
    options = [word for word in options if word not in ("-m", "--") and not word.startswith(_OURS)]
    is_module = _flag(given, "module")
    _refuse(given)
    require_script(script[0], is_module)
    if given.get("elastic") is not None:
        return _elastic(given, script), _flag(given, "dry_run")
    if given.get("rounds") is not None:
        raise OptionError("--rounds is for elastic runs", "Give --elastic MIN:MAX as well.")
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


def _elastic(given: dict[str, Any], script: tuple[str, ...]) -> Launching:
    is_module = _flag(given, "module")
    words = ["-m", *script] if is_module else list(script)
    elastic = launch_elastic.parse(given, words, _local_ranks())
    what = f"module {script[0]}" if is_module else script[0]
    variables = _variables(str(elastic.request.offer), "1")
    return Launching((), is_module, script, variables, f"{what} on {elastic}", elastic)


def _script_at(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Where the options of torchrun end. The parser reports a wrong one."""
    at = 0
    while at < len(words):
        word = words[at]
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
    """torchrun's parser without its defaults: the namespace holds only what was given."""
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    parser.__class__ = _Parser
    parser.add_argument("--dry-run", "--dry_run", action="store_true")
    parser.add_argument("--elastic", metavar="MIN:MAX")
    parser.add_argument("--rounds", metavar="FILE")
    for action in parser._actions:
        if action.option_strings:
            action.default = argparse.SUPPRESS
    return parser


def _long_options() -> list[str]:
    """For completion: each option once, with dashes instead of underscores. They are read from the source of
    torchrun, because importing it would import torch."""
    torch = find_spec("torch")
    folders = (torch and torch.submodule_search_locations) or ()
    files = [file for folder in folders if (file := Path(folder) / "distributed" / "run.py").is_file()]
    calls = [node for file in files for node in ast.walk(ast.parse(file.read_text())) if _adds_argument(node)]
    words = [str(one.value) for call in calls for one in call.args if isinstance(one, ast.Constant)]
    return sorted(
        {
            "--dry-run",
            "--elastic",
            "--rounds",
            *(word for word in words if word.startswith("--") and "_" not in word),
        }
    )


def _adds_argument(node: ast.AST) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument"


def _refuse(given: dict[str, Any]) -> None:
    if _flag(given, "no_python"):
        raise OptionError(
            "--no-python starts a program that is not Python, in which fullshard cannot be turned on",
            "Use torchrun for such a program.",
        )
    local = str(given.get("nproc_per_node", "1"))
    if local.lstrip("-").isdecimal() and int(local) < 1:
        raise OptionError(f"--nproc-per-node is {local}", "Give at least 1, or leave it out.")
    if _flag(given, "run_path"):
        raise OptionError(
            "--run-path makes torchrun run a script inside its own process",
            "Leave it out: every rank of fullshard launch runs the script by its path.",
        )


def require_script(script: str, is_module: bool) -> None:
    if not is_module:
        if not Path(script).exists():
            meant = f" Did you mean {script}.py?" if Path(f"{script}.py").exists() else ""
            raise OptionError(
                f"there is no script {script!r}", f"Check the path, or pass -m for a module.{meant}"
            )
        return
    if not _is_there(script):
        raise OptionError(
            f"there is no module {script!r}",
            "Check its name: it must be installed, or be in the current folder.",
        )


def _is_there(name: str) -> bool:
    """Whether a module can be found, without importing its parent packages."""
    first, *parts = name.split(".")
    where = str(Path.cwd())
    spec = PathFinder.find_spec(first, [where]) or _installed(first)
    for i, _ in enumerate(parts):
        if spec is None or spec.submodule_search_locations is None:
            return False
        spec = PathFinder.find_spec(".".join([first, *parts[: i + 1]]), list(spec.submodule_search_locations))
    return spec is not None


def _installed(name: str) -> Any:
    try:
        return find_spec(name)
    except (ValueError, ImportError):
        return None


def _local_ranks() -> int:
    import torch

    return torch.cuda.device_count() or min(cores(), MAX_CPU_RANKS)


def _variables(local_ranks: str, nodes: str) -> dict[str, str]:
    variables = {}
    if local_ranks.isdecimal() and int(local_ranks) > 1:
        # torchrun sets 1, which leaves the other cores idle.
        variables["OMP_NUM_THREADS"] = str(max(1, cores() // int(local_ranks)))
    first, _, last = nodes.partition(":")
    if last and first != last:
        # Nodes that join later cannot enter while the store of the first rendezvous is reused.
        variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    return variables


def _why(script: str, is_module: bool, local_ranks: str, nodes: str) -> str:
    import torch

    gpus = torch.cuda.device_count()
    where = f"{gpus} GPUs here" if gpus else f"no GPU, {cores()} cores here"
    what = f"module {script}" if is_module else script
    ranks = "1 rank" if local_ranks == "1" else f"{local_ranks} ranks"
    return f"{what} on {ranks}{'' if nodes == '1' else f' of each of {nodes} nodes'} ({where})"


def _torchrun_arguments(words: Sequence[str]) -> argparse.Namespace:
    """torchrun's arguments, parsed by its own parser, with its defaults."""
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    parser.__class__ = _Parser
    return parser.parse_args(list(words))


@contextlib.contextmanager
def _log_folder(arguments: argparse.Namespace) -> Iterator[None]:
    """Without options for logs, torchrun leaves an empty folder behind after every run; ours is removed."""
    none = {None, "", "0"}
    if arguments.log_dir or arguments.logs_specs or not {arguments.redirects, arguments.tee} <= none:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="fullshard-launch-", ignore_cleanup_errors=True) as folder:
        arguments.log_dir = folder
        yield


def _signals(arguments: argparse.Namespace) -> PassedOn:
    """How signals are passed on: here, unless an option asks torchrun's agent to do that for some of them."""
    from torch.distributed.launcher.api import LaunchConfig

    limit_s: int | None = getattr(arguments, "shutdown_timeout", None)
    default = getattr(LaunchConfig, "signals_to_handle", None)
    if default is None or arguments.signals_to_handle != default:
        return PassedOn(limit_s, ())
    arguments.signals_to_handle = "SIGQUIT"  # for which the agent's own handler stays
    return PassedOn(limit_s)


@contextlib.contextmanager
def _records_removed() -> Iterator[None]:
    """Ranks that were killed, or have left by os._exit, cannot remove what they have recorded in memory."""
    from fullshard.comm.recorder_files import records_parent, records_prefix, remove_abandoned

    try:
        yield
    finally:
        remove_abandoned(records_parent(), records_prefix())


def start(launching: Launching) -> int:
    """Run torchrun in this process. The exit code is that of the rank that failed first."""
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    arguments = _torchrun_arguments(launching.words)
    signals = _signals(arguments)
    try:
        with _records_removed(), _log_folder(arguments), signals.listening():
            torchrun.run(arguments)  # type: ignore[no-untyped-call, unused-ignore]
    except ChildFailedError as error:
        rank = first_to_fail(error.failures)
        failure = error.failures[rank]
        code = failure.exitcode
        name = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        text = _recorded(failure)
        about = "" if text is None else f": {text}"
        print(f"fullshard: rank {rank} was the first to fail, with {name}{about}", file=sys.stderr)
        return 128 - code if code < 0 else code or 1
    except SignalException as error:
        print(f"fullshard: stopped by {signal.Signals(error.sigval).name}", file=sys.stderr)
        return signals.exit_code(int(error.sigval))
    except (ValueError, AssertionError) as error:  # an option's value, which torchrun checks only now
        raise OptionError(str(error), "See torchrun --help.") from error
    return 0


def first_to_fail(failures: Mapping[int, Any]) -> int:
    """The rank whose failure the others follow.

    torch compares times, and a rank that was killed has none but that of its discovery: others may have found
    out before, that they wait for it in vain. The agent ends what is left with SIGTERM.
    """
    causes = dict(failures)
    for follows in (
        lambda failure: (_recorded(failure) or "").startswith("Stalled"),
        lambda failure: failure.exitcode == -signal.SIGTERM,
    ):
        causes = {rank: failure for rank, failure in causes.items() if not follows(failure)} or causes
    return min(causes, key=lambda rank: causes[rank].timestamp)


def _recorded(failure: Any) -> str | None:
    """What the rank has written about it."""
    message: Any = failure.message  # a dict where there is such a file, despite its annotation
    return str(message.get("message", "")) if isinstance(message, dict) else None


LAUNCH = Command(
    "launch",
    _launch,
    "run a training script on all GPUs of this machine, or on several machines",
    """\
A thin wrapper around torchrun: all its options pass through (--nnodes, --rdzv-endpoint,
--max-restarts, --tee, -m, ...; `torchrun --help` lists them). It adds four things.

1. In every rank the Hugging Face integration is turned on: a script with
   TrainingArguments(fsdp="full_shard auto_wrap") trains on fullshard, unchanged. Other
   scripts run as with python.
2. Defaults: one rank per GPU, or without GPUs one per core, 8 at most; a rendezvous of
   its own (--standalone) on a single machine, so that two runs do not interfere;
   OMP_NUM_THREADS by the number of cores; for elastic runs (--nnodes 1:4) the setting
   without which nodes that join later wait for ever.
3. SIGTERM, SIGINT, SIGHUP, SIGUSR1 and SIGUSR2 are passed on to the ranks, and to no other
   process: a script that looks at fs.stop_requested() saves, however long that takes
   (--shutdown-timeout limits it; a second Ctrl-C ends all).
4. A missing script is an error before any process starts, tracebacks contain only your
   own lines, and the exit code is that of the rank that failed first.

With --elastic MIN:MAX the run goes on when ranks or hosts are lost, on MIN to MAX ranks,
and grows again when hosts come back (docs/elastic.md); --rounds FILE records that.

--dry-run prints the command and starts nothing. Options come before SCRIPT; arguments
after it belong to the script.""",
    """\
examples:
  fullshard launch train.py --epochs 3
  fullshard launch --nproc-per-node 2 train.py
  fullshard launch --nnodes 2 --rdzv-backend c10d --rdzv-endpoint host:29400 train.py
  fullshard launch --elastic 2:8 train.py
  fullshard launch -m my_package.train --lr 1e-4
  fullshard launch --dry-run train.py

Exit code 0: the script is done; 2: invalid request; otherwise the script's own, or
128 plus the number of the signal that stopped it (138: SIGUSR1, 143: SIGTERM).""",
    {"ignore_unknown_options": True, "allow_interspersed_args": False, "help_option_names": []},
    names=_long_options,
)
