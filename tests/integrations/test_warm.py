"""The processes that stand in for `python`, `torchrun` and `fullshard` in tests behave as those would."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

import warm
from warm_client import NUMBER

LIMIT_S = 120


def _run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = warm.environment(dict(os.environ)) | {"SOME": "value"}
    return subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S
    )


@pytest.mark.parametrize(
    ("command", "out", "code"),
    [
        ("python -c 'import sys; print(sys.argv); sys.exit(3)' a 'b c'", "['-c', 'a', 'b c']", 3),
        ("cat words | python -c 'print(input())'", "from standard input", 0),
        ("python script.py x", "['script.py', 'x'] value", 0),
        ("python -m json.tool numbers.json", "[\n    1\n]", 0),
        ("python -c 'import os, signal; os.kill(os.getpid(), signal.SIGTERM)'; echo $?", "143", 0),
        ("python -c 'import atexit; atexit.register(print, 1); raise KeyError(2)'", "1", 1),
    ],
)
def test_command_has_its_arguments_streams_folder_and_exit_status(
    tmp_path: Path, command: str, out: str, code: int
) -> None:
    (tmp_path / "words").write_text("from standard input\n")
    (tmp_path / "script.py").write_text("import os, sys\nprint(sys.argv, os.environ['SOME'])\n")
    (tmp_path / "numbers.json").write_text("[1]")
    done = _run(command, tmp_path)
    assert (done.stdout.strip(), done.returncode) == (out, code), done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_process_ends_with_the_command(number: signal.Signals) -> None:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    command = [f"{warm.commands()}/python", "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        process = Path("/proc") / started.stdout.readline().strip()
        assert process.exists()
        started.send_signal(number)
        assert started.wait(LIMIT_S) == -number
    end_s = time.monotonic() + LIMIT_S
    while process.exists():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def test_signal_that_comes_as_soon_as_the_process_is_ready_is_passed_on_to_it() -> None:
    code = "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
    code += "print('ready', flush=True)\nwhile True: time.sleep(0.05)"
    with subprocess.Popen([f"{warm.commands()}/python", "-c", code], stdout=subprocess.PIPE) as started:
        assert started.stdout is not None
        assert started.stdout.readline() == b"ready\n"
        started.send_signal(signal.SIGTERM)
        assert started.wait(LIMIT_S) == 7


def test_command_that_is_killed_while_it_asks_leaves_its_output_open_nowhere() -> None:
    reading, writing = os.pipe()
    with socket.socket(socket.AF_UNIX) as channel:
        channel.connect(f"{warm.commands()}/socket")
        socket.send_fds(channel, [NUMBER.pack(100)], [writing])
        channel.sendall(b"half of what was announced")
    os.close(writing)
    with open(reading, "rb") as output:
        assert select.select([output], [], [], LIMIT_S)[0], "the server holds it"
        assert output.read() == b""


def test_commands_that_are_killed_as_they_end_do_not_end_their_server(tmp_path: Path) -> None:
    for lag_s in (0.0, 0.005, 0.02, 0.04, 0.06, 0.08, 0.1, 0.12):
        with subprocess.Popen([f"{warm.commands()}/python", "-c", "pass"]) as started:
            time.sleep(lag_s)
            started.kill()
    assert _run("python -c 'print(1)'", tmp_path).stdout == "1\n"
