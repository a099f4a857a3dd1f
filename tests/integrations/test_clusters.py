"""Runs that a scheduler stops and starts again: signals, exit codes, and numbers that do not change."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import training_runs as runs
import warm

LIMIT_S = 400
STEPS = 16
# A user's script: rank 1 alone is asked to stop after step `--kill`, as where a scheduler signals one host.
SCRIPT = """\
import os, signal, sys, time
import torch, fullshard as fs
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

root, kill, workers = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.manual_seed(1)
model = fs.shard(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
generator = torch.Generator().manual_seed(2)
data = TensorDataset(torch.randn(32, 6, generator=generator), torch.randn(32, 1, generator=generator))
batches = fs.Batches(len(data), batch_size=8, epochs=4)
loader = DataLoader(data, batch_sampler=batches, num_workers=workers)
if path := fs.latest(root):
    batches.resume(fs.load(path, model, optimizer)["batches"])
rank = int(os.environ["RANK"])
for step, (x, y) in batches.steps(loader):
    (model(x) - y).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    open(f"{root}.rank-{rank}", "a").write(f"{step}\\n")
    while kill == -1 and step >= 2 and not os.path.exists(f"{root}.sent"):
        time.sleep(0.01)  # until the launcher has the signal, so that some step comes after it
    if step == kill and rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    if stop := fs.stop_requested():
        fs.save(f"{root}/step-{step}", model, optimizer, extra={"batches": batches.state()})
        sys.exit(128 + stop)
assert fs.stop_requested() == 0
with fs.full(model):
    if rank == 0:
        torch.save({name: value.detach().clone() for name, value in model.state_dict().items()}, f"{root}.pt")
"""


def _unsharded() -> dict[str, torch.Tensor]:
    """The same training in one process, without fullshard but for the order of the samples."""
    import fullshard as fs

    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(2)
    data = TensorDataset(torch.randn(32, 6, generator=generator), torch.randn(32, 1, generator=generator))
    order = fs.Batches(len(data), batch_size=8, epochs=4, rank=0, ranks=1)
    for step in range(STEPS):
        x, y = data[order.indices(step)]
        (model(x) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach() for name, value in model.state_dict().items()}


@contextlib.contextmanager
def started(folder: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    unset = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    variables = {name: value for name, value in os.environ.items() if name not in unset}
    variables |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TMPDIR": str(folder)}
    process = subprocess.Popen(
        words,
        cwd=folder,
        env=warm.environment(variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _steps(root: Path, rank: int) -> list[int]:
    file = Path(f"{root}.rank-{rank}")
    return [int(word) for word in file.read_text().split()] if file.exists() else []


def _wait_for_step(process: subprocess.Popen[str], root: Path, step: int) -> None:
    ends_s = time.monotonic() + LIMIT_S
    while not all(step in _steps(root, rank) for rank in (0, 1)):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < ends_s
        time.sleep(0.02)


def test_script_that_is_stopped_twice_goes_on_with_the_numbers_of_one_process(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    root = tmp_path / "run"
    launch = ("fullshard", "launch", "--nproc-per-node", "2", "train.py", str(root))
    # The launcher gets a warning and, as at a limit, SIGTERM; workers of the loaders live on.
    with started(tmp_path, *launch, "-1", "1") as process:
        _wait_for_step(process, root, 2)
        process.send_signal(signal.SIGUSR1)
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None
        for line in process.stdout:
            if "passed on to 2 ranks" in line:
                break
        Path(f"{root}.sent").touch()
        output, _ = process.communicate(timeout=LIMIT_S)
    # The kernel delivers the lower number first where both are pending.
    assert process.returncode in (138, 143), output
    assert "stopped by SIG" in output
    first = _steps(root, 0)
    assert first == _steps(root, 1) == list(range(len(first)))
    assert [path.name for path in root.iterdir()] == [f"step-{first[-1]}"]
    # One rank alone gets a signal: all stop after that step, and the exit code is passed through.
    with started(tmp_path, *launch, str(first[-1] + 3), "0") as process:
        output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 143, output
    assert _steps(root, 0) == _steps(root, 1) == list(range(first[-1] + 4))
    with started(tmp_path, *launch, "-2", "0") as process:
        output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, output
    assert _steps(root, 0) == list(range(STEPS))
    trained = torch.load(f"{root}.pt")
    for name, value in _unsharded().items():
        torch.testing.assert_close(trained[name], value)


def test_train_saves_at_a_warning_and_stays_until_it_has_at_the_limit(tmp_path: Path) -> None:
    runs.write_texts(tmp_path / "texts")
    config = runs.write_config(tmp_path, training={"steps": 20_000}, sample={"tokens": 0})
    with started(
        tmp_path, "fullshard", "train", str(config), "--ranks", "2", "--set", "checkpoints.every=50000"
    ) as process:
        ends_s = time.monotonic() + LIMIT_S
        metrics = tmp_path / "run" / "metrics.jsonl"
        while not metrics.exists() or len(metrics.read_text().splitlines()) < 4:
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < ends_s
            time.sleep(0.05)
        process.send_signal(signal.SIGUSR1)
        assert process.stdout is not None
        for line in process.stdout:
            if "saves after this step" in line:
                break
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 138, output
    done = len(runs.losses(tmp_path / "run"))
    assert f"Stopped by SIGUSR1 after step {done} of" in output
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == [f"step-{done:06}"]
