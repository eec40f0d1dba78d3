"""How truly the lab emulates hosts that are far from each other.

    python benchmarks/lab_network.py --out benchmarks/records/lab_network.json

For each setting `lab probe` measures every pair of four hosts so many times; the record
has the median of each pair's, and the errors of the medians over all pairs and of the
worst pair.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from pathlib import Path
from statistics import median
from typing import Any

from gradtide.lab import options
from gradtide.lab.cluster import Cluster
from gradtide.lab.probe import Way, asked, survey
from gradtide.lab.record import commit, machine, versions

HOSTS = 4
SETTINGS = (
    "--rate 10mbit --delay 200ms",
    "--rate 100mbit --delay 10ms",
    "--rate 100mbit --delay 40ms --loss 0.5%",
    "--rate 200mbit --up 20mbit --delay 40ms",
    "--rate 1gbit --delay 40ms",
    "--rate 1gbit --delay 10ms",
    "--internet home",
)
ROUND_TRIP, ABSOLUTE, RATE, LOSS = 0.05, 1e-3, 0.05, 0.25


def cluster(setting: str) -> Cluster:
    """What the command line makes of the options."""
    parser = argparse.ArgumentParser()
    for name in ("rate", "up", "delay", "jitter", "loss", "internet"):
        parser.add_argument(f"--{name}")
    given = vars(parser.parse_args(shlex.split(setting)))
    rate = given.pop("rate")
    there = options.asked(HOSTS, 1, rate, options.Far(**given), setting)
    return Cluster.emulating(*there[:3], internet=there.internet)


def errors(wanted: Way, found: Way) -> dict[str, float]:
    """How far what was found is from what was asked for; a round trip in seconds."""
    loss = found.loss / wanted.loss - 1 if wanted.loss else found.loss
    return {
        "round_trip_s": found.round_trip - wanted.round_trip,
        "rate": found.rate / wanted.rate - 1,
        "loss": loss,
    }


def good(wanted: Way, error: dict[str, float]) -> bool:
    """Whether it is what is promised."""
    allowed = max(ROUND_TRIP * wanted.round_trip, ABSOLUTE)
    return (
        abs(error["round_trip_s"]) <= allowed
        and abs(error["rate"]) <= RATE
        and abs(error["loss"]) <= (LOSS if wanted.loss else 1e-3)
    )


def measured(setting: str, turns: int, seconds: float) -> dict[str, Any]:
    """A row of the record: the medians of each pair's."""
    place = cluster(setting)
    assert place.internet is not None
    runs = [survey(place, seconds) for _ in range(turns)]
    rows, kept = [], []
    for ways in zip(*runs, strict=True):
        names = ("round_trip", "rate", "loss")
        middle = {n: median(getattr(way, n) for way in ways) for n in names}
        pair = ways[0].sender, ways[0].receiver
        found, wanted = Way(*pair, **middle), asked(place.internet, *pair)
        error = errors(wanted, found)
        kept.append(error)
        rows.append(
            {
                "pair": pair,
                "asked": vars(wanted),
                "found": vars(found),
                "good": good(wanted, error),
            }
        )
    summary = {
        name: {
            "median": median(e[name] for e in kept),
            "worst": max((e[name] for e in kept), key=abs),
        }
        for name in kept[0]
    }
    return {
        "setting": setting,
        "load": os.getloadavg()[0],
        "good": sum(row["good"] for row in rows),
        "pairs": len(rows),
        "errors": summary,
        "found": rows,
    }


def main() -> None:
    """Measure, show, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--settings", nargs="*", default=SETTINGS)
    given = parser.parse_args()
    rows = []
    for setting in given.settings:
        rows.append(measured(setting, given.turns, given.seconds))
        row = rows[-1]
        print(setting, f"{row['good']} of {row['pairs']} good,", row["errors"])
        sys.stdout.flush()
    record = {
        "command": " ".join(["python", *sys.argv]),
        "commit": commit(),
        "versions": versions(),
        "machine": machine(),
        "hosts": HOSTS,
        "rows": rows,
    }
    given.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
