"""The notebook in examples/ runs from top to bottom, as a kernel would run it, and says what it prints."""

from __future__ import annotations

import ast
import json
import os
import subprocess
from pathlib import Path

import warm

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "notebook.ipynb"
# Executes code cells one after the other in one namespace; the value of a cell's last line is shown.
KERNEL = """\
import ast, json, sys
names = {"__name__": "__main__"}
for number, cell in enumerate(json.load(open(sys.argv[1]))["cells"]):
    if cell["cell_type"] != "code":
        continue
    tree = ast.parse("".join(cell["source"]), f"cell {number}")
    last = ast.Expression(tree.body.pop().value) if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, f"cell {number}", "exec"), names)
    if last is not None and (value := eval(compile(last, f"cell {number}", "eval"), names)) is not None:
        print(repr(value))
    print("done", number, flush=True)
"""


def test_notebook_runs_from_top_to_bottom(tmp_path: Path) -> None:
    unset = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    variables = {name: value for name, value in os.environ.items() if name not in unset}
    variables |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TMPDIR": str(tmp_path)}
    (tmp_path / "kernel.py").write_text(KERNEL)
    done = subprocess.run(
        [f"{warm.commands()}/python", "kernel.py", str(NOTEBOOK)],
        cwd=tmp_path,
        env=variables,
        capture_output=True,
        text=True,
        timeout=700,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert done.stdout.count("done ") == sum(cell["cell_type"] == "code" for cell in cells)
    assert "largest difference of any parameter" in done.stdout


def test_notebook_is_a_valid_one_without_outputs() -> None:
    notebook = json.loads(NOTEBOOK.read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    names = [cell["id"] for cell in notebook["cells"]]
    assert len(set(names)) == len(names)
    for cell in notebook["cells"]:
        expected = {"cell_type", "id", "metadata", "source"}
        if cell["cell_type"] == "code":
            ast.parse("".join(cell["source"]))
            expected |= {"outputs", "execution_count"}
            assert cell["outputs"] == []
            assert cell["execution_count"] is None
        assert set(cell) == expected
