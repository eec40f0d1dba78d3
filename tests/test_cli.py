"""The command line: what it lists, what it refuses, and with which exit code."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner, Result

import gradtide
import gradtide_command
from gradtide.cli import app
from gradtide.scheme.recommended import RECOMMENDED

GOOD = {
    "--schemes": "ddp,dear",
    "--workload": "digits",
    "--hosts": "2",
    "--rate": "none",
    "--steps": "3",
}


def call(*words: str) -> Result:
    return CliRunner().invoke(app, words, env={"COLUMNS": "200"})


def compare(out: Path, **changed: str | None) -> Result:
    options = {**GOOD, "--out": str(out)}
    options |= {f"--{k.replace('_', '-')}": v for k, v in changed.items()}  # type: ignore[misc]
    words = [w for k, v in options.items() if v is not None for w in (k, v)]
    return call("compare", *words)


def test_version() -> None:
    assert call("--version").output == f"gradtide {gradtide.__version__}\n"


def test_help_names_every_command() -> None:
    shown = call("--help").output
    assert all(command in shown for command in ("schemes", "lab", "compare", "profile"))


def test_schemes_lists_recipes_as_calls_and_the_baselines() -> None:
    shown = call("schemes", "--all").output
    assert "Scheme(collective=Dense(" in shown
    for name in ("sequential", "wfbp", "oktopk", "ddp", "ddp(wire='fp16')"):
        assert f"\n{name}\n" in shown
    assert "oktopk(0.01, schedule='local', wire='bf16', warmup=240)" in shown
    shown = call("schemes").output
    assert all(f"\n{row.recipe}\n" in shown for row in RECOMMENDED)
    assert "sequential" not in shown


def test_plan_alone_says_what_it_needs_and_how_to_get_it() -> None:
    told = call("plan")
    assert told.exit_code == 2
    for words in ("gradtide profile trace", "--ranks 8 --rate 1gbit", "replay:"):
        assert words in told.output


def test_the_module_behind_the_command_line_names_the_way_in() -> None:
    words = [sys.executable, "-m", "gradtide.cli", "schemes"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == "error: the command line is started by python -m gradtide\n"


INTERRUPTED = """
import os, signal, sys

class Interrupt:
    def find_spec(name, path=None, target=None):
        if name == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupt)
from gradtide_command import main
sys.argv[2:] = ["lab", "run", "--hosts", "1", "--rate", "none", "--", "true"]
main()
"""


@pytest.mark.parametrize("module", ["torch", "gradtide.cli"])
def test_an_interrupt_while_the_command_line_is_loaded_leaves_no_traceback(
    module: str,
) -> None:
    words = [sys.executable, "-c", INTERRUPTED, module]
    done = subprocess.run(words, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_commands_are_run_with_the_handler_that_was_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handlers = [signal.getsignal(signal.SIGINT)]
    monkeypatch.setattr(
        "gradtide.__main__.command",
        lambda: lambda: handlers.append(signal.getsignal(signal.SIGINT)),
    )
    gradtide_command.main()
    assert handlers[0] is handlers[1]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"schemes": "ddp,nonsense"}, "'nonsense' is no scheme"),
        ({"schemes": "ddp,,dear"}, "empty scheme"),
        ({"workload": "imagenet"}, "no workload 'imagenet'"),
        ({"rate": "fast"}, "'fast' is not a rate"),
        ({"hosts": None}, "--hosts 4 --rate 100mbit"),
        ({"hosts": "0"}, "choose 1 to 250"),
        ({"step_ms": "5"}, "really computes"),
    ],
)
def test_refused_before_anything_starts(
    tmp_path: Path, changed: dict[str, str | None], message: str
) -> None:
    result = compare(tmp_path / "out", **changed)
    assert result.exit_code == 2
    assert message in result.output
    assert not (tmp_path / "out").exists()


def test_torchrun_brings_its_own_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = compare(tmp_path)
    assert result.exit_code == 2
    assert "leave out --hosts and --rate" in result.output


def test_a_rank_that_fails_is_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "sitecustomize.py").write_text("raise SystemExit('no such luck')")
    result = compare(tmp_path / "out")
    assert result.exit_code == 1
    assert "error: " in result.output


# - Examples ---------------------------------------------------------------------------


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every command by the words that call it."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield " ".join((*path, name)), command


WIDTH = 78  # of a terminal of 80 columns: longer lines are folded
COMMANDS = dict(commands(get_command(app)))


@pytest.mark.parametrize("name", COMMANDS)
def test_help_ends_with_lines_to_copy_and_each_is_one(name: str) -> None:
    command = COMMANDS[name]
    first, *lines = (command.epilog or "").split("\n\n")
    assert first == "Examples:", f"{name} --help has no example"
    assert len(lines[0]) <= WIDTH
    shown = call(*name.split(), "--help").output
    for line in lines:
        assert line in shown
        words = shlex.split(line)
        own = words[words.index("gradtide") + 1 :]
        count = len(name.split())
        assert own[:count] == name.split()
        command.make_context(name, own[count:])  # raises for what it cannot parse


def test_an_example_that_cannot_be_parsed_would_be_found() -> None:
    with pytest.raises(Exception, match="nonsense"):
        COMMANDS["race"].make_context("race", ["--schemes", "ddp", "--nonsense"])
