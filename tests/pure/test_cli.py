"""The command line as a whole: help that teaches, errors of one line, what is loaded, how tables look."""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import fullshard as fs
from fullshard.errors import OptionError
from fullshard.tools import cli
from fullshard.tools.cli import app, printing
from fullshard.training import example

NAMES = ["train", "launch", "watch", "plan", "simulate", "doctor", "inspect", "verify", "export", "env"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def main(*arguments: str, terminal: bool = False) -> tuple[int, str, str]:
    out, err = Terminal() if terminal else io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main(list(arguments))
    return code, out.getvalue(), err.getvalue()


# --- help -------------------------------------------------------------------------------------------------


def test_help_lists_every_command() -> None:
    code, out, err = main("--help")
    assert (code, err) == (0, "")
    listed = re.findall(r"^  (\w+)  +\w", out.split("Commands:")[1].split("examples:")[0], re.MULTILINE)
    assert listed == NAMES == [command.name for command in app.COMMANDS]


def test_without_a_command_help_is_printed_and_the_exit_code_is_2() -> None:
    code, out, _ = main()
    assert code == 2
    assert out == main("--help")[1]


@pytest.mark.parametrize("terminal", [False, True], ids=["pipe", "terminal"])
@pytest.mark.parametrize("command", NAMES)
def test_help_of_a_command_has_examples_and_exit_codes(
    command: str, terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    code, out, err = main(command, "--help", terminal=terminal)
    assert (code, err) == (0, "")
    plain = re.sub(r"\x1b\[[0-9;]*m", "", out)
    assert re.search(rf"^ +fullshard {command}\b", plain, re.MULTILINE), plain
    assert "Exit code 0" in plain
    assert max(map(len, plain.splitlines())) <= 100
    texts = next(one for one in app.COMMANDS if one.name == command)
    for line in f"{texts.about}\n{texts.examples}".splitlines():
        # Lines stay as they were written; rich makes one paragraph of the first.
        assert " ".join(line.split()) in " ".join(plain.split()), line


def test_help_in_a_pipe_has_neither_boxes_nor_colours() -> None:
    assert main("plan", "--help")[1].isascii()
    assert "\x1b" not in main("plan", "--help")[1]


def test_version_is_the_packages() -> None:
    assert main("--version") == (0, f"fullshard {fs.__version__}\n", "")


# --- errors -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("frobnicate",), "inspect, verify, export"),
        (("inspct", "x"), "Did you mean 'inspect'?"),
        (("--frobnicate",), "no such option: --frobnicate"),
        (("inspect",), "missing argument 'PATH'"),
        (("inspect", "a", "b"), "unexpected extra argument"),
        (("inspect", "a", "--jsn"), "--json"),
        (("verify", "a", "--json=yes"), "--json"),
        (("plan", "gpt2", "--ranks"), "--ranks"),
        (("plan", "gpt2", "--ranks", "two"), "--ranks"),
        (("train",), "fullshard train --example"),
        (("train", "no/such.yaml"), "there is no file 'no/such.yaml'"),
        (("train", "c.yaml", "--set", "steps"), "KEY=VALUE"),
        (("train", "c.yaml", "--ranks", "0"), "at least 1"),
        (("export", "a"), "--to DIR"),
        (("export", "a", "--to", "b", "--onnx", "c"), "both given"),
        (("export", "a", "--onnx", "c", "--dtype", "bf16"), "--dtype"),
        (("export", "a", "--to", "b", "--no-check"), "--no-check is for --onnx"),
        (("env", "--jsno"), "--json"),
    ],
)
def test_invalid_request_is_one_line_with_its_remedy(arguments: tuple[str, ...], expected: str) -> None:
    code, out, err = main(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("fullshard: ")
    assert err.count("\n") == 1
    assert expected in err
    assert err.rstrip().endswith(".")


def test_usage_error_names_the_help_of_its_command() -> None:
    assert main("verify", "--what")[2].endswith("See fullshard verify --help.\n")


def test_interrupted_command_prints_one_line_and_exits_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fullshard.checkpoint.tools.inspecting.inspect", interrupt)
    assert main("inspect", "x") == (130, "", "fullshard: interrupted\n")


def test_error_that_is_not_ours_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("fullshard.checkpoint.tools.inspecting.inspect", fail)
    with pytest.raises(ZeroDivisionError):
        main("inspect", "x")


# --- tables -----------------------------------------------------------------------------------------------

ROWS = [("one", "1"), ("a much longer name", "20")]


def shown(terminal: bool) -> str:
    out = Terminal() if terminal else io.StringIO()
    with contextlib.redirect_stdout(out):
        printing.table(("name", "number"), ROWS, ["green", "red"])
    return out.getvalue()


def test_table_in_a_pipe_is_one_plain_line_per_row_whatever_the_width(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "10")
    lines = shown(terminal=False).splitlines()
    assert lines == [
        "name                number",
        "one                      1",
        "a much longer name      20",
    ]


def test_table_on_a_terminal_has_colours_unless_they_are_unwanted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    assert "\x1b[32m" in shown(terminal=True)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[32m" not in shown(terminal=True)


def test_table_on_a_terminal_keeps_to_its_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "20")
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown(terminal=True))
    assert max(map(len, plain.splitlines())) <= 20
    assert "longer" in plain


# --- train, export --onnx, env ----------------------------------------------------------------------------


def test_train_hands_its_options_on_and_returns_what_the_training_returned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    def train(config: Path, overrides: list[str], ranks: int | None, quiet: bool) -> int:
        calls.append((config, overrides, ranks, quiet))
        return 130

    stand_in = types.SimpleNamespace(train=train)
    monkeypatch.setitem(sys.modules, "fullshard.training.command", stand_in)
    config = tmp_path / "c.yaml"
    config.write_text("model: gpt\n")
    options = ("--set", "a.b=1", "--set", "c=x=y", "--ranks", "3", "--quiet")
    assert main("train", str(config), *options)[0] == 130
    assert main("train", str(config))[0] == 130
    assert calls == [(config, ["a.b=1", "c=x=y"], 3, True), (config, [], None, False)]
    assert main("train", "--example") == (0, example.EXAMPLE, "")


def test_export_to_onnx_hands_its_options_on_and_prints_what_was_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[Any] = []

    def export_checkpoint(checkpoint: Path, file: Path, check: bool, subject: None) -> list[str]:
        assert subject is None  # only a folder with the shape of a built-in GPT has one
        calls.append((checkpoint, file, check))
        if check:
            return ["wrote g.onnx", "largest difference 1e-6"]
        raise OptionError("there is 'g.onnx' already", "Choose another name.")

    stand_in = types.SimpleNamespace(export_checkpoint=export_checkpoint)
    monkeypatch.setitem(sys.modules, "fullshard.onnx.files", stand_in)
    assert main("export", "run/1", "--onnx", "g.onnx") == (0, "wrote g.onnx\nlargest difference 1e-6\n", "")
    code, out, err = main("export", "run/1", "--onnx", "g.onnx", "--no-check")
    assert (code, out) == (2, "")
    assert err == "fullshard: there is 'g.onnx' already. Choose another name.\n"
    assert calls == [(Path("run/1"), Path("g.onnx"), True), (Path("run/1"), Path("g.onnx"), False)]


def test_env_names_versions_and_marks_untested_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.metadata

    from fullshard.tools.cli import machine

    def version(name: str) -> str:
        if name == "lightning":
            raise importlib.metadata.PackageNotFoundError
        return {"accelerate": "9.9.1", "transformers": "5.22.7"}.get(name, "1.0")

    monkeypatch.setattr(machine, "version", version)
    code, out, _ = main("env", "--json")
    facts = json.loads(out)
    assert code == 0
    assert facts["torch"] == torch.__version__
    assert "gloo" in facts["backends"]
    libraries = facts["libraries"]
    assert (libraries["accelerate"]["tried"], libraries["transformers"]["tried"]) == (False, True)
    assert libraries["lightning"]["version"] is libraries["lightning"]["tried"] is None
    text = main("env")[1]
    assert re.search(r"^accelerate +9\.9\.1, NOT TRIED: tests run with", text, re.MULTILINE)
    assert re.search(r"^lightning +not installed$", text, re.MULTILINE)


# --- what is loaded ---------------------------------------------------------------------------------------


def test_commands_that_need_no_torch_do_not_load_it() -> None:
    """Help, versions, lists, completion and refusals: torch alone takes seconds to load."""
    requests = [
        *[[], ["--help"], ["--version"], ["frobnicate"], ["--frobnicate"]],
        *([name, "--help"] for name in NAMES),
        *([name, "--frobnicate"] for name in NAMES if name != "launch"),
        *[["plan", "--list"], ["plan", "--list", "--json"], ["simulate", "--list"], ["plan"], ["simulate"]],
        *[["train"], ["train", "--example"], ["train", "no/such.yaml"], ["train", "x", "--ranks", "0"]],
        *[["export", "a"], ["launch"], ["inspect"], ["plan", "gpt2", "--precision", "fp8"]],
        *(["--show-completion", shell] for shell in ("bash", "zsh", "fish")),
    ]
    code = (
        "import contextlib, io, sys\n"
        "from fullshard_command import main\n"
        f"for request in {requests!r}:\n"
        "    sys.argv = ['fullshard', *request]\n"
        "    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):\n"
        "        main()\n"
        "    loaded = {'torch', 'numpy', 'transformers'} & set(sys.modules)\n"
        "    assert not loaded, (request, loaded)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=700)


def test_completion_has_the_options_of_torchrun() -> None:
    from fullshard.tools.cli.launch import LAUNCH, _parser

    there = {name for name in _parser()._option_string_actions if name.startswith("--") and "_" not in name}
    assert set(LAUNCH.names()) == there - {"--help"}


def failed(exit_code: int, timestamp: int, wrote: str | None = None) -> Any:
    """As torch's agent reports a rank; `wrote`: into its error file."""
    message = {"message": wrote} if wrote is not None else f"Signal {-exit_code}"
    return types.SimpleNamespace(exitcode=exit_code, timestamp=timestamp, message=message)


@pytest.mark.parametrize(
    ("failures", "first"),
    [
        ({0: failed(-15, 5, "Stalled: rank 1: process has exited"), 1: failed(-9, 6)}, 1),
        ({0: failed(1, 5, "Stalled: rank 1: process has exited"), 1: failed(-9, 6)}, 1),
        ({0: failed(-15, 5, "Stalled: rank 1: process has exited"), 1: failed(-15, 6)}, 1),
        ({0: failed(-15, 4), 1: failed(1, 5, "ValueError: a batch"), 2: failed(-9, 9)}, 1),
        ({0: failed(1, 7, "ValueError: late"), 1: failed(1, 5, "ValueError: early")}, 1),
        ({0: failed(1, 7, "Stalled: rank 3"), 1: failed(1, 5, "Stalled: rank 3")}, 1),
        ({1: failed(-15, 5), 0: failed(-15, 6)}, 1),
    ],
    ids=["killed", "killed, seen", "terminated", "raised", "the earlier", "all stalled", "all terminated"],
)
def test_launch_names_the_rank_whose_failure_the_others_follow(failures: dict[int, Any], first: int) -> None:
    from fullshard.tools.cli.launch import first_to_fail

    assert first_to_fail(failures) == first
