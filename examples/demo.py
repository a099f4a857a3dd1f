"""`make demo`: `fullshard train` on examples/demo.yaml, with the source of Python's standard library as text.

It starts its own ranks: one per GPU, or two on the CPU.

python examples/demo.py
"""

import argparse
import shlex
import shutil
import sys
import sysconfig
from pathlib import Path

import torch

from fullshard.errors import FullshardError
from fullshard.training.command import train

HERE = Path(__file__).resolve().parent
OUTPUT = HERE.parent / "demo-output" / "gpt"
RANK_COUNTS = (12, 6, 4, 3, 2, 1)  # those that divide the batch size of demo.yaml


def main() -> int:
    gpus = torch.cuda.device_count()
    default = next(n for n in RANK_COUNTS if n <= (gpus or 2))
    parser = argparse.ArgumentParser(description="Train a small GPT, sharded over local ranks.")
    parser.add_argument("--ranks", type=int, default=default, help="local ranks to start")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="as in fullshard train"
    )
    options = parser.parse_args()
    overrides = [f"data.train={sysconfig.get_path('stdlib')}/*.py", *options.set]
    shutil.rmtree(OUTPUT, ignore_errors=True)  # otherwise the last run would be resumed
    shown = " ".join(f"--set {shlex.quote(override)}" for override in overrides)
    print(f"fullshard train examples/demo.yaml --ranks {options.ranks} {shown}", flush=True)
    try:
        return train(HERE / "demo.yaml", overrides, options.ranks, quiet=False)
    except FullshardError as error:
        print(f"fullshard: {error.what.rstrip('.')}. {error.remedy}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
