"""What importing the package loads, in a process of its own."""

from __future__ import annotations

import subprocess
import sys


def test_import_needs_torch_alone() -> None:
    code = (
        "import sys, fullshard; "
        "extra = {'transformers', 'accelerate', 'lightning', 'peft', 'rich', 'typer', 'yaml', "
        "'onnx', 'matplotlib', 'hypothesis', 'pytest'} & set(sys.modules); "
        "extra |= {name for name in sys.modules if name.startswith('fullshard.tools.simulation')}; "
        # Each takes a second; they come with the first DTensor, or with the first folder of DCP.
        "extra |= {'torch.distributed.tensor', 'torch.distributed.checkpoint'} & set(sys.modules); "
        "assert not extra, extra"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=700)


def test_the_cpu_does_not_import_triton() -> None:
    code = (
        "import sys, torch; from fullshard.engine import quantize as q; before = set(sys.modules); "
        "p = torch.zeros(1, q.packed_bytes(256), dtype=torch.uint8); q.pack(torch.ones(1, 256), p); "
        "q.add_rows(p, torch.zeros(256), 1.0); assert 'triton' not in set(sys.modules) - before"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=700)


def test_package_is_pickled_by_name() -> None:
    """cloudpickle sends functions of a script together with the modules that they use."""
    import pickle

    import fullshard as fs

    assert pickle.loads(pickle.dumps(fs)) is fs
