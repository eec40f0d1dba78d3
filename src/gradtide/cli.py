"""The command line: `gradtide schemes | compare | race | plan | simulate | ...`.

Knows options and exit codes. What a command does is imported when it runs.
"""

from __future__ import annotations

if __name__ == "__main__":  # before anything that an extra installs
    raise SystemExit("error: the command line is started by python -m gradtide")

import math
import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

import gradtide
from gradtide import run
from gradtide.doctor.cli import doctor
from gradtide.lab import options
from gradtide.lab.checks import check_file, require
from gradtide.lab.cli import app as lab
from gradtide.profile.cli import app as profile
from gradtide.simulate.cli import simulate

app = typer.Typer(
    help="Data-parallel PyTorch training over networks that cannot keep up.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)
app.add_typer(lab, name="lab")
app.add_typer(profile, name="profile")
app.command(
    epilog=options.examples(
        "gradtide simulate --trace replay:resnet50 --out out/simulate",
        "gradtide simulate --trace trace.json --rates 1gbit,10gbit --out out/mine",
    )
)(simulate)
app.command(
    epilog=options.examples(
        "gradtide doctor --model params=25M,step=300ms",
        "torchrun --nproc-per-node 1 --no-python gradtide doctor",
    )
)(doctor)

Schemes = Annotated[
    str, Option(help="Which, with commas between: `gradtide schemes --all` has them.")
]
LinkRate = Annotated[
    str | None,
    Option(help="Of each host's link, such as 100mbit. Not under torchrun."),
]
Profile = Annotated[
    Path | None, Option(help="Made by gradtide profile network. Without: an ideal one.")
]
PerHost = Annotated[int | None, Option(help="Behind one network card.")]
Rate = Annotated[str | None, Option(help="Of each host's link, such as 10gbit.")]
Ranked = Annotated[
    str | None,
    Option(help="To rank beside the dense ones. Without: the recommended ones."),
]
Json = Annotated[Path | None, Option(help="Write the plan for programs, too.")]
Margin = Annotated[
    float | None,
    Option(
        help="Share of more steps that a lossy scheme has to be worth. Without: "
        "what such schemes have needed on other tasks."
    ),
]
RunSteps = Annotated[
    int | None,
    Option("--steps", help="Of a run, else 2000: how much its steps of warm-up count."),
]
Pilot = Annotated[
    Path | None,
    Option(help="record.json of a race: how many more steps its schemes needed."),
]
Seed = Annotated[int, Option(help="Of models, data and replays.")]

GRAMMAR = """\
A recipe is called with what is to differ. Sparse and low-rank ones take
their density or rank first, and schedule=, warmup=, momentum_correction=:

    dear(wire='bf16')
    oktopk(0.01, schedule='local', wire='bf16', warmup=240)
    spd_kfac(schedule='dear', damping=0.01)

Schedules are 'sequential', 'wfbp', 'dear' and 'local'."""

MORE = """\
`gradtide plan` says how long a step of each would take with your model on your
network; `gradtide schemes --all` lists all that have a name."""

PLANNED = """\
What is trained: --trace trace.json, which is made on one machine by
    gradtide profile trace mypkg.train:build --out trace.json
    or, for a first look, --trace replay:resnet50 --step-ms 300
Where: --ranks 8 --rate 1gbit, or --network network.json, which is made by
    torchrun ... -m gradtide profile network --out network.json
Then: gradtide plan --trace trace.json --ranks 8 --rate 1gbit"""


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gradtide {gradtide.__version__}")
        raise typer.Exit()


@app.callback()
def _main(
    version: Annotated[
        bool,
        Option("--version", help="Print it.", callback=_version, is_eager=True),
    ] = False,
) -> None: ...


@app.command(
    "run",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    epilog=options.examples(
        "gradtide run --scheme dear -- torchrun --nproc-per-node 2 train.py",
        "torchrun --nproc-per-node 2 -m gradtide run --scheme dear -- train.py",
    ),
)
def run_program(
    context: typer.Context,
    scheme: Annotated[
        str | None, Option(help="Without: that of GRADTIDE_SCHEME, or wfbp.")
    ] = None,
) -> None:
    """Run a program that uses torch's DistributedDataParallel with gradtide's."""
    own = [] if scheme is None else ["--scheme", scheme]
    run.main([*own, "--", *context.args])


@app.command(epilog=options.examples("gradtide schemes", "gradtide schemes --all"))
def schemes(
    every: Annotated[
        bool, Option("--all", help="All that have a name, and the baselines.")
    ] = False,
) -> None:
    """List the recommended recipes: which to use when, and what each needs.

    With --all every scheme that has a name, with its arguments, and the baselines.
    """
    from rich.console import Console

    from gradtide.lab import listing

    console = Console(highlight=False)
    shown = listing.everything() if every else listing.recommended()
    console.print(shown, crop=False)
    console.print(f"\n{GRAMMAR}" if every else f"\n{MORE}")


@app.command(
    epilog=options.examples(
        "gradtide compare --schemes ddp,dear --hosts 4 --rate 50mbit --out out/steps",
        "gradtide compare --schemes ddp,dear --workload mypkg.train:build "
        "--hosts 4 --rate 1gbit --out out/mine",
    )
)
def compare(
    schemes: Schemes,
    out: Annotated[Path, Option(help="Folder for record, table, chart, trace.")],
    workload: Annotated[
        str, Option(help="What is trained: gpt, or a function, mypkg.train:build.")
    ] = "gpt-small",
    hosts: options.Hosts = None,
    ranks_per_host: options.RanksPerHost = 1,
    rate: LinkRate = None,
    local_rate: options.LocalRate = None,
    up: options.Up = None,
    delay: options.Delay = None,
    jitter: options.Jitter = None,
    loss: options.Loss = None,
    internet: options.FromFile = None,
    steps: Annotated[int, Option(help="Timed steps of each scheme.")] = 30,
    warmup: options.Warmup = 3,
    rounds: Annotated[int, Option(help="Times that each has its turn.")] = 3,
    step_ms: options.StepMs = None,
    trace: options.Times = None,
    seed: Seed = 0,
    device: options.Device = "cpu",
) -> None:
    """Train the same model with each scheme in turn, and show where the time goes.

    --hosts and --rate emulate a cluster; under torchrun, its ranks are used.
    """
    from gradtide.lab import report as lab_report
    from gradtide.lab.spec import Spec, split_schemes

    with options.told():
        far = options.Far(up, delay, jitter, loss, internet)
        there, rank = _place(hosts, ranks_per_host, rate, far)
        names = split_schemes(schemes)
        spec = Spec(
            *(names, workload, *there[:3], steps, warmup, rounds),
            seed=seed,
            local_rate=options.local_bits(local_rate),
            internet=there.internet,
            step_ms=step_ms,
            trace=trace and trace.absolute(),
            device=device,
        )
        lab_report.compare(spec, out, sys.argv, rank)


@app.command(
    epilog=options.examples(
        "gradtide race --schemes ddp,dear --hosts 4 --rate 50mbit --out out/race",
        "gradtide race --schemes ddp,dear --workload mypkg.train:build "
        "--hosts 2 --rate 1gbit --out out/mine",
        "gradtide race --schemes ddp,dear --hosts 2 --rate 1gbit --out o -- train.py",
    )
)
def race(
    schemes: Schemes,
    out: Annotated[Path, Option(help="Folder for record, table and picture.")],
    workload: Annotated[
        str, Option(help="What is trained: gpt, or a function, mypkg.train:build.")
    ] = "gpt-small",
    hosts: options.Hosts = None,
    ranks_per_host: options.RanksPerHost = 1,
    rate: LinkRate = None,
    local_rate: options.LocalRate = None,
    up: options.Up = None,
    delay: options.Delay = None,
    jitter: options.Jitter = None,
    loss: options.Loss = None,
    internet: options.FromFile = None,
    seconds: Annotated[float, Option(help="Of training for each scheme.")] = 60.0,
    every: Annotated[int, Option(help="Steps between two looks at the loss.")] = 20,
    seed: Seed = 0,
    device: options.Device = "cpu",
    target: Annotated[
        str, Option(help="Whose lowest loss all race to. Without: the first's.")
    ] = "",
    resume: Annotated[
        bool, Option("--resume", help="Train only whom the record in --out lacks.")
    ] = False,
    loss_pattern: Annotated[
        str | None, Option(help="Of a script: how it prints one, r'loss=(\\S+)'.")
    ] = None,
    script: Annotated[
        list[str] | None,
        Argument(help="A training script, after --.", metavar="[-- SCRIPT]"),
    ] = None,
) -> None:
    """Train the same model for a time with each scheme, and show which loss is when.

    They race to the lowest loss of one of them. --hosts and --rate emulate a cluster;
    under torchrun, its ranks are used. A script is started with each scheme in turn
    ({scheme} in its arguments, or gradtide run), and its printed losses are read.
    """
    from gradtide.lab.race import report as lab_race
    from gradtide.lab.race import script as lab_script
    from gradtide.lab.spec import RaceSpec, split_schemes

    with options.told():
        far = options.Far(up, delay, jitter, loss, internet)
        there, rank = _place(hosts, ranks_per_host, rate, far)
        names = split_schemes(schemes)
        inside = options.local_bits(local_rate)
        how = names, workload, *there[:3], seconds, every
        spec = RaceSpec(
            *how,
            seed=seed,
            local_rate=inside,
            internet=there.internet,
            target=target,
            device=device,
        )
        if not script:
            lab_race.race(spec, out, sys.argv, rank, resume)
            return
        if rank is not None:
            raise ValueError("a script is started here: leave out torchrun")
        if device != "cpu":
            raise ValueError("--device: a script says itself where it trains")
        run.checked(script)
        pattern = lab_script.LOSS if loss_pattern is None else loss_pattern
        spec = replace(spec, workload=f"script:{' '.join(script)}")
        lab_script.race(spec, script, pattern, out, sys.argv, resume)


@app.command(
    epilog=options.examples(
        "gradtide pilot -- train.py --epochs 3",
        "gradtide pilot --workload mypkg.train:build --seconds 60 --ranks 2",
    )
)
def pilot(
    program: Annotated[
        list[str] | None,
        Argument(help="A training script, after --.", metavar="[-- SCRIPT]"),
    ] = None,
    workload: Annotated[
        str | None, Option(help="Or a function, mypkg.train:build, or gpt-small.")
    ] = None,
    schemes: Annotated[
        str | None,
        Option(help="The exact one and those in question. Without: README's."),
    ] = None,
    ranks: Annotated[int, Option(help="On this machine.")] = 4,
    seconds: Annotated[float, Option(help="Of training for each scheme.")] = 120.0,
    every: Annotated[int, Option(help="Steps between two looks at the loss.")] = 10,
    seed: Seed = 0,
    out: Annotated[Path, Option(help="Folder for what was seen.")] = Path("out/pilot"),
    loss_pattern: Annotated[
        str | None, Option(help="Of a script: how it prints one, r'loss=(\\S+)'.")
    ] = None,
) -> None:
    """Say how many more steps recipes need to the same loss, on your own script.

    It trains with each of them for a time, on this machine: a race without slow links.
    plan --pilot and advise --pilot go by what it leaves.
    """
    require("lab", "psutil", "matplotlib")
    from gradtide.lab.race import pilot as lab_pilot

    with options.told():
        how = schemes, ranks, seconds, every, seed
        spec = lab_pilot.asked(program, workload, *how)
        if program:
            run.checked(program)
        lab_pilot.hold(spec, program or [], loss_pattern, out, sys.argv)


def _place(
    hosts: int | None, ranks_per_host: int, rate: str | None, far: options.Far
) -> tuple[options.Layout, int | None]:
    """Where it is held; and this rank, where torchrun has started it."""
    require("lab", "psutil", "matplotlib")
    if "RANK" in os.environ and (hosts is not None or rate is not None):
        raise ValueError(
            "torchrun has started this on real hosts: leave out --hosts and --rate"
        )
    example = "say on which hosts: --hosts 4 --rate 100mbit"
    there = options.layout(hosts, ranks_per_host, rate, far, example)
    started = options.torchrun()
    return there, None if started is None else started.rank


@app.command(
    epilog=options.examples(
        "gradtide plan --trace replay:resnet50 --step-ms 300 --ranks 8 --rate 1gbit",
        "gradtide plan --trace trace.json --network network.json --ranks 32",
    )
)
def plan(
    trace: Annotated[
        str | None,
        Option(help="Made by gradtide profile trace, or a workload: replay:resnet50."),
    ] = None,
    network: Profile = None,
    step_ms: options.StepMs = None,
    hosts: Annotated[int | None, Option(help="Number of hosts.")] = None,
    ranks: Annotated[int | None, Option(help="Or of all ranks.")] = None,
    ranks_per_host: PerHost = None,
    rate: Rate = None,
    up: options.Up = None,
    delay: options.Delay = None,
    loss: options.Loss = None,
    internet: options.FromFile = None,
    stragglers: options.Stragglers = None,
    device: options.Processor = None,
    schemes: Ranked = None,
    margin: Margin = None,
    steps: RunSteps = None,
    pilot: Pilot = None,
    json: Json = None,
) -> None:
    """Rank schemes by the time of a step that they would take, and say why.

    Nothing is exchanged: the engine runs on a virtual clock.
    """
    from gradtide.planning import Place, Planning, Weighed, read_trace

    with options.told():
        if trace is None:
            raise ValueError(f"say what is trained, and where.\n{PLANNED}")
        far = options.Far(up, delay, loss=loss, internet=internet)
        place = Place(ranks, ranks_per_host, rate, far, stragglers, hosts)
        weighed = Weighed(margin, steps, pilot)
        planning = Planning.asked(network, place, device, schemes, weighed, json)
        found = planning.of(read_trace(trace, step_ms, device))
    found.show()


@app.command(
    epilog=options.examples(
        "gradtide advise --hosts 4 --rate 1gbit -- python train.py --epochs 3",
        "gradtide advise --ranks 8 --rate 200mbit --delay 40ms -- train.py",
        "gradtide advise --network net.json -- torchrun --nproc-per-node 2 train.py",
    )
)
def advise(
    program: Annotated[
        list[str] | None,
        Argument(help="What trains, after --.", metavar="-- PROGRAM [ARGUMENTS]"),
    ] = None,
    network: Profile = None,
    hosts: Annotated[int | None, Option(help="Number of hosts.")] = None,
    ranks: Annotated[int | None, Option(help="Or of all ranks.")] = None,
    ranks_per_host: PerHost = None,
    rate: Rate = None,
    up: options.Up = None,
    delay: options.Delay = None,
    loss: options.Loss = None,
    internet: options.FromFile = None,
    stragglers: options.Stragglers = None,
    device: options.Processor = None,
    schemes: Ranked = None,
    margin: Margin = None,
    steps: RunSteps = None,
    pilot: Pilot = None,
    timed: Annotated[int, Option(help="Steps of the program that are timed.")] = 5,
    seconds: Annotated[
        float, Option(help="For which the program may run at the most.")
    ] = 120.0,
    table: Annotated[
        bool, Option("--table", help="All schemes, as gradtide plan shows them.")
    ] = False,
    json: Json = None,
    trace_out: Annotated[
        Path | None, Option(help="Keep the trace, for gradtide plan --trace.")
    ] = None,
    html: Annotated[
        Path | None, Option(help="A page: the advice, and by other links' rates.")
    ] = None,
) -> None:
    """Run a training script for a few steps, and say which recipe it should use.

    The script stays as it is. It is ended when its step was timed.
    """
    from gradtide.advise import notes, page, report
    from gradtide.advise.program import NotRecorded, record
    from gradtide.planning import Place, Planning, Weighed

    with options.told():
        if not program:
            raise ValueError("say what to run, after --, as in: -- python train.py")
        if "RANK" in os.environ:
            raise ValueError(
                "torchrun has started this: start it once, with torchrun after --"
            )
        command = run.checked(program)
        if timed < 1 or not 0 < seconds < math.inf:
            raise ValueError(f"--timed {timed} --seconds {seconds}: more than 0")
        far = options.Far(up, delay, loss=loss, internet=internet)
        place = Place(ranks, ranks_per_host, rate, far, stragglers, hosts)
        weighed = Weighed(margin, steps, pilot)
        planning = Planning.asked(network, place, device, schemes, weighed, json)
        for option, path in {"--trace-out": trace_out, "--html": html}.items():
            if path is not None:
                check_file(option, path)
        wanted, hooked = notes.Wanted(timed), run.hooked({})
        try:
            step, told = record(command, hooked, wanted, seconds)
        except NotRecorded as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(error.code) from None
        if trace_out is not None:
            step.save(trace_out)
        found = planning.of(step)
    said = report.answer(*found, told, program)
    typer.echo(err=True)  # what was printed last may be no whole line
    typer.echo(said)
    if table:
        typer.echo()
        found.show()
    if html is not None:
        again = partial(planning.advise, step, tune=False)
        chart = page.chart(found.advice, found.network, again)
        drawn = page.timelines(*found[:3])
        html.write_text(page.page(*found[:2], said, chart, drawn), "utf-8")
