"""Who is no rank of the job changes nothing; the log says so, in few words."""

from __future__ import annotations

import importlib.util
import logging
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from gradtide.runtime.ahead import prepare
from gradtide.scheme import as_scheme
from gradtide.transport.strangers import NAMED, Strangers

PATH = Path(__file__).parents[2] / "benchmarks" / "strangers.py"


def test_the_log_names_a_few_and_counts_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    strangers = Strangers()
    with caplog.at_level(logging.WARNING, "gradtide.transport"):
        for port in range(1500):
            strangers.sent_away(("192.0.2.7", port) if port % 2 == 0 else "")
    lines = [record.getMessage() for record in caplog.records]
    named, counted = lines[:NAMED], lines[NAMED:]
    assert "192.0.2.7 port 0 called" in named[0]
    assert "a process of this host called" in named[1]
    assert [int(line.split()[0]) for line in counted] == [10, 100, 1000]


@pytest.fixture(scope="module")
def program() -> ModuleType:
    """`benchmarks/strangers.py`, which has more strangers, and more jobs."""
    spec = importlib.util.spec_from_file_location("strangers", PATH)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules["strangers"] = found
    spec.loader.exec_module(found)
    return found


@pytest.mark.product
@pytest.mark.waits
@pytest.mark.skipif(sys.platform != "linux", reason="it finds sockets in /proc")
@pytest.mark.parametrize("way", ["unix", "tcp"])
def test_ranks_train_as_if_strangers_had_not_called(
    way: str, program: ModuleType
) -> None:
    scheme = "topka2a(0.02, schedule='local', warmup=6)"
    prepare([torch.zeros(1)], as_scheme(scheme))
    everywhere = "doors", "store", "gloo"
    job = program.Job(scheme, way, 2, 2, 300, everywhere)
    found = program.compare(job, seed=1)
    assert found["wrong"] == [], found
    quiet, loud = found["without"], found["with"]
    assert quiet["sent"] == quiet["lines"] == 0
    assert {name.split(":")[0] for name in loud["counts"]} == {*everywhere}
    assert 0 < loud["lines"] < 40


@pytest.mark.skipif(sys.platform != "linux", reason="it finds sockets in /proc")
def test_what_would_be_wrong_is_told(
    program: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = {
        "digests": ["a", "a"],
        "exit codes": [0, 0],
        "unpickled": False,
        "lines": 1,
        "sent": 100,
        "said": [],
    }
    monkeypatch.setattr(program, "first_words", bytes)
    job = program.Job("wfbp", "unix", 2, 1, 100, ("doors",))

    def wrong(**changed: object) -> list[str]:
        runs = [dict(good), {**good, **changed}]
        monkeypatch.setattr(program, "run", lambda *_: runs.pop(0))
        found: list[str] = program.compare(job, 0)["wrong"]
        return found

    assert wrong() == []
    assert wrong(digests=["a", "b"]) == ["other weights"]
    assert wrong(digests=[None, None]) == ["other weights"]
    assert wrong(**{"exit codes": [0, -6]}) == ["a rank failed"]
    assert wrong(unpickled=True) == ["unpickled"]
    assert wrong(lines=101) == ["more lines than strangers"]
    assert wrong(sent=99) == ["too few strangers"]
