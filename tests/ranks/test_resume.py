"""A run that is killed and started again gives the numbers of one that was not: bit by bit.

`_train` is a training script as a user would write it. It runs on real processes, which are killed with
SIGKILL and started anew with the same arguments. Every step writes its loss and the indices of its samples
to a file; at the end model and optimizer are saved once more, and read with safetensors alone.
"""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import os
import random
import runpy
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

import fullshard as fs
import ranks
import reference
import warm
from engines import shard_blocks
from fullshard.data import Batches

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "resume.py"
SAMPLES, BATCH, WIDTH, LENGTH, VOCABULARY = 37, 6, 16, 5, 11
STEPS, SAVE_EVERY = 14, 3  # of the optimizer; two epochs and a little more
LIMIT_S = 120.0


# --- the training script --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """What is trained, and how. `root` holds checkpoints and records."""

    root: str
    strategy: str = "zero3"
    precision: str = "fp32"
    dropout: float = 0.2
    noise: bool = True  # samples draw from the generators of torch, Python and numpy
    recompute: bool = False
    micro_batches: int = 1
    loader: str = "plain"  # or 'workers', 'stateful'
    background: bool = False
    by_loader_state: bool = True  # a stateful loader goes on by its own state, not by that of the batches


@dataclass(frozen=True)
class Kill:
    """When a process ends itself with SIGKILL: at a point of a step, or so long after its first step."""

    ranks: tuple[int, ...] = (0, 1)
    step: int = -1
    point: str = "after save"
    after_s: float | None = None


class Samples(Dataset[Any]):
    """Tokens, a function of the index; with noise some are replaced at random."""

    def __init__(self, noise: bool) -> None:
        self.noise = noise

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        tokens = torch.randint(VOCABULARY, (LENGTH + 1,), generator=torch.Generator().manual_seed(index))
        if self.noise:
            tokens[0] = random.randrange(VOCABULARY)
            tokens[1] = int(np.random.randint(VOCABULARY))
            tokens[2] = torch.randint(VOCABULARY, ())
        return index, tokens


class SamplesWithState(Samples):
    """For worker processes: their generators go with the loader's state."""

    def state_dict(self) -> dict[str, Any]:
        return {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state["torch"])
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norms[0](x)).chunk(3, dim=-1)
        scores = (query @ key.transpose(1, 2) / WIDTH**0.5).masked_fill(
            torch.ones(LENGTH, LENGTH).triu(1).bool(), -1e4
        )
        x = x + self.dropout(self.out(scores.softmax(-1) @ value))
        out: Tensor = x + self.dropout(self.feed(self.norms[1](x)))
        return out


class Gpt(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.place = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.place
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


class Training:
    """All that has a state."""

    def __init__(self, run: Run) -> None:
        self.run, self.rank = run, int(os.environ["RANK"])
        torch.manual_seed(1)
        self.model = shard_blocks(
            Gpt(run.dropout),
            strategy=run.strategy,
            precision=run.precision,
            checkpoint_activations=run.recompute,
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, eps=1e-4)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 2e-2, total_steps=STEPS + 1)
        # A small step up at first: scales grow on the way, and their growth counter must be restored.
        self.scaler = torch.amp.GradScaler(
            "cpu", init_scale=64.0, growth_interval=4, enabled=run.precision == "fp16"
        )
        self.batches = Batches(SAMPLES, BATCH // run.micro_batches, seed=5)
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(100 + self.rank)
        self.loader = self._loader()

    def _loader(self) -> Any:
        kind = StatefulDataLoader if self.run.loader == "stateful" else DataLoader
        samples = (SamplesWithState if self.run.loader == "stateful" else Samples)(self.run.noise)
        options: dict[str, Any] = {}
        if self.run.loader != "plain":  # as in a script: our processes come from a fork server
            options = {
                "num_workers": 2,
                "multiprocessing_context": "fork",
                "worker_init_fn": _end_with_parent,
            }
        return kind(samples, batch_sampler=self.batches, **options)

    def resume(self) -> str | None:
        path = fs.latest(self.run.root)
        if path is None:
            return None
        extra = fs.load(path, self.model, self.optimizer)
        self.scheduler.load_state_dict(extra["scheduler"])
        self.scaler.load_state_dict(extra["scaler"])
        if self.run.loader == "stateful" and self.run.by_loader_state:
            self.loader.load_state_dict(extra["loader"])
        else:
            self.batches.resume(extra["batches"])
        return path.name

    def save(self, step: int) -> None:
        extra = {
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
            "batches": self.batches.state(),
        }
        if self.run.loader == "stateful":
            extra["loader"] = self.loader.state_dict()
        fs.save(
            f"{self.run.root}/step-{step}",
            self.model,
            self.optimizer,
            extra=extra,
            background=self.run.background,
            keep_last=2,
        )

    def micro_step(self, tokens: Tensor, last: bool) -> float:
        with contextlib.nullcontext() if last else fs.accumulate(self.model):
            logits = self.model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
            self.scaler.scale(loss / self.run.micro_batches).backward()
        return loss.item()

    def numbers(self, loss: float) -> dict[str, str]:
        """All that must be the same to the last bit."""
        rate = self.scheduler.get_last_lr()[0]
        return {"loss": loss.hex(), "rate": rate.hex(), "scale": self.scaler.get_scale().hex()}

    def step(self) -> None:
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.scheduler.step()


def _train(run: Run, kill: Kill | None = None) -> None:
    if run.loader != "plain":  # ranks.py's processes are daemons, which may not have children
        multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    training = Training(run)
    came_from = training.resume()
    with Record(run.root, training.rank, kill) as record:
        record.write(resumed=came_from)
        for micro_step, (index, tokens) in training.batches.steps(training.loader):
            step, micro = divmod(micro_step, run.micro_batches)
            if step == STEPS:
                break
            last = micro == run.micro_batches - 1
            loss = training.micro_step(tokens, last)
            record.write(micro_step=micro_step, indices=index.tolist(), **training.numbers(loss))
            if last:
                record.point("before step", step)
                training.step()
                if step % SAVE_EVERY == SAVE_EVERY - 1:
                    training.save(step)
                record.point("after save", step)
    fs.save(f"{run.root}-end", training.model, training.optimizer)


class Record:
    """One line a step; a line that was written outlives a SIGKILL. Also where that comes from."""

    def __init__(self, root: str, rank: int, kill: Kill | None) -> None:
        Path(root).mkdir(parents=True, exist_ok=True)
        self._file = open(f"{root}-rank-{rank}.jsonl", "a", buffering=1)  # noqa: SIM115
        self._kill = kill if kill is not None and rank in kill.ranks else None
        self._first = True

    def __enter__(self) -> Record:
        return self

    def __exit__(self, *_: Any) -> None:
        self._file.close()

    def write(self, **values: Any) -> None:
        self._file.write(json.dumps(values) + "\n")

    def point(self, name: str, step: int) -> None:
        if self._kill is None:
            return
        if self._first and self._kill.after_s is not None:
            threading.Timer(self._kill.after_s, _kill_myself).start()
        self._first = False
        if (name, step) == (self._kill.point, self._kill.step):
            _kill_myself()


def _kill_myself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _end_with_parent(_: int) -> None:
    ranks._die_with_parent()  # a loader's worker looks only every 5 s whether its rank is still there


# --- what it left ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class History:
    """Of each rank: every line of every start, in order. Model and optimizer at the end, by plain reading."""

    starts: list[list[dict[str, Any]]]
    lines: list[list[dict[str, Any]]]
    tensors: dict[str, Tensor]

    def last(self, rank: int) -> dict[int, dict[str, Any]]:
        """By micro-step, from the start that went on from there."""
        return {line["micro_step"]: line for line in self.lines[rank]}

    def global_batches(self) -> list[list[int]]:
        by_rank = [self.last(rank) for rank in range(len(self.lines)) if self.lines[rank]]
        return [sum((of[step]["indices"] for of in by_rank), []) for step in sorted(by_rank[0])]  # noqa: RUF017


def history(run: Run, num_ranks: int = 2) -> History:
    starts, lines = [], []
    for rank in range(num_ranks):
        found = [json.loads(line) for line in Path(f"{run.root}-rank-{rank}.jsonl").read_text().splitlines()]
        starts.append([line for line in found if "resumed" in line])
        lines.append([line for line in found if "loss" in line])
    tensors: dict[str, Tensor] = {}
    for file in sorted(Path(f"{run.root}-end").glob("*.safetensors")):
        if not file.name.startswith("rank-"):
            tensors |= {f"{file.name}:{k}": v for k, v in safetensors.torch.load_file(file).items()}
    return History(starts, lines, tensors)


@functools.cache
def _uninterrupted(run: Run) -> History:
    with tempfile.TemporaryDirectory() as folder:
        run = replace(run, root=f"{folder}/run")
        ranks.run(_train, 2, run, fresh=True, timeout_s=LIMIT_S)
        return history(run)


def uninterrupted(run: Run) -> History:
    return _uninterrupted(replace(run, root=""))


def killed(run: Run, kill: Kill, num_ranks: int = 2) -> bool:
    """Start it, and have it killed. False if it was over before it could be."""
    outcome = ranks.outcome(_train, num_ranks, run, kill, fresh=True, timeout_s=LIMIT_S, grace_s=30.0)
    if kill.after_s is not None and not outcome.errors:
        return False
    # A rank that lost the others before it could kill itself has an error of its own.
    by_signal = {rank for rank, error in outcome.errors.items() if error.message.endswith("exit code -9")}
    assert by_signal, outcome.errors
    assert by_signal <= set(kill.ranks), outcome.errors
    assert not outcome.hung, outcome.errors
    return True


def assert_same_numbers(found: History, expected: History) -> None:
    for rank, lines in enumerate(found.lines):
        wanted = expected.last(rank)
        assert set(found.last(rank)) == set(wanted), f"rank {rank} made other steps"
        for line in lines:  # steps that were made twice included
            assert line == wanted[line["micro_step"]], f"rank {rank}: {line}, uninterrupted {wanted}"
    assert_same_end(found, expected)


def assert_same_end(found: History, expected: History) -> None:
    assert found.tensors.keys() == expected.tensors.keys()
    assert any(name.startswith("optimizer") for name in found.tensors)
    for name, value in expected.tensors.items():
        assert reference.bitwise(found.tensors[name], value), f"{name} differs at the end"


def assert_every_sample_once_an_epoch(found: History) -> None:
    stream = sum(found.global_batches(), [])  # noqa: RUF017
    assert len(stream) == STEPS * BATCH
    for start in range(0, len(stream) - SAMPLES + 1, SAMPLES):
        assert sorted(stream[start : start + SAMPLES]) == list(range(SAMPLES))


VARIANTS = {
    "plain": Run(""),
    "recompute_bf16_stateful_background": Run(
        "", precision="bf16", recompute=True, loader="stateful", background=True
    ),
    "accumulate_fp16": Run("", strategy="zero2", precision="fp16", micro_batches=3),
    "workers_zero1": Run("", strategy="zero1", noise=False, loader="workers", micro_batches=3),
    "recompute_bf16": Run("", precision="bf16", recompute=True, background=True),
    "replicate_stateful": Run("", strategy="replicate", loader="stateful", micro_batches=3),
    "hybrid": Run("", strategy="hybrid", background=True),
}


def _of(variant: str, folder: Path) -> Run:
    return replace(VARIANTS[variant], root=str(folder / "run"))


# --- killed and started again ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variant", "kill"),
    [
        pytest.param("plain", Kill(step=9), marks=pytest.mark.long),
        ("recompute_bf16_stateful_background", Kill(ranks=(1,), step=8)),
        ("accumulate_fp16", Kill(step=7, point="before step")),
    ],
    ids=["plain", "recompute_bf16_stateful_background_one_rank_killed", "accumulate_fp16"],
)
def test_a_killed_run_goes_on_with_the_same_numbers(variant: str, kill: Kill, tmp_path: Path) -> None:
    run = _of(variant, tmp_path)
    expected = uninterrupted(run)
    killed(run, kill)
    ranks.run(_train, 2, run, fresh=True, timeout_s=LIMIT_S)
    found = history(run)
    assert [start["resumed"] for start in found.starts[0]] in ([None, "step-5"], [None, "step-8"])
    assert found.starts[0] == found.starts[1]
    assert_same_numbers(found, expected)
    assert_every_sample_once_an_epoch(found)
    kept = [path.name for path in Path(run.root).iterdir() if not path.name.startswith(".")]
    assert sorted(kept) == ["step-11", "step-8"]


@pytest.mark.long
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_killed_again_and_again_goes_on_with_the_same_numbers(variant: str, tmp_path: Path) -> None:
    run, seed = _of(variant, tmp_path), secrets.randbits(32)
    dice = random.Random(seed)
    print(f"seed {seed}")
    expected = uninterrupted(run)
    for attempt in range(6):
        step, point = dice.randrange(STEPS), dice.choice(["before step", "after save"])
        who = dice.choice([(0, 1), (0,), (1,)])
        kill = Kill(who, step, point) if attempt % 2 else Kill((0, 1), after_s=dice.uniform(0, 0.4))
        again = replace(run, root=f"{run.root}-{attempt}")
        kills = [kill, Kill((0, 1), after_s=dice.uniform(0, 0.2))]
        if all(killed(again, each) for each in kills):
            ranks.run(_train, 2, again, fresh=True, timeout_s=LIMIT_S)
        found = history(again)
        assert_same_numbers(found, expected)
        assert_every_sample_once_an_epoch(found)


@pytest.mark.parametrize("num_ranks", [3, pytest.param(1, marks=pytest.mark.long)])
def test_a_run_goes_on_with_the_same_batches_on_other_ranks(num_ranks: int, tmp_path: Path) -> None:
    run = replace(VARIANTS["plain"], root=str(tmp_path / "run"), noise=False, dropout=0.0)
    expected = uninterrupted(run)
    killed(run, Kill(step=7))
    for rank in range(2):  # the new ranks begin a record of their own
        Path(f"{run.root}-rank-{rank}.jsonl").rename(f"{run.root}-first-{rank}.jsonl")
    ranks.run(_train_elsewhere, num_ranks, run, fresh=True, timeout_s=LIMIT_S)
    found = history(run, num_ranks)
    assert found.global_batches() == expected.global_batches()[6:]
    for step in range(6, STEPS):
        losses = [
            np.mean([float.fromhex(of.last(rank)[step]["loss"]) for rank in range(len(of.lines))])
            for of in (found, expected)
        ]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5), f"step {step}"
    for name, value in expected.tensors.items():
        reference.assert_close(found.tensors[name], value, name, rtol=1e-4, atol=1e-6)


def _train_elsewhere(run: Run) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _train(run)
    said = [str(w.message) for w in caught if "random numbers were left as they are" in str(w.message)]
    assert len(said) == (os.environ["RANK"] == "0")  # the first rank speaks for all


@pytest.mark.parametrize("strategy", ["zero2", pytest.param("replicate", marks=pytest.mark.long)])
def test_a_run_goes_on_under_another_strategy_with_the_same_numbers(strategy: str, tmp_path: Path) -> None:
    run = _of("plain", tmp_path)
    expected = uninterrupted(run)
    killed(run, Kill(step=7))
    ranks.run(_train, 2, replace(run, strategy=strategy), fresh=True, timeout_s=LIMIT_S)
    assert_same_numbers(history(run), expected)


def test_a_stateful_loader_goes_on_with_other_ranks_by_the_state_of_the_batches(tmp_path: Path) -> None:
    run = replace(VARIANTS["plain"], root=str(tmp_path / "run"), noise=False, dropout=0.0, loader="stateful")
    killed(run, Kill(step=7))
    for rank in range(2):
        Path(f"{run.root}-rank-{rank}.jsonl").rename(f"{run.root}-first-{rank}.jsonl")
    run = replace(run, by_loader_state=False)
    ranks.run(_train_elsewhere, 1, run, fresh=True, timeout_s=LIMIT_S)
    whole = Batches(SAMPLES, BATCH, seed=5)
    assert history(run, 1).global_batches() == [whole.indices(step) for step in range(6, STEPS)]


# --- the example ----------------------------------------------------------------------------------------


def _example(root: str) -> None:
    sys.argv = [str(EXAMPLE), root]
    with open(f"{root}-{os.environ['RANK']}.txt", "w") as out, contextlib.redirect_stdout(out):
        runpy.run_path(str(EXAMPLE), run_name="__main__")


@contextlib.contextmanager
def _torchrun(root: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--log-dir", f"{root}-logs"]  # else a folder of every run is left among the system's
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(EXAMPLE.parent.parent / "src")}
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen([*command, str(EXAMPLE), str(root)], env=environment, **pipes)
    try:
        yield process
    finally:
        for pid in [*_children(process.pid), process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait(10)


def _children(pid: int) -> list[int]:
    """Of all generations. torchrun gives ranks a session of their own, so a process group has not all."""
    try:
        own = [int(p) for task in Path(f"/proc/{pid}/task").iterdir() for p in _words(task / "children")]
    except FileNotFoundError:
        return []
    return [*own, *(grandchild for child in own for grandchild in _children(child))]


def _words(path: Path) -> list[str]:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return path.read_text().split()
    return []


@pytest.mark.long
@pytest.mark.parametrize("whom", ["all", "one"])
def test_the_example_goes_on_after_torchrun_was_killed(whom: str, tmp_path: Path) -> None:
    ranks.run(_example, 2, str(tmp_path / "whole"), fresh=True, timeout_s=LIMIT_S)
    expected = (tmp_path / "whole-0.txt").read_text().splitlines()[1:]
    root = tmp_path / "run"
    with _torchrun(root) as process:
        deadline = time.monotonic() + 120
        while not (found := fs.latest(root)) and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.002)
        assert found is not None, process.communicate(timeout=10)[0]
        if whom == "one":
            os.kill(_children(process.pid)[-1], signal.SIGKILL)
            assert process.wait(60) != 0
    with _torchrun(root) as process:
        said, _ = process.communicate(timeout=500)
        assert process.returncode == 0, said
    lines = said.splitlines()
    (resumed,) = [line for line in lines if line.startswith("resumed from")]
    step = int(resumed.rpartition("-")[2])
    assert 19 <= step < 99, "it was killed too late for this test to mean anything"
    assert [line for line in lines if line.startswith("step")] == expected[(step + 1) // 10 :]


def test_the_example_runs_alone_and_again(tmp_path: Path) -> None:
    command = [f"{warm.commands()}/python", str(EXAMPLE), str(tmp_path / "run")]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    environment |= {"PYTHONPATH": str(EXAMPLE.parent.parent / "src"), "OMP_NUM_THREADS": "1"}
    first, second = (
        subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=True)
        for _ in range(2)
    )
    assert "starting from step 0" in first.stdout.splitlines()[0]
    assert "step  99" in first.stdout.splitlines()[-1]
    assert second.stdout.splitlines() == [f"resumed from {tmp_path / 'run' / 'step-99'}"]
