"""Every file in examples/ runs as its docstring shows it, in what a fresh clone would contain."""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ranks
import warm

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))
# What makes an example short; the others take seconds as they are.
SMALLER = {
    "demo.py": "--ranks 2 --set training.steps=2 --set training.batch_size=2 --set model.gpt.width=32 "
    "--set training.sequence_length=32 --set evaluation.sequences=2 --set sample.tokens=4 "
    "--set training.warmup_steps=0",
}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that git tracks, as they are now: one that was never added is missing here, too."""
    folder = tmp_path_factory.mktemp("checkout")
    listing = ["git", "-C", str(ROOT), "ls-files", "src", "examples"]
    tracked = subprocess.run(listing, capture_output=True, text=True, check=True).stdout.splitlines()
    for name in filter(lambda name: (ROOT / name).is_file(), tracked):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return folder


def _commands(path: Path) -> list[str]:
    documentation = ast.get_docstring(ast.parse(path.read_text())) or ""
    lines = [line.partition("#")[0].strip() for line in documentation.splitlines()]
    return [line for line in lines if line.startswith(("python ", "torchrun "))]


def _check_lightning(stdout: str, folder: Path) -> None:
    """It trains, resumes and consolidates under Lightning's own launcher."""
    one, two = map(float, re.findall(r"(?:epoch|two) (\d+\.\d+)", stdout))
    assert two < one < 5.5  # a byte drawn at random costs ln 256 = 5.55
    assert "loaded as a plain GPT" in stdout
    assert not list(folder.rglob("*.ckpt"))


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_runs_as_its_docstring_shows(name: str, checkout: Path, tmp_path: Path) -> None:
    commands = _commands(checkout / "examples" / name)
    assert commands, f"the docstring of {name} shows no command"
    # The last one: several ranks. Lightning starts a second rank itself, which is the first command there.
    is_lightning = name == "lightning_gpt.py"
    command = shlex.split(f"{commands[0 if is_lightning else -1]} {SMALLER.get(name, '')}")
    unset = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE"}
    commands_folder = warm.commands("lightning" if is_lightning else "")
    environment = {key: value for key, value in os.environ.items() if key not in unset}
    environment |= {
        "PATH": f"{commands_folder}:{Path(sys.executable).parent}:{environment['PATH']}",
        "PYTHONPATH": str(checkout / "src"),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "TMPDIR": str(tmp_path),
    }
    if is_lightning:  # its launcher would choose a port that others may have taken when the ranks are there
        environment["MASTER_PORT"] = str(ranks.free_port())
    done = subprocess.run(
        command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=700, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    assert "loss" in done.stdout
    if is_lightning:
        _check_lightning(done.stdout, tmp_path)
