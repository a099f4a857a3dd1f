"""`fullshard launch --elastic` with a rank on the GPU: lost, it begins again on the same card and goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

_STEPS = 6
_SCRIPT = """
import os, signal, sys
from pathlib import Path
import torch
from torch import nn
import fullshard as fs

root = Path(sys.argv[1])
torch.manual_seed(0)
model = fs.shard(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)), device="cuda")
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
first = 0
if path := fs.latest(root):
    first = fs.load(path, model, optimizer)["step"] + 1
for step in range(first, 6):
    inputs = torch.randn(12, 8, generator=torch.Generator().manual_seed(step)).cuda()
    model(inputs).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    fs.save(root / f"step-{step}", model, optimizer, extra={"step": step})
    print(f"trained {step} on {next(model.parameters()).device}", flush=True)
    mark = root / f"killed-{step}"
    if step in (1, 3) and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
with fs.full(model):
    torch.save([parameter.detach().cpu().clone() for parameter in model.parameters()], root / "final.pt")
"""


def _undisturbed() -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(_STEPS):
        inputs = torch.randn(12, 8, generator=torch.Generator().manual_seed(step)).cuda()
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().cpu() for parameter in model.parameters()]


@pytest.mark.timeout(300)
def test_a_rank_that_is_killed_twice_goes_on_with_the_same_numbers(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT)
    root = tmp_path / "run"
    root.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "fullshard", "launch", "--elastic", "1:1", str(script), str(root)],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    text = done.stdout + done.stderr
    assert [text.count(f"trained {step} on cuda") for step in range(_STEPS)] == [1] * _STEPS, text
    assert text.count("was ended by SIGKILL") >= 2
    for mine, plain in zip(torch.load(root / "final.pt"), _undisturbed(), strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-4, atol=1e-6)
