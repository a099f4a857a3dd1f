"""This process and its host: the only module that reads the environment."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from fullshard.errors import OptionError

if TYPE_CHECKING:  # imported where it is used: the command line does without it
    import torch

N = TypeVar("N", int, float)

KEEPER = "FULLSHARD_KEEPER"  # set by the agent of a host for its ranks: where copies in memory are kept


@dataclass(frozen=True)
class Launch:
    """What the launcher set for this process; a world of one if it set nothing."""

    rank: int = 0
    ranks: int = 1
    local_rank: int = 0
    local_ranks: int = 1
    rendezvous: bool = False
    stall_timeout_s: float = 600.0


def launch() -> Launch:
    """Read torchrun's variables. A half-set environment is an error, not a guess."""
    stall = stall_timeout_s()
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    given = [name for name in names if os.environ.get(name)]
    if not ({"RANK", "WORLD_SIZE"} & set(given)):
        return Launch(stall_timeout_s=stall)  # an address alone does not define ranks
    missing = [name for name in names if name not in given]
    rank, ranks = _count("RANK", 0), _count("WORLD_SIZE", 1)
    if missing and not ("WORLD_SIZE" in given and ranks == 1):
        raise OptionError(
            f"the environment sets {', '.join(given)} but not {', '.join(missing)}",
            "Launch with torchrun, which sets all four, or unset them to run as a world of one.",
        )
    if not 0 <= rank < ranks:
        raise OptionError(
            f"the environment sets RANK={rank} and WORLD_SIZE={ranks}",
            "Launch with torchrun; ranks count from 0 to WORLD_SIZE - 1.",
        )
    local_ranks = _count("LOCAL_WORLD_SIZE", ranks)
    if local_ranks < 1:
        raise OptionError(
            f"the environment sets LOCAL_WORLD_SIZE={local_ranks}",
            "Launch with torchrun, which sets it to the number of ranks of this node, or unset it.",
        )
    return Launch(
        rank=rank,
        ranks=ranks,
        local_rank=_count("LOCAL_RANK", rank % local_ranks),
        local_ranks=local_ranks,
        rendezvous=not missing,
        stall_timeout_s=stall,
    )


def stall_timeout_s() -> float:
    """FULLSHARD_STALL_TIMEOUT_S: how long nothing may move before an operation is given up."""
    return _number("FULLSHARD_STALL_TIMEOUT_S", 600.0)


def refuse_tasks_without_ranks() -> None:
    """In a process without torchrun's variables: an error where it is one of several tasks of a Slurm step,
    each of which would train a copy of the model by itself."""
    tasks, task = os.environ.get("SLURM_STEP_NUM_TASKS", ""), os.environ.get("SLURM_PROCID")
    if task is None or not tasks.isdecimal() or int(tasks) < 2 or "RANK" in os.environ:
        return
    raise OptionError(
        f"this is task {task} of {tasks} that srun started, and no variable names its rank: each task would "
        "train alone",
        "Start one launcher per node (srun --ntasks-per-node=1 fullshard launch ...), or export "
        "RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_STEP_NUM_TASKS LOCAL_RANK=$SLURM_LOCALID, MASTER_ADDR and "
        "MASTER_PORT in each task.",
    )


def fill_in(rank: int, ranks: int, local_rank: int, local_ranks: int) -> None:
    """For a launcher that starts ranks and sets only some of torchrun's variables: set the others."""
    variables = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_ranks}
    for name, value in variables.items():
        os.environ.setdefault(name, str(value))


def compute_device(device: torch.device) -> torch.device:
    """Where shards live, for the device of a model: a meta model goes to this rank's GPU, or the CPU.

    'cuda' alone is this rank's GPU too. Not the current device, as in torch: where nobody has set that, all
    ranks of a host would take the first. 'cpu:0' becomes 'cpu', to which torch compares it as unequal.
    """
    import torch

    if device.type == "meta":
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", launch().local_rank % torch.cuda.device_count())
    return device


def variables_of_rank(rank: int, ranks: int, port: int, hides_gpus: bool) -> dict[str, str]:
    """The environment of a process that is a rank of this host, also of one rank alone: many scripts call
    `init_process_group` whatever their number of ranks is."""
    ours = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    variables = {name: value for name, value in os.environ.items() if name not in ours}
    places = (rank, ranks, rank, ranks, "127.0.0.1", port)
    variables |= {name: str(value) for name, value in zip(ours, places, strict=True)}
    variables["TORCHELASTIC_RUN_ID"] = "doctor"  # by which libraries know that ranks are started already
    variables.setdefault("OMP_NUM_THREADS", str(max(1, cores() // ranks)))
    if hides_gpus:
        variables["CUDA_VISIBLE_DEVICES"] = ""
    return variables


# What may be shown to others: none of these holds a name, a path, an address or a secret.
_HARMLESS = (
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES"),
    *("CUDA_LAUNCH_BLOCKING", "CUBLAS_WORKSPACE_CONFIG", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"),
    *("TORCH_NCCL_BLOCKING_WAIT", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_DISTRIBUTED_DEBUG"),
    *("NCCL_DEBUG", "NCCL_ALGO", "NCCL_PROTO", "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_SHM_DISABLE"),
    *("NCCL_IB_DISABLE", "NCCL_NET_GDR_LEVEL", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS"),
    *("FULLSHARD_STALL_TIMEOUT_S", "PYTHONHASHSEED", "ACCELERATE_USE_FSDP"),
)
_SECRET_WORDS = ("TOKEN", "SECRET", "PASSW", "CREDENTIAL", "KEY", "AUTH", "COOKIE", "SESSION")


def harmless_variables() -> dict[str, str]:
    """Environment variables that explain a run and may be shown to others."""
    return {name: os.environ[name] for name in _HARMLESS if name in os.environ}


def secret_values() -> list[str]:
    """Values of environment variables whose names look as if they were secret, the longest first."""
    named = [v for name, v in os.environ.items() if any(word in name.upper() for word in _SECRET_WORDS)]
    return sorted({value for value in named if len(value) >= 6}, key=len, reverse=True)


def cores() -> int:
    """Cores that this process may use, by its affinity and its container's quota."""
    try:
        count = len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        count = os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(count, int(quota) // int(period)))
    except (OSError, ValueError):  # no cgroup, or "max"
        return max(1, count)


def cache_folder() -> Path:
    """Where files of this user are kept between runs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fullshard"


def host_name() -> str:
    """The name of this host in messages: FULLSHARD_HOST, or the system's."""
    return own_host_name() or socket.gethostname()


def own_host_name() -> str | None:
    """FULLSHARD_HOST, for containers and tests: only ranks with the same name are on one host."""
    return os.environ.get("FULLSHARD_HOST") or None


def run_secret() -> str:
    """FULLSHARD_RUN_SECRET, where a launcher gives all ranks of a run one word that nobody else has."""
    return os.environ.get("FULLSHARD_RUN_SECRET", "")


def keeper() -> str:
    """FULLSHARD_KEEPER: the places in memory that the agent of this host holds for its ranks, or ''."""
    return os.environ.get(KEEPER, "")


def agent_folder() -> str | None:
    """FULLSHARD_AGENT: where a rank of an elastic run reports to the agent of its host."""
    return os.environ.get("FULLSHARD_AGENT") or None


def all_variables() -> dict[str, str]:
    """A copy of the environment, for a process that is to be started."""
    return dict(os.environ)


def replace_variables(variables: dict[str, str]) -> None:
    """Be a process that was started with these variables."""
    os.environ.clear()
    os.environ.update(variables)


def plan_from_environment() -> str | None:
    """FULLSHARD_PLAN: 'auto', or the file of a recorded plan, for models that a library prepares."""
    return os.environ.get("FULLSHARD_PLAN") or None


def cluster_name() -> str:
    """FULLSHARD_CLUSTER, Slurm's name of the cluster, or this host's name."""
    named = os.environ.get("FULLSHARD_CLUSTER") or os.environ.get("SLURM_CLUSTER_NAME")
    return named or socket.gethostname().partition(".")[0]


def set_default_variables(variables: dict[str, str]) -> list[str]:
    """Set environment variables that the user has not set, for processes that are started from here; returns
    their names."""
    new = [name for name in variables if name not in os.environ]
    os.environ.update({name: variables[name] for name in new})
    return new


def torchrun_defaults() -> dict[str, str]:
    """Options of torchrun from its PET_ variables."""
    given = {name: value for name, value in os.environ.items() if name.startswith("PET_")}
    return {name.removeprefix("PET_").lower(): value for name, value in given.items()}


def let_segments_grow() -> None:
    """Have CUDA's allocator grow its segments instead of adding new ones, unless the user configured it.

    Full values, gradients and activations of different sizes come and go in turns, which leaves holes in
    segments of fixed size. With this, 2 to 22 % above the allocated peak was reserved (docs/benchmarks.md).
    """
    import torch

    configured = os.environ.get("PYTORCH_ALLOC_CONF", "") + os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    change = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if not configured and change is not None and torch.cuda.is_available():
        change("expandable_segments:True")


def free_bytes(device: torch.device) -> int:
    """Memory that this rank may still take on its device: its share of what is free there now."""
    launched = launch()
    if device.type == "cuda":
        import torch

        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free // -(-launched.local_ranks // torch.cuda.device_count()) + cached
    return max(0, min(_host_free(), *_container_free())) // launched.local_ranks


def _host_free() -> int:
    try:
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
        return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")


def _container_free() -> list[int]:
    """Free bytes by the limits of this container, where there are any (cgroups, versions 2 and 1)."""
    groups = Path("/sys/fs/cgroup")
    pairs = ("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")
    free = [sys.maxsize]
    for limit, used in pairs:
        with contextlib.suppress(OSError, ValueError):  # "max" is no number
            cache = _file_cache(groups / Path(used).parent / "memory.stat")
            free.append(int((groups / limit).read_text()) - int((groups / used).read_text()) + cache)
    return free


def _file_cache(stat: Path) -> int:
    """Bytes of cached files, which the system reclaims first."""
    fields = dict(line.split() for line in stat.read_text().splitlines())
    return int(fields.get("inactive_file", 0))


def return_memory_to_system() -> None:
    """Return released host buffers to the system (glibc; elsewhere nothing happens).

    Aligned blocks that are allocated and freed leave holes that older glibc does not reuse: a run that held
    25 MiB of tensors grew to 1500 MiB of resident memory. Direct mappings instead (M_MMAP_THRESHOLD) made a
    step a quarter slower; a trim every few passes has no measurable cost.
    """
    if _libc is not None:
        _libc.malloc_trim(0)


def _load_libc() -> ctypes.CDLL | None:
    try:
        libc = ctypes.CDLL(None)
        return libc if hasattr(libc, "malloc_trim") else None
    except OSError:
        return None


_libc = _load_libc()


def _number(name: str, default: float) -> float:
    return _parsed(name, default, float, "a number")


def _count(name: str, default: int) -> int:
    return _parsed(name, default, int, "an integer")


def _parsed(name: str, default: N, parse: Callable[[str], N], kind: str) -> N:
    text = os.environ.get(name)
    if not text:
        return default
    try:
        return parse(text)
    except ValueError:
        raise OptionError(
            f"the environment variable {name} is {text!r}, not {kind}", "Launch with torchrun, or unset it."
        ) from None
