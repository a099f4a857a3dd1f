"""`make demo`: a small GPT, sharded with zero3 over local ranks, learns to write Python.

Run it as `python examples/demo.py`; it starts its own ranks: one for each GPU, or two on the CPU.
"""

import argparse
import math
import os
import resource
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn

import fullshard as fs
from gpt import GPT, GPTConfig, generate, sample_batch, standard_library_bytes

MIB = 2**20
OUTPUT = Path(__file__).resolve().parent.parent / "demo-output"
TEXT_LIMIT_BYTES = 4_000_000
WARMUP_STEPS = 20
PROMPT = b"def "
SAMPLE_BYTES = 300


@dataclass(frozen=True)
class Settings:
    """What one run of the demo does."""

    num_ranks: int
    num_steps: int
    batch_size: int
    time_limit_s: float
    seed: int

    @property
    def uses_gpus(self) -> bool:
        return self.num_ranks <= torch.cuda.device_count()

    @property
    def device(self) -> torch.device:
        return torch.device(f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if self.uses_gpus else "cpu")


@dataclass(frozen=True)
class Holdings:
    """Bytes that a process holds between steps."""

    parameters: int
    gradients: int
    optimizer_state: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer_state


@dataclass(frozen=True)
class StepReport:
    """What all ranks know after a step: one all-reduce brings it together."""

    loss: float
    memory_mib: tuple[float, ...]
    is_over_time: bool


# Starting the ranks.


def main() -> int:
    settings = read_settings()
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return launch(settings)
    train(settings)
    return 0


def read_settings() -> Settings:
    num_gpus = torch.cuda.device_count()
    parser = argparse.ArgumentParser(description="Train a small GPT, sharded over local ranks.")
    parser.add_argument("--ranks", type=int, default=num_gpus or 2, help="local ranks to start")
    parser.add_argument("--steps", type=int, default=2000 if num_gpus else 160, help="optimizer steps")
    parser.add_argument("--batch-size", type=int, default=64 if num_gpus else 8, help="sequences per rank")
    parser.add_argument("--time-limit", type=float, default=80.0, help="seconds of training at most")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if min(given.ranks, given.steps, given.batch_size) < 1:
        parser.error("--ranks, --steps and --batch-size must be at least 1")
    return Settings(given.ranks, given.steps, given.batch_size, given.time_limit, given.seed)


def launch(settings: Settings) -> int:
    """Run this script again under torchrun, the CPU's cores divided between the ranks."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--nproc-per-node", str(settings.num_ranks), __file__, *sys.argv[1:]]
    threads = max(1, num_cores() // settings.num_ranks)
    environment = {"OMP_NUM_THREADS": str(threads), **os.environ}
    return subprocess.run(torchrun, env=environment, check=False).returncode


def num_cores() -> int:
    """The cores this process may use, which in a container are fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# Training. Take away `fs.shard` and what asks torch.distributed, and this is one process's loop.


def train(settings: Settings) -> None:
    console = Console()
    torch.manual_seed(settings.seed)
    if settings.uses_gpus:
        torch.cuda.set_device(settings.device)
    config = GPTConfig()
    model = GPT(config).to(settings.device)
    whole = unsharded_holdings(model)
    model = fs.shard(model, strategy="zero3")
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
    is_first = dist.get_rank() == 0

    if is_first:
        console.print(opening(whole, settings), highlight=False)
    losses = run_steps(model, optimizer, settings, console)
    holdings = gather_holdings(holdings_at_rest(model, optimizer))
    model.eval()
    sample = generate(model, PROMPT, SAMPLE_BYTES, config.context)
    if is_first:
        report(console, losses, whole, holdings, sample)
    dist.destroy_process_group()


def run_steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, settings: Settings, console: Console
) -> list[float]:
    """Train; the mean loss over all ranks, step by step."""
    context = GPTConfig().context
    text = standard_library_bytes(TEXT_LIMIT_BYTES)
    dice = torch.Generator().manual_seed(settings.seed + dist.get_rank())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, settings))
    display = Display(console, settings, tokens_per_step=settings.num_ranks * settings.batch_size * context)
    losses: list[float] = []
    started_s = time.monotonic()
    with display:
        for _ in range(settings.num_steps):
            # Cleared at the start, so that the last step's gradients are still there to be weighed.
            optimizer.zero_grad()
            tokens, targets = sample_batch(text, settings.batch_size, context, dice)
            loss = model(tokens.to(settings.device), targets.to(settings.device)).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            step = gather_report(loss, is_over_time=time.monotonic() - started_s > settings.time_limit_s)
            losses.append(step.loss)
            display.update(step)
            if step.is_over_time:
                break
    return losses


def learning_rate_factor(step: int, settings: Settings) -> float:
    """Linear warm-up, then half a cosine down to a tenth."""
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    progress = min(1.0, (step - WARMUP_STEPS) / max(1, settings.num_steps - WARMUP_STEPS))
    return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))


def gather_report(loss: Tensor, is_over_time: bool) -> StepReport:
    """Bring the step's figures together. All ranks get the same answer, so they stop at the same step."""
    num_ranks = dist.get_world_size()
    figures = torch.zeros(2 + num_ranks, device=loss.device)
    figures[0] = loss.detach() / num_ranks
    figures[1] = float(is_over_time)
    figures[2 + dist.get_rank()] = memory_bytes(loss.device) / MIB
    dist.all_reduce(figures)
    mean_loss, num_over_time, *memory_mib = figures.tolist()
    return StepReport(mean_loss, tuple(memory_mib), num_over_time > 0)


def memory_bytes(device: torch.device) -> int:
    """What this rank takes: of the GPU, or of the host where there is none."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    try:
        resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:  # not Linux: the highest so far, in bytes on macOS
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return resident_pages * resource.getpagesize()


# What is held at rest.


def tensor_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def unsharded_holdings(model: nn.Module) -> Holdings:
    """What one process would hold: whole parameters and gradients, AdamW's two moments and step counts."""
    parameters = list(model.parameters())
    size = sum(tensor_bytes(p) for p in parameters)
    step_counters = 4 * len(parameters)
    return Holdings(parameters=size, gradients=size, optimizer_state=2 * size + step_counters)


def holdings_at_rest(model: nn.Module, optimizer: torch.optim.Optimizer) -> Holdings:
    """What this rank holds, counted tensor by tensor."""
    states = [value for state in optimizer.state.values() for value in state.values()]
    return Holdings(
        parameters=sum(tensor_bytes(p) for p in model.parameters()),
        gradients=sum(tensor_bytes(p.grad) for p in model.parameters() if p.grad is not None),
        optimizer_state=sum(tensor_bytes(value) for value in states if isinstance(value, Tensor)),
    )


def gather_holdings(mine: Holdings) -> list[Holdings]:
    everyones: list[dict[str, int]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyones, asdict(mine))
    return [Holdings(**one) for one in everyones]


# What people see.


class Display:
    """A progress bar on rank 0, plain lines where there is no terminal, nothing on the other ranks."""

    def __init__(self, console: Console, settings: Settings, tokens_per_step: int) -> None:
        self.console = console
        self.num_steps = settings.num_steps
        self.tokens_per_step = tokens_per_step
        self.num_done = 0
        self.is_shown = dist.get_rank() == 0
        self.progress = Progress(
            BarColumn(bar_width=16),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(compact=True),
            console=console,
            disable=not (self.is_shown and console.is_terminal),
        )
        self.task = self.progress.add_task("training", total=self.num_steps, figures="")
        self.started_s = 0.0

    def __enter__(self) -> None:
        self.started_s = time.monotonic()
        self.progress.start()

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def update(self, step: StepReport) -> None:
        self.num_done += 1
        if not self.is_shown:
            return
        tokens_per_s = self.num_done * self.tokens_per_step / (time.monotonic() - self.started_s)
        memory = describe_memory(step.memory_mib)
        figures = f"loss {step.loss:.3f}  {tokens_per_s:,.0f} tokens/s  {memory}"
        self.progress.update(self.task, completed=self.num_done, figures=figures)
        every = max(1, self.num_steps // 16)
        if not self.console.is_terminal and (self.num_done % every == 0 or self.num_done == 1):
            self.console.print(f"step {self.num_done}/{self.num_steps}  {figures}", soft_wrap=True)


def opening(whole: Holdings, settings: Settings) -> str:
    size = whole.parameters // torch.float32.itemsize
    where = "one GPU each" if settings.uses_gpus else "on the CPU"
    memory = "allocated on its GPU" if settings.uses_gpus else "resident in its process"
    return (
        f"A byte-level GPT of {size:,} parameters learns the Python library's source.\n"
        f"Sharded with [bold]zero3[/] over {settings.num_ranks} ranks, {where}.\n"
        f"Memory is each rank's, {memory}."
    )


def describe_memory(memory_mib: tuple[float, ...]) -> str:
    if len(memory_mib) <= 4:
        return " | ".join(f"{mib:.0f}" for mib in memory_mib) + " MiB"
    return f"{min(memory_mib):.0f} to {max(memory_mib):.0f} MiB"


def report(
    console: Console, losses: list[float], whole: Holdings, ranks: list[Holdings], sample: bytes
) -> None:
    if len(losses) >= 2:
        console.print(f"Loss {losses[0]:.3f} at the first step, {losses[-1]:.3f} at step {len(losses)}.")
    console.print(holdings_table(whole, ranks))
    console.rule(f"{len(sample)} bytes from the trained model")
    console.print(printable(sample), markup=False, highlight=False, soft_wrap=True)
    console.rule()
    console.print(f"Loss curve: {draw_losses(losses)}", soft_wrap=True)


def printable(text: bytes) -> str:
    """The text without what could steer a terminal: an untrained model may write any byte."""
    characters = text.decode("utf-8", errors="replace")
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in characters)


def holdings_table(whole: Holdings, ranks: list[Holdings]) -> Table:
    table = Table(title="Held at rest, MiB")
    for column in ("", "parameters", "gradients", "optimizer", "total", "share"):
        table.add_column(column, justify="right" if column else "left")
    rows = [(f"rank {rank}", held) for rank, held in enumerate(ranks)]
    for name, held in [*rows, ("one unsharded process", whole)]:
        sizes = (held.parameters, held.gradients, held.optimizer_state, held.total)
        share = f"{held.total / whole.total:.1%}"
        table.add_row(name, *(f"{size / MIB:.2f}" for size in sizes), share, end_section=held is ranks[-1])
    return table


def draw_losses(losses: list[float]) -> Path:
    import matplotlib

    matplotlib.use("Agg")  # a picture in a file; there may be no screen
    from matplotlib import pyplot

    OUTPUT.mkdir(parents=True, exist_ok=True)
    path = OUTPUT / "loss.png"
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(range(1, len(losses) + 1), losses)
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title="A byte-level GPT, sharded with zero3")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return path


if __name__ == "__main__":
    sys.exit(main())
