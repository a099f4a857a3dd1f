"""Runs that a scheduler stops and starts again: signals, exit codes, and numbers that do not change."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn
from torch.utils.data import TensorDataset

import ranks
import training_runs as runs
import warm
from fullshard.environment import refuse_tasks_without_ranks
from fullshard.errors import OptionError

LIMIT_S = 400
TEMPLATES = Path(__file__).resolve().parents[2] / "examples" / "clusters"
STEPS = 16
# A user's script: rank 1 alone is asked to stop after step `--kill`, as where a scheduler signals one host.
SCRIPT = """\
import os, signal, sys, time
import torch, fullshard as fs
from fullshard.stop_signals import of_this_process
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
    while kill == -1 and step >= 2 and not of_this_process.number:
        time.sleep(0.01)  # until this rank has the signal: the training would be over before
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
def started(folder: Path, *words: str, **more: str) -> Iterator[subprocess.Popen[str]]:
    unset = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    variables = {name: value for name, value in os.environ.items() if name not in unset}
    variables |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TMPDIR": str(folder), **more}
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
        output, _ = process.communicate(timeout=LIMIT_S)
    # The kernel delivers the lower number first where both are pending.
    assert process.returncode in (138, 143), output
    assert "passed on to 2 ranks" in output
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


def test_tasks_of_srun_without_ranks_are_refused_and_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    refuse_tasks_without_ranks()
    monkeypatch.setenv("SLURM_PROCID", "1")  # a batch script
    refuse_tasks_without_ranks()
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    with pytest.raises(OptionError, match=r"task 1 of 4 .*each task would\s+train alone.*fullshard launch"):
        refuse_tasks_without_ranks()
    monkeypatch.setenv("RANK", "1")
    refuse_tasks_without_ranks()


# --- templates --------------------------------------------------------------------------------------------


def _manifests(name: str) -> list[dict[str, Any]]:
    return [item for item in yaml.safe_load_all((TEMPLATES / name).read_text()) if item is not None]


def test_kubernetes_manifests_have_what_the_api_requires() -> None:
    service, job = _manifests("kubernetes_job.yaml")
    assert (service["apiVersion"], service["kind"]) == ("v1", "Service")
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"]
    assert pod["restartPolicy"] == "Never", "podFailurePolicy allows no other"
    # Names of pods resolve through a headless service of that name which selects them.
    assert service["spec"]["clusterIP"] == "None"
    assert pod["subdomain"] == service["metadata"]["name"]
    labels = job["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    (container,) = pod["containers"]
    rules = spec["podFailurePolicy"]["rules"]
    codes = {rule["action"]: rule["onExitCodes"] for rule in rules if "onExitCodes" in rule}
    assert set(codes["Ignore"]["values"]) == {138, 143}
    for rule in rules:
        assert len({"onExitCodes", "onPodConditions"} & set(rule)) == 1
        assert rule["action"] in ("Ignore", "FailJob", "Count", "FailIndex")
    for given in codes.values():
        assert given["containerName"] == container["name"]
        assert given["operator"] in ("In", "NotIn")
        assert 0 not in given["values"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
    assert f"--nnodes {spec['completions']} " in container["args"][0]
    (job,) = _manifests("kubeflow_trainjob.yaml")
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert {"runtimeRef", "trainer"} == set(job["spec"])
    (job,) = _manifests("kubeflow_pytorchjob.yaml")
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    worker = job["spec"]["pytorchReplicaSpecs"]["Worker"]
    assert worker["template"]["spec"]["containers"][0]["name"] == "pytorch", "by which the operator knows it"
    assert worker["restartPolicy"] in ("Always", "OnFailure", "Never", "ExitCode")
    assert job["spec"]["elasticPolicy"]["minReplicas"] <= worker["replicas"]


def test_two_pods_of_the_job_train_together_and_one_that_is_evicted_stops_both(tmp_path: Path) -> None:
    """The container's own command, with the variables that an Indexed Job sets, as two processes."""
    (job,) = [item for item in _manifests("kubernetes_job.yaml") if item["kind"] == "Job"]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    words = [*container["command"], *container["args"]]
    words[-1] = words[-1].replace("/checkpoints/run", str(tmp_path / "run")).replace("29500", "$PORT")
    words[-1] = words[-1].replace("--max-restarts 3", "--max-restarts 0")
    words[-1] += " --steps 100000 --step-s 0.05 --workers 0"
    shutil.copy(TEMPLATES / "train.py", tmp_path)
    port = str(ranks.free_port())
    with contextlib.ExitStack() as stack:
        pods = []
        for index in ("0", "1"):
            variables = {"JOB_COMPLETION_INDEX": index, "RANKS": "1", "FIRST_POD": "127.0.0.1", "PORT": port}
            pods.append(stack.enter_context(started(tmp_path, *words, **variables)))
        assert pods[0].stdout is not None
        for line in pods[0].stdout:
            if line.startswith("step 2 "):
                break
        pods[1].send_signal(signal.SIGTERM)  # an eviction
        outputs = [pod.communicate(timeout=LIMIT_S)[0] for pod in pods]
    assert [pod.returncode for pod in pods] == [143, 143], outputs
    assert len(list((tmp_path / "run").iterdir())) == 1


@pytest.mark.parametrize("path", sorted(TEMPLATES.glob("*.sbatch")), ids=lambda path: path.name)
def test_slurm_template_is_a_valid_script(path: Path) -> None:
    subprocess.run(["bash", "-n", str(path)], check=True)
    lines = path.read_text().splitlines()
    assert lines[0] == "#!/bin/bash"
    options = [index for index, line in enumerate(lines) if line.startswith("#SBATCH ")]
    first_command = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert options
    assert max(options) < first_command, "sbatch reads options before the first command alone"
