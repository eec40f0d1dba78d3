"""The shape of the record, and that it names no machine and no person."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from tests.lab.samples import record, row

from gradtide.lab import record as module
from gradtide.lab.record import command_line, commit, machine, milliseconds, versions

TOP = (
    "command commit versions machine workload hosts ranks_per_host rate_bits_per_s"
    " steps results"
)
EACH = (
    "scheme step_seconds step_seconds_p25 step_seconds_p75 speedup_over_ddp"
    " payload_bytes interface_bytes cpu_seconds forward_seconds backward_seconds"
    " select_seconds exposed_seconds apply_seconds limit_seconds density final_loss"
)


def test_exactly_these_keys() -> None:
    written = json.loads(record(row("ddp", 1.0)).dumps())
    assert list(written) == TOP.split()
    assert set(written["results"][0]) == set(EACH.split())


def test_evaluation_only_where_there_is_one() -> None:
    written = json.loads(record(row("ddp", 1.0, evaluation={"loss": 2.0})).dumps())
    assert set(written["results"][0]) == {*EACH.split(), "evaluation"}


def test_command_line_is_as_typed_but_for_program_and_home() -> None:
    home = str(Path.home())
    argv = ["/usr/local/bin/gradtide", "compare", "--schemes", "A(1), B"]
    argv += ["--out", f"{home}/some where/out"]
    expected = "gradtide compare --schemes 'A(1), B' --out ~/'some where/out'"
    assert command_line(argv) == expected


def test_machine_and_versions_are_known() -> None:
    assert set(machine()) == {"cpu", "cores", "memory_bytes", "kernel"}
    assert {"gradtide", "torch", "python"} <= set(versions())


def test_commit_is_the_repository_s() -> None:
    here = Path(__file__).parent
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True
    )
    if head.returncode:
        pytest.skip("not in a git repository")
    found = commit()
    assert found is not None
    assert found.removesuffix("-dirty") == head.stdout.strip()
    assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?", found)


def test_no_commit_outside_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "__file__", str(tmp_path / "record.py"))
    assert commit() is None


def test_milliseconds() -> None:
    assert [milliseconds(s) for s in (3.3204, 0.1, 0.01234)] == ["3320", "100", "12.3"]
