"""`gradtide run --scheme dear -- train.py ...`: any program that uses torch's class.

The program is started as it would be without, with two things in its environment: the
scheme, and a folder whose start-up hook waits for torch's DistributedDataParallel
(`startup`). So what it starts itself is reached, too. This needs no extra.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import gradtide.startup
from gradtide.parallel import SCHEME
from gradtide.scheme import as_scheme

EPILOG = """\
examples:
  gradtide run --scheme dear -- torchrun --nproc-per-node 2 train.py --epochs 3
  torchrun --nproc-per-node 2 -m gradtide run --scheme dear -- train.py --epochs 3
  gradtide run --scheme "wfbp(wire='bf16')" -- -m package.train
  gradtide run --scheme dear -- train.py      (which starts its ranks itself)

What stands after -- is run by this Python if it ends in .py or begins with -m (or
another option of Python's), and is a command otherwise."""


def main(words: Sequence[str]) -> None:
    """Replace this process by the program. ValueError, and exit code 2, come before."""
    parser = argparse.ArgumentParser(
        "gradtide run",
        usage="gradtide run [--scheme SCHEME] -- PROGRAM [ARGUMENTS]",
        description="Run a program that uses torch's DistributedDataParallel, or a "
        "framework that does, with gradtide in its place.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--scheme",
        default=os.environ.get(SCHEME) or "wfbp",
        help="as `gradtide schemes` lists them; without, that of GRADTIDE_SCHEME, or "
        "wfbp",
    )
    own, program = list(words), list[str]()
    if "--" in own:
        at = own.index("--")
        own, program = own[:at], own[at + 1 :]
    chosen, stray = parser.parse_known_args(own)
    if program and stray:
        parser.error(f"unrecognized arguments: {' '.join(stray)}")
    if not program:
        example = " ".join(["--", *(stray or ["train.py"])])
        parser.error(f"say what to run, after --, as in: {example}")
    try:
        as_scheme(chosen.scheme)
    except ValueError as error:
        parser.error(f"--scheme: {error}")
    try:
        command = checked(program)
    except ValueError as error:
        parser.error(str(error))
    sys.stdout.flush()
    os.execvpe(command[0], command, environment(chosen.scheme))


def checked(program: Sequence[str]) -> list[str]:
    """The command of a program; ValueError where there is no such program."""
    command, file = command_of(program), Path(program[0])
    if shutil.which(command[0]) is None:
        raise ValueError(f"there is no program {command[0]}")
    if file.suffix == ".py" and not file.is_file():
        raise ValueError(f"there is no file {file}")
    return command


def command_of(program: Sequence[str]) -> list[str]:
    """A program's own command, or this Python with a file or a module."""
    if program[0].endswith(".py") or program[0].startswith("-"):
        return [sys.executable, *program]
    return list(program)


def environment(scheme: str) -> dict[str, str]:
    """This process's environment, with a scheme and the start-up hook."""
    return hooked({SCHEME: scheme})


def hooked(variables: Mapping[str, str]) -> dict[str, str]:
    """This process's environment, with the start-up hook and what that reads."""
    folder = gradtide.startup.__path__[0]
    others = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths = [folder, *(path for path in others if path and path != folder)]
    return {**os.environ, **variables, "PYTHONPATH": os.pathsep.join(paths)}
