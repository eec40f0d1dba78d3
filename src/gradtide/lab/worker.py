"""What every rank of a comparison runs: `python -m gradtide.lab.worker SPEC OUTCOME`.

Owns the process group from its making to its end. A rank that fails ends at once with a
traceback, so that the launcher can end the others: nobody waits for it.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed as dist

from gradtide.lab import workloads
from gradtide.lab.contestants import Contestant, alone, enter
from gradtide.lab.group import begin
from gradtide.lab.limits import Compute
from gradtide.lab.record import Result
from gradtide.lab.spec import Spec, loads
from gradtide.lab.summary import Facts, facts, summarise, typical, with_speedups
from gradtide.lab.timeline import Span, spans
from gradtide.lab.trial import Clock, Trial, compete

PROGRESS = "gradtide-progress "  # before the name of who has done a step

Report = Callable[[str], None]


@dataclass(frozen=True)
class Outcome:
    """What rank 0 hands to whoever reports."""

    results: list[Result]
    timelines: dict[str, list[Span]]
    facts: Facts

    def dumps(self) -> str:
        return json.dumps(asdict(self))


def outcome(text: str) -> Outcome:
    """The outcome that `Outcome.dumps` wrote."""
    fields = json.loads(text)
    common = fields["facts"]
    return Outcome(
        [Result(**result) for result in fields["results"]],
        {k: [Span(*span) for span in v] for k, v in fields["timelines"].items()},
        Facts(common["replayed"], Compute(*common["compute"])),
    )


def measure(spec: Spec, report: Report) -> Outcome | None:
    """Run the comparison on this rank; the outcome on rank 0, None elsewhere.

    Expects torchrun's environment. `report` is called on rank 0 after each step.
    """
    begin()
    quiet: Report = lambda name: None  # noqa: E731
    contestants = _enter_all(spec)
    trials = compete(
        contestants,
        spec.warmup,
        spec.blocks(),
        Clock(_interface()),
        report if dist.get_rank() == 0 else quiet,
    )
    contestants = [contestant.settled() for contestant in contestants]
    gathered: list[list[Trial]] | None = None
    if dist.get_rank() == 0:
        gathered = [[] for _ in range(dist.get_world_size())]
    dist.gather_object(trials, gathered)
    for contestant in contestants:
        contestant.leave()
    dist.destroy_process_group()
    return None if gathered is None else _outcome(spec, contestants, gathered)


def run(work: Callable[[], None]) -> None:
    """Do `work`; a failure ends this process at once, whatever its threads wait for."""
    try:
        work()
    except BaseException:
        # An orderly exit would join lanes whose peers may never answer.
        traceback.print_exc()
        sys.stdout.flush()
        os._exit(1)


def _enter_all(spec: Spec) -> list[Contestant]:
    rank, size = dist.get_rank(), dist.get_world_size()

    def fresh() -> workloads.Workload:
        return workloads.build(
            spec.workload,
            rank=rank,
            size=size,
            seed=spec.seed,
            step_ms=spec.step_ms,
            trace=None if spec.trace is None else Path(spec.trace),
        )

    contestants = [enter(name, fresh(), size) for name in spec.schemes]
    if not contestants[0].workload.replayed:
        contestants.append(alone(fresh()))
    return contestants


def _outcome(
    spec: Spec, contestants: list[Contestant], gathered: list[list[Trial]]
) -> Outcome:
    """`gathered` holds every rank's trials in the order of the contestants."""
    by_contestant = list(zip(*gathered, strict=True))
    common = facts(contestants[0], by_contestant[-1])
    results, timelines = [], {}
    # Compute alone, where it was measured, is the last: no row of its own.
    for contestant, trials in list(zip(contestants, by_contestant, strict=True))[
        : len(spec.schemes)
    ]:
        results.append(summarise(spec, contestant, trials, common))
        timelines[contestant.name] = spans(
            typical(trials[0], spec.blocks()[-1]),
            trials[0].applied,
            trials[0].records,
            common.compute.backward if contestant.engine is None else None,
        )
    return Outcome(with_speedups(results), timelines, common)


def _interface() -> str:
    """The shaped link's name; empty where nothing is shaped, as on loopback."""
    if not os.environ.get("GRADTIDE_LAB_RATE"):
        return ""
    return os.environ.get("GRADTIDE_LAB_INTERFACE", "")


def _main(spec_path: str, outcome_path: str) -> None:
    def report(name: str) -> None:
        print(f"{PROGRESS}{name}", flush=True)

    found = measure(loads(Path(spec_path).read_text(encoding="utf-8")), report)
    if found is not None:
        Path(outcome_path).write_text(found.dumps(), encoding="utf-8")


if __name__ == "__main__":
    run(lambda: _main(*sys.argv[1:3]))
