"""Shell completion: what the installed script offers, and where it is installed."""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
from pathlib import Path

import pytest

from fullshard.option_table import STRATEGIES
from fullshard.planning.sizes import SIZES
from fullshard.tools import cli
from fullshard.tools.cli import app


def run(*arguments: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main(list(arguments))
    return code, out.getvalue(), err.getvalue()


@pytest.fixture(scope="module")
def bash_script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    code, out, err = run("--show-completion", "bash")
    assert (code, err) == (0, "")
    file = tmp_path_factory.mktemp("completion") / "completion.bash"
    file.write_text(out)
    return file


def offered(script: Path, *words: str) -> list[str]:
    """What bash offers for the last word, with no `fullshard` or Python within reach."""
    typed = " ".join(f"'{word}'" for word in ("fullshard", *words))
    code = f"source {script}; COMP_WORDS=({typed}); COMP_CWORD={len(words)}; _fullshard; "
    code += 'printf "%s\\n" "${COMPREPLY[@]}"'
    done = subprocess.run(
        ["/bin/bash", "--norc", "-c", code],
        env={"PATH": ""},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["la"], ["launch"]),
        (["--sh"], ["--show-completion"]),
        (["--show-completion", ""], ["bash", "zsh", "fish"]),
        (["plan", "llama-3-7"], ["llama-3-70b"]),
        (["plan", "--mem"], ["--memory"]),
        (["plan", "llama-3-8b", "--strategy", ""], list(STRATEGIES)),
        (["plan", "--strategy", "zero3", "--precision", "b"], ["bf16"]),
        (["simulate", "gpt-8"], ["gpt-8m"]),
        (["simulate", "gpt-8m", "--engine", "f"], ["fullshard", "fsdp2"]),
        (["launch", "--nproc"], ["--nproc-per-node"]),
        (["launch", "--dry"], ["--dry-run"]),
        (["inspect", "--js"], ["--json"]),
        (["plan", "--nonsense"], []),
    ],
)
def test_bash_completes_without_python(bash_script: Path, words: list[str], expected: list[str]) -> None:
    assert offered(bash_script, *words) == expected


def test_bash_offers_every_command_and_every_size(bash_script: Path) -> None:
    assert set(offered(bash_script, "")) >= {command.name for command in app.COMMANDS}
    assert set(offered(bash_script, "plan", "")) >= set(SIZES)


def test_bash_offers_every_option_that_help_shows(bash_script: Path) -> None:
    for command in app.COMMANDS:
        shown = set(re.findall(r"^  (--[a-z-]+)", run(command.name, "--help")[1], re.MULTILINE))
        assert shown <= set(offered(bash_script, command.name, "--")), command.name


def test_zsh_uses_the_function_of_bash() -> None:
    assert run("--show-completion", "zsh")[1].endswith(run("--show-completion", "bash")[1])


def test_fish_gets_one_line_per_option() -> None:
    lines = run("--show-completion", "fish")[1].splitlines()
    here = 'complete -c fullshard -n "__fish_seen_subcommand_from plan"'
    assert f'{here} -l strategy -x -a "{" ".join(STRATEGIES)}"' in lines
    assert f"{here} -l memory" in lines
    assert any(line.startswith(f"{here} -a ") and "llama-3-8b" in line for line in lines)


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_installing_twice_adds_one_line_to_the_startup_file_and_keeps_the_others(
    shell: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    startup = tmp_path / f".{shell}rc"
    startup.write_text("alias l='ls'")  # without a line break at its end
    for _ in range(2):
        code, out, err = run("--install-completion", shell)
        assert (code, err) == (0, "")
        assert str(startup) in out
    script = tmp_path / ".local" / "share" / "fullshard" / f"completion.{shell}"
    assert startup.read_text().splitlines() == ["alias l='ls'", f"source '{script}'"]
    assert script.read_text() == run("--show-completion", shell)[1]


def test_fish_finds_its_script_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert run("--install-completion", "fish")[0] == 0
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files == [tmp_path / ".config" / "fish" / "completions" / "fullshard.fish"]


def test_unknown_shell_is_one_line_with_the_choices() -> None:
    code, out, err = run("--show-completion", "tcsh")
    assert (code, out) == (2, "")
    assert err == "fullshard: --show-completion is 'tcsh'. Choose one of bash, zsh, fish.\n"
