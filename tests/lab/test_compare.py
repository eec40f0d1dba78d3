"""The whole comparison on loopback, and what happens when a rank fails."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

from gradtide.lab.cluster import LabError
from gradtide.lab.report import compare
from gradtide.lab.spec import Spec

SPEC = Spec(
    schemes=("ddp", "ddp(wire='bf16')", "dear"),
    workload="digits",
    hosts=2,
    ranks_per_host=1,
    rate=None,
    steps=4,
    warmup=2,
    rounds=2,
)

BROKEN = """
from dataclasses import dataclass

@dataclass(frozen=True)
class Broken:
    def reduce(self, payload, group):
        if group.rank == 1:
            raise RuntimeError("rank one broke")
        yield from ()
        return payload.flat
"""


@pytest.mark.alone
def test_from_spec_to_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compare(SPEC, tmp_path / "new" / "out", ["gradtide", "compare"])
    shown = capsys.readouterr().out
    assert "compute is real" in shown
    assert "val accuracy" in shown
    written = json.loads((tmp_path / "new" / "out" / "record.json").read_text())
    ddp, ddp_bf16, dear = written["results"]
    assert ddp["speedup_over_ddp"] == 1
    assert ddp_bf16["payload_bytes"] == ddp["payload_bytes"] / 2
    # Buffers, norms and flags are counted, and buckets are padded.
    assert dear["payload_bytes"] == pytest.approx(ddp["payload_bytes"], rel=0.05)
    assert dear["final_loss"] == pytest.approx(ddp["final_loss"], rel=1e-4)
    for result in written["results"]:
        sums = sum(
            result[f"{part}_seconds"]
            for part in ("forward", "backward", "exposed", "apply")
        )
        low, high = result["step_seconds_p25"], result["step_seconds_p75"]
        assert 0.5 * low < sums < 2 * high
        assert result["cpu_seconds"] > 0
        assert result["interface_bytes"] is None
    trace = json.loads((tmp_path / "new" / "out" / "trace.json").read_text())
    names = {event["name"] for event in trace["traceEvents"]}
    assert {"forward", "backward", "apply"} <= names
    # Which of dear's requests run between two steps, when nothing is drawn, is up to
    # the clock: a step that does not wait may end before its first is on the wire.
    assert any(" " in name for name in names), names  # "bucket what"


@pytest.mark.slow
def test_a_rank_that_fails_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    # A scheme's text imports nothing: the ranks import it when they start.
    (tmp_path / "sitecustomize.py").write_text("import broken")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "broken", importlib.import_module("broken"))
    spec = Spec(("ddp", "broken.Broken()"), "digits", 2, 1, None, steps=1, rounds=1)
    with pytest.raises(LabError, match="rank one broke") as caught:
        compare(spec, tmp_path, ["gradtide"])
    assert "progress" not in str(caught.value)


def test_a_folder_that_cannot_be_is_refused_before_anything_starts(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="choose another"):
        compare(SPEC, tmp_path / "file", ["gradtide"])
