"""The command line in a process of its own: interrupts while it starts, missing libraries, what is loaded."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from fullshard import extras


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=700,
        check=False,
    )


IMPORTING = """
import os, signal, sys
class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupts())
from fullshard_command import main
sys.exit(main())
"""


def test_interrupt_while_torch_is_imported_is_one_line_and_130() -> None:
    words = [sys.executable, "-c", IMPORTING, "inspect", "x"]
    found = subprocess.run(words, capture_output=True, text=True, timeout=700, check=False)
    assert (found.returncode, found.stdout, found.stderr) == (130, "", "fullshard: interrupted\n")


def test_background_job_that_is_told_to_ignore_interrupts_ignores_them_from_the_first_moment() -> None:
    code = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n" + IMPORTING
    words = [sys.executable, "-c", code, "inspect", "x"]
    found = subprocess.run(words, capture_output=True, text=True, timeout=700, check=False)
    assert found.returncode == 2
    assert "interrupted" not in found.stderr


WITHOUT = """
import sys
missing, sys.argv = sys.argv[1], ["fullshard", "--help"]
class Gone:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Gone())
import runpy
runpy.run_module("fullshard", run_name="__main__")
"""


@pytest.mark.parametrize("library", ["typer", "rich"])
def test_missing_library_is_one_line_that_names_the_extra(library: str) -> None:
    found = python(WITHOUT, library)
    assert found.returncode == 2
    assert found.stdout == ""
    remedy = f"Run: {extras.install_command('cli')}"
    assert found.stderr == f"fullshard: {library} is not installed. {remedy}\n"


def test_help_loads_no_simulation_training_planning_or_foreign_library() -> None:
    code = (
        "import sys; from fullshard.tools import cli; "
        "codes = [cli.main([*c, '--help']) for c in ([], ['plan'])]; "
        "heavy = ('fullshard.tools.simulation', 'fullshard.training', 'fullshard.planning', "
        "'fullshard.hugging_face', 'transformers', 'accelerate', 'matplotlib', 'yaml', 'torch._dynamo'); "
        "loaded = [name for name in sys.modules if name.startswith(heavy)]; "
        "assert codes == [0, 0] and not loaded, (codes, loaded)"
    )
    found = python(code)
    assert found.returncode == 0, found.stderr
