"""`fullshard launch`: what torchrun is given, what a script sees, and how it ends."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import warm
from fullshard.errors import OptionError
from fullshard.tools.cli import launch

SCRIPT = """\
from __future__ import annotations
import atexit, json, multiprocessing, os, pickle, sys
import beside

def double(x, answers):
    answers.put(2 * x)

class Thing:
    pass

def last():
    import __main__
    print("LAST", __main__.Thing is Thing, flush=True)

if __name__ == "__main__":
    assert type(pickle.loads(pickle.dumps(Thing()))) is Thing
    spawning = multiprocessing.get_context("spawn")
    answers = spawning.Queue()
    process = spawning.Process(target=double, args=(21, answers))
    process.start()
    doubled = answers.get(timeout=300)
    process.join()
    atexit.register(last)
    names = ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE")
    print("SEEN", json.dumps({
        **{name: os.environ.get(name) for name in names},
        "argv": sys.argv, "first": sys.path[0], "file": __file__, "doubled": doubled, "beside": beside.VALUE,
        "spec": __spec__ and __spec__.name, "package": __package__,
        "open": any(type(f).__module__.startswith("fullshard.hugging_face") for f in sys.meta_path),
        "loaded": [n for n in ("transformers", "accelerate", "typer") if n in sys.modules],
    }), flush=True)
"""
FAILING = """\
import os, sys, time

def inner():
    raise ValueError("no such luck")

if os.environ["RANK"] == "1":
    inner()
time.sleep(60)
"""


PYTHON = (sys.executable, "-m", "fullshard")  # imports what a user's command imports


def run(
    folder: Path, *arguments: str, command: tuple[str, ...] = PYTHON, **variables: str
) -> subprocess.CompletedProcess[str]:
    unset = ("OMP_NUM_THREADS", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    return subprocess.run(
        [*command, "launch", *arguments],
        env={**environment, "TMPDIR": str(folder), **variables},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=700,
        check=False,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    (scripts / "beside.py").write_text("VALUE = 7\n")
    (scripts / "script.py").write_text(SCRIPT)
    (scripts / "failing.py").write_text(FAILING)
    (scripts / "leaving.py").write_text("import sys\nsys.exit(int(sys.argv[1]))\n")
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "inner.py").write_text(SCRIPT.replace("import beside", "from package import beside"))
    (package / "beside.py").write_text("VALUE = 8\n")
    return tmp_path


def seen(found: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert found.returncode == 0, found.stderr
    assert found.stdout.count("LAST True") == found.stdout.count("SEEN")
    rows = [json.loads(line) for line in re.findall(r"SEEN (\{.*?\})$", found.stdout, re.MULTILINE)]
    return sorted(rows, key=lambda row: int(row["RANK"]))


# --- real processes ---------------------------------------------------------------------------------------


def test_script_runs_on_ranks_as_python_would_run_it_with_hugging_face_support_on(folder: Path) -> None:
    found = run(folder, "--nproc-per-node", "2", "scripts/script.py", "--help", "-m", "--", "--dry-run")
    rows = seen(found)
    assert [row["RANK"] for row in rows] == ["0", "1"]
    for row in rows:
        assert row["WORLD_SIZE"] == "2"
        assert row["argv"] == ["scripts/script.py", "--help", "-m", "--", "--dry-run"]
        assert row["first"] == str(folder.resolve() / "scripts")
        assert row["file"] == "scripts/script.py"
        assert (row["doubled"], row["beside"]) == (42, 7)
        assert row["spec"] is row["package"] is None
        assert row["open"]
        assert row["loaded"] == []  # the integration loads no library by itself
        assert int(row["OMP_NUM_THREADS"]) >= 1
        assert row["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] is None
    assert found.stderr.startswith("fullshard: scripts/script.py on 2 ranks (")
    left = {path.name for path in folder.iterdir()} - {"scripts", "package"}
    assert not left, "its temporary folder is that of this test"


def test_module_runs_with_its_package_around_it(folder: Path) -> None:
    (row,) = seen(run(folder, "--nproc-per-node=1", "-m", "package.inner", "a", OMP_NUM_THREADS="5"))
    assert row["argv"] == [str(folder.resolve() / "package" / "inner.py"), "a"]
    assert row["first"] == str(folder.resolve())
    assert (row["doubled"], row["beside"]) == (42, 8)
    assert (row["spec"], row["package"]) == ("package.inner", "package")
    assert row["OMP_NUM_THREADS"] == "5"  # the user's


def test_failing_rank_ends_the_others_and_its_traceback_shows_the_users_lines_alone(folder: Path) -> None:
    warmed = (f"{warm.commands()}/fullshard",)
    found = run(folder, "--nproc-per-node", "2", "scripts/failing.py", command=warmed)
    assert found.returncode == 1
    trace = found.stderr.split("Traceback (most recent call last):\n")[1].split("ValueError")[0]
    assert re.findall(r'File "([^"]+)", line (\d+), in (\S+)', trace) == [
        ("scripts/failing.py", "7", "<module>"),
        ("scripts/failing.py", "4", "inner"),
    ]
    assert found.stderr.count("Traceback") == 1
    assert found.stderr.splitlines()[-1] == (
        "fullshard: rank 1 was the first to fail, with exit code 1: ValueError: no such luck"
    )


def test_exit_code_of_the_script_is_passed_through(folder: Path) -> None:
    warmed = (f"{warm.commands()}/fullshard",)
    found = run(folder, "--nproc-per-node", "1", "scripts/leaving.py", "7", command=warmed)
    assert found.returncode == 7
    assert "Traceback" not in found.stderr
    assert found.stderr.splitlines()[-1] == "fullshard: rank 0 was the first to fail, with exit code 7"


# --- one process as a rank --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "code", "says"),
    [
        ("def broken(:\n", 1, 'File "script.py", line 1'),
        ("import sys\nsys.excepthook = lambda *e: print('MINE', e[1], file=sys.stderr)\n1/0\n", 1, "MINE"),
        ("raise KeyboardInterrupt\n", -2, "KeyboardInterrupt"),
    ],
)
def test_rank_ends_as_python_would_end_the_script(tmp_path: Path, source: str, code: int, says: str) -> None:
    (tmp_path / "script.py").write_text(source)
    ours, pythons = (
        subprocess.run(
            [sys.executable, *how, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=700
        )
        for how in (["-m", "fullshard.tools.cli.launched"], [])
    )
    assert ours.returncode == pythons.returncode == code
    assert says in ours.stderr
    assert ours.stderr.replace(str(tmp_path) + "/", "") == pythons.stderr.replace(str(tmp_path) + "/", "")


# --- what torchrun is given -------------------------------------------------------------------------------


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(folder / "scripts")
    for name in [name for name in os.environ if name.startswith("PET_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(launch, "cores", lambda: 12)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    return folder


LAUNCHED = ["-m", "fullshard.tools.cli.launched"]


def words(*arguments: str) -> list[str]:
    return launch.parse(arguments)[0].words


@pytest.mark.usefixtures("here")
def test_what_is_left_out_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    launching, dry_run = launch.parse(["script.py", "--lr", "1"])
    assert launching.words == [
        "--nproc-per-node=8", "--standalone", *LAUNCHED, "script.py", "--lr", "1",
    ]  # fmt: skip
    assert launching.variables == {"OMP_NUM_THREADS": "1"}
    assert not dry_run
    assert launch.parse(["--nproc-per-node", "3", "script.py"])[0].variables == {"OMP_NUM_THREADS": "4"}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert words("script.py")[0] == "--nproc-per-node=4"


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    "options",
    [
        ["--standalone"],
        ["--rdzv-backend", "c10d", "--rdzv-endpoint=localhost:0"],
        ["--master_port", "29511"],
        ["--nnodes", "2", "--node-rank=1", "--master-addr", "host"],
        ["--nnodes=2:4", "--rdzv-id", "7", "--max-restarts", "3"],
        ["--tee", "3", "--log-dir", "logs", "--nnodes=2"],
    ],
)
def test_options_of_torchrun_pass_through_untouched(options: list[str]) -> None:
    assert words(*options, "--nproc-per-node", "2", "script.py", "--nnodes", "9") == [
        *options, "--nproc-per-node", "2", *LAUNCHED, "script.py", "--nnodes", "9",
    ]  # fmt: skip


@pytest.mark.usefixtures("here")
def test_torchrun_reads_what_is_given_to_it_as_the_user_meant_it() -> None:
    from torch.distributed.run import parse_args

    args = parse_args(words("--max-restarts", "3", "--role", "r", "script.py", "--max-restarts", "9"))
    assert (args.max_restarts, args.role, args.standalone, args.nproc_per_node) == (3, "r", True, "8")
    assert (args.module, args.training_script) == (True, "fullshard.tools.cli.launched")
    assert args.training_script_args == ["script.py", "--max-restarts", "9"]


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    "theirs", [["--", "a"], ["--n", "3", "--"], ["--", "--", "-m"], ["--dry-run", "--mod"]]
)
@pytest.mark.parametrize(
    "ours", [[], ["--nproc-per-node", "2", "--"], ["--tee", "3", "--standalone"], ["-r3"]]
)
def test_what_comes_after_the_script_is_the_scripts(ours: list[str], theirs: list[str]) -> None:
    launching, dry_run = launch.parse([*ours, "script.py", *theirs])
    assert launching.script == ("script.py", *theirs)
    assert not dry_run
    args = launch._torchrun_arguments(launching.words)
    assert args.training_script == "fullshard.tools.cli.launched"
    assert args.training_script_args == ["script.py", *theirs]


@pytest.mark.usefixtures("here")
def test_torchruns_variables_count_as_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NPROC_PER_NODE", "6")
    monkeypatch.setenv("PET_RDZV_ENDPOINT", "host:1")
    assert words("script.py") == [*LAUNCHED, "script.py"]
    assert launch.parse(["script.py"])[0].variables == {"OMP_NUM_THREADS": "2"}


@pytest.mark.usefixtures("here")
def test_elastic_run_gets_the_setting_without_which_joining_nodes_wait_for_ever() -> None:
    name = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    assert launch.parse(["--nnodes", "1:4", "script.py"])[0].variables[name] == "1"
    assert name not in launch.parse(["--nnodes", "4", "script.py"])[0].variables


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("options", [["--log-dir", "logs"], ["--tee", "3"], ["--redirects", "0:3"], []])
def test_logs_stay_where_options_for_them_are_given(options: list[str]) -> None:
    args = launch._torchrun_arguments(launch.parse([*options, "script.py"])[0].words)
    before = args.log_dir
    with launch._log_folder(args):
        place = args.log_dir
        assert (place == before) == bool(options)
        assert options or Path(place).is_dir()
    assert options or not Path(place).exists()


def test_variable_that_the_user_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    from fullshard.environment import set_default_variables

    monkeypatch.setenv("FULLSHARD_TEST_SET", "mine")
    monkeypatch.delenv("FULLSHARD_TEST_NEW", raising=False)
    assert set_default_variables({"FULLSHARD_TEST_SET": "ours", "FULLSHARD_TEST_NEW": "1"}) == [
        "FULLSHARD_TEST_NEW"
    ]
    assert (os.environ["FULLSHARD_TEST_SET"], os.environ.pop("FULLSHARD_TEST_NEW")) == ("mine", "1")


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["no_such.py"], "there is no script 'no_such.py'"),
        (["script"], "Did you mean script.py?"),
        (["-m", "no_such_package.train"], "there is no module 'no_such_package.train'"),
        (["-m", "json.no_such"], "there is no module 'json.no_such'"),
        (["--no-python", "script.py"], "--no-python"),
        (["--run-path", "script.py"], "--run-path"),
        (["--nproc-per-nod", "2", "--max-restart", "1"], "training_script"),
        (["--nproc-per-mode=2", "script.py"], "Did you mean --nproc-per-node?"),
        (["--max-restarts", "many", "script.py"], "--max-restarts"),
        (["--nproc-per-node", "0", "script.py"], "--nproc-per-node is 0"),
        (["--nproc", "2", "script.py"], "Did you mean --nproc-per-node?"),
        (["--"], "training_script"),
    ],
)
def test_invalid_request_starts_nothing(
    arguments: list[str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "start", lambda *_: pytest.fail("processes were started"))
    with pytest.raises(OptionError) as error:
        launch.parse(arguments)
    assert expected in f"{error.value.what} {error.value.remedy}"


@pytest.mark.usefixtures("here")
def test_module_in_the_current_folder_is_found() -> None:
    assert words("-m", "beside")[-3:] == ["fullshard.tools.cli.launched", "-m", "beside"]


@pytest.mark.usefixtures("here")
def test_dry_run_prints_the_command_and_starts_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from fullshard.tools import cli

    monkeypatch.setattr(launch, "start", lambda *_: pytest.fail("processes were started"))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert cli.main(["launch", "--nproc-per-node", "2", "--dry-run", "script.py", "a b"]) == 0
    out, err = capsys.readouterr()
    assert out == (
        "OMP_NUM_THREADS=6 torchrun --standalone --nproc-per-node 2 "
        "-m fullshard.tools.cli.launched script.py 'a b'\n"
    )
    assert err == ""
    assert "OMP_NUM_THREADS" not in os.environ
