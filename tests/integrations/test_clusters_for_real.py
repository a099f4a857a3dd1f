"""The templates under Slurm and Ray themselves, where these are installed."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import ranks

pytestmark = pytest.mark.long
ROOT = Path(__file__).resolve().parents[2]
TEMPLATES = ROOT / "examples" / "clusters"
LIMIT_S = 900
SLURM = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "squeue")
CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/%n.pid
SlurmctldPidFile={folder}/control.pid
SlurmctldLogFile={folder}/control.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
MpiDefault=none
NodeName=n[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]},{ports[2]} CPUs=2
PartitionName=all Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""


@dataclass
class Cluster:
    folder: Path
    variables: dict[str, str]

    def run(self, *words: str) -> str:
        """What a command prints. Not its exit code: scancel's is 229 after a signal to a task of an array."""
        options = {"cwd": self.folder, "env": self.variables, "timeout": 120, "check": False}
        return subprocess.run(words, capture_output=True, text=True, **options).stdout.strip()

    def output(self, job: str) -> str:
        path = self.folder / f"fullshard-{job}.out"
        return path.read_text() if path.exists() else ""

    def wait(self, ready: Callable[[], bool], what: str) -> None:
        ends_s = time.monotonic() + LIMIT_S
        while not ready():
            logs = "\n".join(path.read_text()[-2000:] for path in self.folder.glob("*.out"))
            assert time.monotonic() < ends_s, f"{what}:\n{logs}"
            time.sleep(0.5)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Slurm with two nodes, which are both this machine."""
    if os.geteuid() != 0 or not all(map(shutil.which, SLURM)):
        pytest.skip("needs root, and slurm-wlm and munge installed")
    munge = tmp_path / "munge"
    munge.mkdir()
    (tmp_path / "state").mkdir()
    (munge / "key").write_bytes(os.urandom(128))
    (munge / "key").chmod(0o400)
    ports = [ranks.free_port() for _ in range(3)]
    config = CONFIG.format(host=socket.gethostname().partition(".")[0], ports=ports, folder=tmp_path)
    (tmp_path / "slurm.conf").write_text(config)
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "fullshard"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m fullshard "$@"\n')
    command.chmod(0o755)
    variables = {
        **os.environ,
        "SLURM_CONF": str(tmp_path / "slurm.conf"),
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "ENDPOINT": f"127.0.0.1:{ranks.free_port()}",
    }
    for path in TEMPLATES.glob("*"):
        if path.is_file():
            shutil.copy(path, tmp_path)
    places = [f"--{name}-file={munge / name}" for name in ("key", "pid", "log", "seed")]
    daemons = [
        ["munged", "--foreground", "--force", f"--socket={munge / 'socket'}", *places],
        ["slurmctld", "-D"],
        ["slurmd", "-D", "-N", "n1"],
        ["slurmd", "-D", "-N", "n2"],
    ]
    started = []
    try:
        for words in daemons:
            quiet = subprocess.DEVNULL
            started.append(subprocess.Popen(words, env=variables, cwd=tmp_path, stdout=quiet, stderr=quiet))
            time.sleep(2)
        yield Cluster(tmp_path, variables)
    finally:
        subprocess.run(["scancel", "--user=root", "--signal=KILL"], env=variables, timeout=60, check=False)
        for process in reversed(started):
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:  # slurmd waits for its steps
                process.kill()
                process.wait()


def _steps(text: str) -> list[int]:
    return [int(step) for step in re.findall(r"^step (\d+) loss", text, re.MULTILINE)]


def test_job_on_two_nodes_saves_at_a_warning_and_goes_on_after_its_requeue(cluster: Cluster) -> None:
    cluster.variables["RANKS"] = "1"
    arguments = ("--folder", "run", "--steps", "60", "--step-s", "0.2")
    job = cluster.run("sbatch", "--parsable", "slurm_requeue.sbatch", *arguments)
    cluster.wait(lambda: 5 in _steps(cluster.output(job)), "no fifth step")
    cluster.run("scancel", "--batch", "--signal=USR1", job)
    cluster.wait(lambda: "stopped by SIGUSR1" in cluster.output(job), "not stopped")
    # Slurm holds a job that was requeued back for two minutes.
    cluster.wait(lambda: 59 in _steps(cluster.output(job)), "not resumed")
    assert _steps(cluster.output(job)) == list(range(60))


def test_array_is_a_chain_and_ends_when_the_training_is_complete(cluster: Cluster) -> None:
    cluster.variables["RANKS"] = "2"
    arguments = ("--folder", "run", "--steps", "60", "--step-s", "0.2")
    job = cluster.run("sbatch", "--parsable", "slurm_array.sbatch", *arguments)
    cluster.wait(lambda: 5 in _steps(cluster.output(f"{job}-1")), "no fifth step")
    cluster.run("scancel", "--signal=USR1", f"{job}_1")
    cluster.wait(lambda: not cluster.run("squeue", "--noheader"), "jobs are left")
    both = _steps(cluster.output(f"{job}-1")) + _steps(cluster.output(f"{job}-2"))
    assert both == list(range(60))
    assert cluster.output(f"{job}-3") == ""


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
def test_ray_goes_on_from_the_newest_checkpoint_when_a_worker_is_lost(tmp_path: Path) -> None:
    ours = {"RAY_TRAIN_V2_ENABLED": "1", "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, str(TEMPLATES / "ray_train.py"), "--storage", "storage", "--lose-a-worker-at", "6"],
        cwd=tmp_path,
        env={**os.environ, **ours, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "'step': 11" in done.stdout
    assert "'start': 4" in done.stdout, "it went on after the checkpoint of step 3"
