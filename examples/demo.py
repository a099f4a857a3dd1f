"""`make demo`: `fullshard train` on examples/demo.yaml, with the source of Python's own library as the text.

It starts its own ranks: one for each GPU, or two on the CPU.
"""

import argparse
import shutil
import sys
import sysconfig
from pathlib import Path

import torch

from fullshard.errors import FullshardError
from fullshard.training.command import train

HERE = Path(__file__).resolve().parent
OUTPUT = HERE.parent / "demo-output" / "gpt"
SHARED_EQUALLY = (12, 6, 4, 3, 2, 1)  # ranks that divide the batch of demo.yaml


def main() -> int:
    gpus = torch.cuda.device_count()
    default = next(n for n in SHARED_EQUALLY if n <= (gpus or 2))
    parser = argparse.ArgumentParser(description="Train a small GPT, sharded over local ranks.")
    parser.add_argument("--ranks", type=int, default=default, help="local ranks to start")
    ranks = parser.parse_args().ranks
    library = f"data.train={sysconfig.get_path('stdlib')}/*.py"
    shutil.rmtree(OUTPUT, ignore_errors=True)  # a demo begins anew; a run would go on
    print(f"fullshard train examples/demo.yaml --ranks {ranks} --set '{library}'", flush=True)
    try:
        return train(HERE / "demo.yaml", [library], ranks, quiet=False)
    except FullshardError as error:
        print(f"fullshard: {error.what.rstrip('.')}. {error.remedy}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
