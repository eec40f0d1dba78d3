"""The table of the comparison page is what the league's record says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
NAMES = {
    "1-bit Adam": "1-bit adam",
    "DDP": "ddp",
    "DDP with `bf16_compress_hook`": "ddp bf16",
    "DDP with `powerSGD_hook`, rank 32": "powersgd hook, rank 32",
    "DDP with `powerSGD_hook`, rank 4": "powersgd hook, rank 4",
    "post-local SGD, every 4 steps": "post-local sgd, every 4",
    "DiLoCo, every 10 steps": "diloco, every 10",
    "DeMo, 32 of 4096": "demo",
    "DDP with `bf16_compress_hook` and Muon": "ddp bf16, muon",
    "`wfbp(wire='e3m0')` with Muon": "muon, wfbp(wire='e3m0')",
    "`dear(wire='bf16')` with `DistributedMuon`": "muon by owners, dear(wire='bf16')",
}
RATES = ("10mbit", "50mbit", "200mbit")


def recorded() -> dict[str, list[str]]:
    """Of each contestant where it ends, and how much sooner it is there, by rates."""
    script, record = "benchmarks/league.py", "benchmarks/records/league_202611.json"
    command = [sys.executable, script, "table", "--out", record]
    table = subprocess.run(
        command, cwd=ROOT, check=True, capture_output=True, text=True
    )
    rows: dict[str, dict[str, str]] = {}
    rate = ""
    for line in table.stdout.splitlines():
        if line[:1].isdigit():
            rate = line.partition(",")[0]
        elif line.startswith("| `"):
            name, _, end, _, sooner = (
                x.strip(" `") for x in line.strip("|").split("|")
            )
            times = f"{float(sooner[:-1]):.1f}x" if sooner else "never"
            rows.setdefault(name, {"end": end})[rate] = times
    return {name: [row["end"], *(row[r] for r in RATES)] for name, row in rows.items()}


def test_readme_shows_a_part_of_the_comparison_page() -> None:
    """Its table is of the same rows, without the losses that they end at."""
    shown = {row[0]: [row[1], *row[3:]] for row in rows("docs/comparison.md", 6)}
    short = {row[0]: row[1:] for row in rows("README.md", 5)}
    assert len(short) >= 5
    for contestant, told in short.items():
        assert told == shown[contestant], contestant


def rows(page: str, columns: int) -> list[list[str]]:
    """Of the league's table on a page."""
    text = (ROOT / page).read_text()
    found = [
        [cell.strip(" *") for cell in line.strip("|").split("|")]
        for line in text.splitlines()
    ]
    last = re.compile(r"\d+\.\dx|never")
    return [row for row in found if len(row) == columns and last.fullmatch(row[-1])]


def test_the_comparison_page_shows_the_record() -> None:
    text = (ROOT / "docs/comparison.md").read_text()
    shown = {}
    for line in text.splitlines():
        cells = [cell.strip(" *") for cell in line.strip("|").split("|")]
        if len(cells) == 6 and re.fullmatch(r"\d\.\d{3}", cells[2]):
            name = NAMES.get(cells[0], cells[0].strip("`"))
            shown[name] = [cells[2], *cells[3:]]
    assert shown == recorded()
