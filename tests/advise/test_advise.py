"""A script as it stands is recorded, whatever it does; what is told where it is not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from typer.testing import CliRunner

from gradtide import run
from gradtide.advise.notes import Told, Wanted
from gradtide.advise.program import NotRecorded, record
from gradtide.advise.recorder import PATIENCE
from gradtide.advise.report import answer, headline
from gradtide.advise.subject import Called, outermost, whole
from gradtide.cli import app
from gradtide.planner import trace as traces
from gradtide.planner.advice import Advice, advise
from gradtide.planner.network import Network
from gradtide.planner.search import rank
from gradtide.planner.trace import StepTrace, Unit
from gradtide.planning import Place, Planning

BEGIN = """\
import os, sys, time, torch
from torch import nn
from torch.utils.checkpoint import checkpoint
def net(*sizes):
    layers = [nn.Linear(a, b) for a, b in zip(sizes, sizes[1:])]
    return nn.Sequential(*layers)
def train(model, *optimizers, passes=1, loss=lambda y: y.square().mean()):
    for step in range(1000):
        for optimizer in optimizers:
            for _ in range(passes):
                loss(model(torch.randn(4, 64))).backward()
            optimizer.step()
            optimizer.zero_grad()
        print("a step", flush=True)
"""
DDP = """\
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
model = DDP(net(64, 64, 8))
def loss(y):
    # Ranks are apart, as nothing is exchanged while steps are timed.
    now = torch.stack([p.detach().sum() for p in model.parameters()]).sum()
    every = [torch.zeros(()) for _ in range(2)]
    dist.all_gather(every, now)
    apart = int(every[0] != every[1])
    open(f"{sys.argv[0]}.{dist.get_rank()}", "a").write(f"{apart}")
    return y.square().mean()
torch.manual_seed(dist.get_rank())
"""


def recorded(
    folder: Path, script: str, *own: str, seconds: float = 100.0
) -> tuple[StepTrace, Told]:
    """Of a script that is begun by BEGIN; `own` starts it, in the place of Python."""
    file = folder / "train.py"
    file.write_text(BEGIN + script)
    environment = run.hooked({"OMP_NUM_THREADS": "1"})
    command = [*(own or (sys.executable,)), str(file)]
    return record(command, environment, Wanted(3, 1), seconds)


@pytest.mark.waits
def test_a_script_is_asked_and_nothing_of_it_is_left(tmp_path: Path) -> None:
    """Two optimizers, accumulation, what is frozen, and clauses that swallow all."""
    script = """
small = net(64, 64)
model = nn.Sequential(small, net(64, 512, 8), nn.Linear(8, 8).requires_grad_(False))
first = torch.optim.SGD(small.parameters(), 0.1)
second = torch.optim.AdamW(model[1].parameters())
while True:
    try:
        train(model, first, second, passes=2)
    except BaseException:
        print("swallowed")
"""
    file, plan, kept = (tmp_path / name for name in ("train.py", "plan", "trace"))
    file.write_text(BEGIN + script)
    where = ["--hosts", "4", "--rate", "100mbit", "--schemes", "dear", "--table"]
    out = ["--json", str(plan), "--trace-out", str(kept)]
    done = subprocess.run(
        [sys.executable, "-m", "gradtide", "advise", *where, *out, "--", str(file)],
        capture_output=True,
        text=True,
        timeout=110,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
    )
    assert done.returncode == 0, done.stderr
    said, found = done.stdout, json.loads(plan.read_text())
    assert f"use {found['recommended']}" in said.splitlines()[0]
    assert f'gradtide.replicate(model, optimizer, "{found["scheme"]}")' in said
    assert "SGD steps, too; AdamW steps most parameters" in said
    assert "4 backward passes" in said
    assert "break-even" in said  # the table's
    assert "a step\n" in done.stderr
    assert "a step\n" not in said
    assert "swallowed" not in done.stderr + said
    step = traces.load(kept)
    assert step.numel == 64 * 65 + 65 * 512 + 513 * 8
    assert step.steps == "adam"
    again = tmp_path / "again"
    place = Place(4, rate="100mbit")
    Planning.asked(None, place, schemes="dear", json=again).of(step)
    assert again.read_text() == plan.read_text()


@pytest.mark.waits
def test_an_optimizer_that_steps_more_rarely_is_waited_for(tmp_path: Path) -> None:
    """As a GAN's generator, after some steps of its critic."""
    script = """
model = nn.Sequential(net(64, 64), net(64, 512, 8))
small = torch.optim.SGD(model[0].parameters(), 0.1)
large = torch.optim.AdamW(model[1].parameters())
frozen = torch.optim.SGD([torch.ones(3)], 0.1)  # never steps
train(model, small, small, small, large)
"""
    found, told = recorded(tmp_path, script)
    assert (told.optimizer, told.others) == ("AdamW", ("SGD",))
    assert found.numel == 64 * 65 + 65 * 512 + 513 * 8


@pytest.mark.waits
def test_sparse_gradients_are_refused_as_where_one_trains(tmp_path: Path) -> None:
    script = """
class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(9, 64, sparse=True), nn.Linear(64, 8)
    def forward(self, x):
        return self.head(self.bag(x.abs().long() % 9))
model = Bag()
train(model, torch.optim.SparseAdam(model.bag.parameters()),
      torch.optim.Adam(model.head.parameters()))
"""
    with pytest.raises(NotRecorded, match="bag has sparse gradients, which gradtide"):
        recorded(tmp_path, script)


@pytest.mark.waits
def test_a_closure_that_is_called_again_is_told_of(tmp_path: Path) -> None:
    script = """
model = net(64, 8)
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=4)
def closure():
    optimizer.zero_grad()
    loss = (model(torch.randn(4, 64)) - 1).square().mean()
    loss.backward()
    return loss
while True:
    optimizer.step(closure)
"""
    _, told = recorded(tmp_path, script)
    assert told.closes
    assert told.passes > 1


@pytest.mark.slow
@pytest.mark.waits
def test_under_torchrun_all_ranks_leave_and_nothing_is_exchanged(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = f"{DDP}train(model, torch.optim.SGD(model.parameters(), 0.1), loss=loss)"
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    found, told = recorded(tmp_path, script, sys.executable, *torchrun)
    said = capfd.readouterr().err
    assert "Traceback" not in said
    assert "exitcode" not in said
    assert (told.ranks, told.wrapped, told.models) == (2, True, ("Sequential",))
    seen = (tmp_path / "train.py.0").read_text()
    assert seen.startswith("00")  # the ranks are alike
    assert seen.endswith("1")  # and then no more
    names = {f"{layer}.{name}" for layer in (0, 1) for name in ("weight", "bias")}
    assert {unit.name for unit in found.units} == names


@pytest.mark.product
@pytest.mark.waits
@pytest.mark.parametrize(
    "script",
    [
        pytest.param(
            """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = net(64, 64), net(64, 64, 8)
    def forward(self, x):
        x = checkpoint(self.first, x, use_reentrant=False)
        return {"more": [checkpoint(self.second, x, use_reentrant=False)], "n": 3}
model = Model()
train(model, torch.optim.Adam(model.parameters()), loss=lambda y: y["more"][0].sum())
""",
            id="checkpointed, with outputs of any kind",
        ),
        pytest.param(
            """
model = net(64, 64, 8)
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
def closure():
    optimizer.zero_grad()
    loss = model(torch.randn(4, 64)).square().mean()
    loss.backward()
    return loss
while True:
    optimizer.step(closure)
""",
            id="a closure",
        ),
        pytest.param(
            """
model = net(64, 64, 8)
optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler(
    "cpu"
)
while True:
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(torch.randn(4, 64)).square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
""",
            id="a GradScaler",
        ),
        pytest.param(
            """
from torch.utils.data import DataLoader
encoder, decoder = net(64, 64), net(64, 8)  # that nothing has in common calls
optimizer = torch.optim.SGD([*encoder.parameters(), *decoder.parameters()], 0.1)
for x in DataLoader(torch.randn(400, 64), batch_size=4, num_workers=2):
    decoder(encoder(x)).sum().backward()
    optimizer.step()
""",
            id="several modules, and workers",
        ),
    ],
)
def test_whatever_a_loop_does_its_step_is_timed(tmp_path: Path, script: str) -> None:
    found, _ = recorded(tmp_path, script)
    assert found.numel == 64 * 65 + 65 * 8 + (64 * 65 if "checkpoint" in script else 0)
    assert found.backward > 0
    assert found.optimizer > 0


@pytest.mark.slow
@pytest.mark.waits
def test_a_compiled_model(tmp_path: Path) -> None:
    script = """
model = torch.compile(net(64, 64, 8), backend="aot_eager")
train(model, torch.optim.SGD(model.parameters(), 0.1))
"""
    found, told = recorded(tmp_path, script)
    assert told.models == ("Sequential",)
    assert found.backward > 0


@pytest.mark.product
@pytest.mark.waits
@pytest.mark.parametrize(
    ("script", "code", "told"),
    [
        ("sys.exit()", 1, "torch was imported, and no module was called"),
        (
            "net(64, 8)(torch.randn(4, 64)).sum().backward()",
            1,
            "Sequential was called with gradients, and no optimizer of torch stepped",
        ),
        (
            "model = net(64, 8)\nmodel(torch.randn(4, 64)).sum().backward()\n"
            "torch.optim.SGD(model.parameters(), 1).step()\n"
            "sys.exit('my last words')",
            1,
            "with exit code 1: 1 steps of optimizers were seen, and 6 are needed",
        ),
        (
            "w = nn.Parameter(torch.ones(3)); net(64, 8)(torch.ones(64))\n"
            "optimizer = torch.optim.SGD([w], 0.1)\n"
            "while True: optimizer.step()",
            1,
            "SGD steps parameters of no module that was called with gradients",
        ),
    ],
)
def test_what_cannot_be_recorded_says_what_was_seen(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    script: str,
    code: int,
    told: str,
) -> None:
    with pytest.raises(NotRecorded) as error:
        recorded(tmp_path, script)
    words, said = str(error.value), capfd.readouterr().err
    assert error.value.code == code
    assert told in words
    own = "my last words" in script
    assert own == ("my last words\n" in said)
    assert own != ("gradtide profile trace mypkg.train:build" in words)


@pytest.mark.product(each=6)
@pytest.mark.parametrize(
    "begin",
    [
        'import torch.distributed as dist\ndist.init_process_group("gloo")',
        'rank = int(os.environ["LOCAL_RANK"])',
    ],
)
def test_a_script_for_torchrun_is_run_as_one_rank(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], begin: str
) -> None:
    script = "model = net(64, 8)\ntrain(model, torch.optim.SGD(model.parameters(), 1))"
    step, told = recorded(tmp_path, f"{begin}\n{script}")
    assert (step.numel, told.ranks) == (65 * 8, 1)
    assert capfd.readouterr().err.count("is run again, as one rank of one") == 1


def test_a_script_that_fails_otherwise_is_run_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(NotRecorded, match="exit code 1"):
        recorded(tmp_path, "print('begins')\nraise ValueError('LOW_RANK=3')")
    assert capfd.readouterr().err.count("begins\n") == 1


@pytest.mark.parametrize(
    ("script", "code", "told"),
    [
        ("exit 0", 1, "no Python that it started has imported torch"),
        ("exit 5", 5, "failed with exit code 5"),
        ("kill -9 $$", 137, "ended by signal 9"),
    ],
)
def test_the_command_ends_by_the_code_of_a_program_that_fails(
    script: str, code: int, told: str
) -> None:
    words = ["advise", "--ranks", "4", "--rate", "1gbit", "--", "sh", "-c"]
    done = CliRunner().invoke(app, [*words, script])
    assert done.exit_code == code
    assert f"error: the program {'' if code > 1 else 'ended by itself: '}{told}" in (
        done.output
    )


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--hosts 4 --rate 1gbit", "say what to run, after --"),
        ("--hosts 4 --rate 1gbit -- nowhere.py", "there is no file nowhere.py"),
        ("--hosts 4 --ranks 4 --rate 1gbit -- sh", "leave out one of them"),
        ("--hosts 4 -- sh", "--rate 10gbit"),
        ("--hosts 4 --rate 1gbit --timed 0 -- sh", "more than 0"),
        ("--hosts 4 --rate 1gbit --seconds nan -- sh", "more than 0"),
        ("--hosts 4 --rate 1gbit --schemes daer -- sh", "did you mean 'dear'"),
        ("--hosts 4 --rate 1gbit --trace-out /nowhere/x -- sh", "--trace-out"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_run(words: str, told: str) -> None:
    done = CliRunner().invoke(app, ["advise", *words.split()])
    assert done.exit_code == 2
    assert told in done.output


def test_torchrun_is_started_by_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    done = CliRunner().invoke(
        app, ["advise", "--hosts", "4", "--rate", "1gbit", "--", "sh"]
    )
    assert done.exit_code == 2
    assert "with torchrun after --" in done.output


@pytest.mark.waits
def test_time_is_limited_and_no_process_stays(tmp_path: Path) -> None:
    """A child in a session of its own is found by its environment."""
    script = """
import subprocess
child = subprocess.Popen(["sleep", "100"], start_new_session=True)
open(sys.argv[0] + ".pid", "w").write(str(child.pid))
time.sleep(100)
"""
    with pytest.raises(NotRecorded, match=r"after 20 s: torch was .* --seconds 100"):
        recorded(tmp_path, script, seconds=20)
    pid = int((tmp_path / "train.py.pid").read_text())
    ended = Path(f"/proc/{pid}/stat")
    assert not ended.exists() or ended.read_text().split()[2] == "Z"


@pytest.mark.slow
@pytest.mark.waits
def test_a_script_with_gradtide_already(tmp_path: Path) -> None:
    """One that defers updates goes on as wfbp; one that exchanges steps cannot."""
    script = """
import gradtide, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = net(64, 64, 8)
optimizer = torch.optim.Adam(model.parameters())
sync = gradtide.replicate(model, optimizer, SCHEME)
train(model, optimizer)
"""
    found, _ = recorded(tmp_path, script.replace("SCHEME", "'dear'"))
    assert found.optimizer > 0
    local = "\"topka2a(0.02, schedule='local')\""
    with pytest.raises(NotRecorded, match="have it train by wfbp here"):
        recorded(tmp_path, script.replace("SCHEME", local))


# - Frameworks -------------------------------------------------------------------------

FRAMEWORKS = {
    "transformers": """
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
model = GPT2LMHeadModel(
    GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=64,
               bos_token_id=0, eos_token_id=0)
)
tokens = [torch.randint(64, (8,)) for _ in range(200)]
arguments = TrainingArguments(
    sys.argv[0] + ".out", per_device_train_batch_size=4, report_to=[], use_cpu=True,
    gradient_accumulation_steps=2, disable_tqdm=True,
)
data = [{"input_ids": each, "labels": each} for each in tokens]
Trainer(model, arguments, train_dataset=data).train()
""",
    "accelerate": """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = net(64, 64, 8)
optimizer = torch.optim.AdamW(model.parameters())
data = torch.utils.data.DataLoader(torch.randn(400, 64), batch_size=4)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
for x in data:
    with accelerator.accumulate(model):
        accelerator.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
""",
    "lightning": """
import lightning
class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.first, self.second = net(64, 64), net(64, 8)
    def training_step(self, x, i):
        return self.second(self.first(x)).square().mean()
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())
lightning.Trainer(
    accelerator="cpu", devices=1, max_epochs=1, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, accumulate_grad_batches=2,
).fit(Module(), torch.utils.data.DataLoader(torch.randn(400, 64), batch_size=4))
""",
}


@pytest.mark.slow
@pytest.mark.waits
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_frameworks_train_as_ever(tmp_path: Path, framework: str) -> None:
    pytest.importorskip(framework)
    found, told = recorded(tmp_path, FRAMEWORKS[framework])
    assert (told.passes, told.optimizer, found.steps) == (2, "AdamW", "adam")
    assert found.loss > 0  # the first pass


# - Parts ------------------------------------------------------------------------------


def test_what_is_trained_is_the_outermost_that_was_called() -> None:
    inner, head, other = nn.Linear(2, 2), nn.Linear(2, 1), nn.Linear(2, 2)
    outer, alone = nn.Sequential(inner, nn.Tanh()), nn.Parameter(torch.ones(3))
    wrapper = object.__new__(DistributedDataParallel)
    nn.Module.__init__(wrapper)
    wrapper.module = outer
    called = Called()
    for module in (wrapper, outer, inner, head, other, outer):
        count = called.add(module)
    assert count == 5
    params = [*outer.parameters(), *head.parameters()]
    assert outermost(called, SGD(params, 0.1)) == [outer, head]
    assert whole([outer], SGD(outer.parameters(), 0.1)) is outer
    both = whole([outer, head], SGD([*params, alone], 0.1))
    assert {*both.parameters()} == {*params, alone}
    gone = id(other)
    del other, module
    assert gone not in map(id, called)


def planned(compute: float, rate: float) -> tuple[Advice, StepTrace, Network]:
    units = tuple(Unit(f"w{i}", 10**6, 4, compute, compute, 0.0) for i in range(4))
    trace, network = StepTrace("train.py", units, 0.0), Network.ideal(4, 1, rate)
    return advise(rank(trace, network, {}, tune=False), 4), trace, network


def test_the_answer_begins_with_whether_it_pays() -> None:
    slow, trace, network = planned(0.01, 1e8)
    plain = next(choice for choice in slow.choices if choice.name == "wfbp")
    assert headline(slow).startswith(f"use {slow.recommended.name}: a step about ")
    gain = plain.step / slow.recommended.step
    assert f" {gain:.2g}x sooner than with wfbp" in headline(slow)
    assert headline(planned(1.0, 1e10)[0]).startswith("nothing to gain here over Dist")
    quiet = Told("train.py", ("Net",), "Adam", (), False, 1, 1, 0.0)
    said = answer(slow, trace, network, quiet, ["train.py"])
    assert "gradtide run" not in said
    assert "loading data" not in said
    busy = Told("train.py", ("Net",), "Adam", ("SGD",), True, 2, 4, 1.0)
    said = answer(slow, trace, network, busy, ["torchrun", "train.py"])
    paste = f'gradtide run --scheme "{slow.recommended.text}" -- torchrun train.py'
    assert paste in said
    assert "1000 ms that no recipe shortens" in said
    assert "SGD steps, too" in said
    assert "4 backward passes" in said
    closed = replace(busy, closes=True)
    said = answer(slow, trace, network, closed, ["train.py"])
    assert "calls its closure 4 times" in said


def test_ranks_wait_for_each_other_for_less_than_a_program_may_run() -> None:
    assert PATIENCE < 120


def test_hosts_are_as_many_as_were_asked_for(tmp_path: Path) -> None:
    """Also where a measured network has more than one rank on each."""
    Network.ideal(2, 4, 1e9).save(tmp_path / "net.json")
    place = Place(hosts=6)
    there = Planning.asked(tmp_path / "net.json", place).network
    assert (there.hosts, there.ranks_per_host) == (6, 4)
    there = Planning.asked(
        tmp_path / "net.json", place._replace(ranks_per_host=2)
    ).network
    assert (there.hosts, there.ranks_per_host) == (6, 2)
    there = Planning.asked(None, place._replace(rate="1gbit")).network
    assert (there.hosts, there.ranks_per_host) == (6, 1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--hosts 4 --ranks 4", "leave out one of them"),
        ("--hosts 0", "--hosts 0: 1 or more"),
        ("--hosts 1", "one rank has nobody"),
    ],
)
def test_plan_takes_hosts_as_advise_does(options: str, words: str) -> None:
    where = ["plan", "--trace", "replay:resnet50", "--rate", "1gbit"]
    done = CliRunner().invoke(app, [*where, *options.split()])
    assert done.exit_code == 2
    assert words in done.output
