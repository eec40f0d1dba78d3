"""Replica.metrics(): what every number says, on real ranks; and the example with it."""

from __future__ import annotations

import importlib.util
import io
import math
import os
import re
import runpy
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import gradtide
from gradtide.integrations.metrics import progress
from tests.ranks import run_ranks

EXAMPLES = Path(__file__).parents[1] / "examples"
SMALL = "fusion=BySize(0.004, 0.001, 1)"  # several buckets for a small model
SCHEMES = {
    "dense": f"Scheme(Dense(), {SMALL})",
    "dense-dear": f"Scheme(Dense(), {SMALL}, schedule=DEAR)",
    "sparse": f"Scheme(OkTopk(0.05), {SMALL})",
    "sparse-dear": f"Scheme(OkTopk(0.05), {SMALL}, schedule=DEAR)",
    "steps": f"Scheme(TopKA2A(0.05), {SMALL}, schedule=LOCAL)",
}
NUMEL = 1604  # of the model below, and every tensor's is even


def network() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)
    )


def loss_of(model: nn.Module, step: int) -> Tensor:
    rng = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    x, y = torch.randn(6, 12, generator=rng), torch.randint(0, 4, (6,), generator=rng)
    return cross_entropy(model(x), y)


def weights(model: nn.Module) -> list[float]:
    return nn.utils.parameters_to_vector(model.parameters()).tolist()


Logged = tuple[list[dict[str, float]], float, list[float]]


def train(scheme: str, log: bool = True, residual: bool = False) -> Logged:
    """Metrics after every of five steps, the seconds they took, and the weights."""
    model = network()
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sync = gradtide.replicate(model, opt, scheme)
    seen, begin = [], time.perf_counter()
    for step in range(5):
        loss_of(model, step).backward()
        opt.step()
        opt.zero_grad()
        if log:
            seen.append(sync.metrics(residual=residual))
        if step == 2:
            sync.engine.telemetry.clear()  # as the lab does: no number gets negative
    seconds = time.perf_counter() - begin
    again = sync.metrics(residual=True)
    sync.remove()
    return [*seen, again], seconds, weights(model)


def documented() -> list[str]:
    return re.findall(r"- `(\w+)`:", gradtide.Replica.metrics.__doc__ or "")


@pytest.mark.parametrize("name", SCHEMES)
def test_numbers_of_a_training(name: str) -> None:
    dense = name.startswith("dense")
    for (*seen, last), seconds, _ in run_ranks(2, train, SCHEMES[name]):
        assert [numbers["step"] for numbers in seen] == [1, 2, 3, 4, 5]
        assert list(last) == documented()
        for numbers in seen:
            assert list(numbers) == documented()[:-2]
            assert all(type(x) in (int, float) for x in numbers.values())
            assert all(math.isfinite(x) and x >= 0 for x in numbers.values())
            assert numbers["skipped_steps"] == 0
        whole = [sum(numbers[key] for numbers in seen) for key in documented()[:4]]
        assert 0 < whole[1] < seconds
        assert 0 < whole[2] < seconds
        # With two ranks a dense exchange sends every element once; then come flags.
        sent = sum(numbers["sent_bytes"] for numbers in (*seen, last))
        assert (sent >= 5 * 4 * NUMEL) == dense
        assert sent < 5 * (4 * NUMEL + 500)
        for numbers in seen:
            if dense:
                assert numbers["density"] == 1
            else:
                assert 0.01 < numbers["density"] < 0.1
        assert (last["residual_norm"] > 0) == (not dense)
        assert last["waiting_norm"] == 0
        assert last["step"] == 5


@pytest.mark.product
@pytest.mark.parametrize("name", SCHEMES)
def test_no_number_of_the_training_changes(name: str) -> None:
    def all_three() -> list[list[float]]:
        scheme = SCHEMES[name]
        return [
            train(scheme, log=False)[2],
            train(scheme)[2],
            train(scheme, residual=True)[2],
        ]

    for plain, logged, thorough in run_ranks(2, all_three):
        assert plain == logged == thorough


def test_a_second_call_has_nothing_new() -> None:
    def twice() -> list[dict[str, float]]:
        model = network()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = gradtide.replicate(model, opt, SCHEMES["sparse"])
        fresh = sync.metrics()
        loss_of(model, 0).backward()
        opt.step()
        return [fresh, sync.metrics(), sync.metrics()]

    for fresh, one, two in run_ranks(2, twice):
        assert not any(fresh.values())  # what rank 0 sends at first does not count
        assert two == {
            **one,
            "exposed_seconds": 0,
            "exchange_seconds": 0,
            "sent_bytes": 0,
        }


def test_the_residuals_norm_is_that_of_what_was_not_selected() -> None:
    def one_step() -> tuple[float, float]:
        model = network()
        loss_of(model, 0).backward()
        own = torch.cat([p.grad.flatten() for p in model.parameters()])
        model.zero_grad()
        k = round(0.05 * NUMEL)
        kept = own.abs().topk(NUMEL - k, largest=False).values
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        whole = "fusion=BySize(25.0, ends=25.0, pieces=1)"
        scheme = f"Scheme(TopK(0.05, Exact()), {whole})"
        sync = gradtide.replicate(model, opt, scheme)
        loss_of(model, 0).backward()
        opt.step()
        return sync.metrics(residual=True)["residual_norm"], float(kept.norm())

    for found, expected in run_ranks(2, one_step):
        assert found == pytest.approx(expected, rel=1e-5)
        assert expected > 0


def test_the_residual_is_refused_while_gradients_are_on_their_way() -> None:
    def between() -> list[str]:
        model = network()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = gradtide.replicate(model, opt, SCHEMES["sparse-dear"])
        refused = []
        for step in range(3):
            loss_of(model, step).backward()
            sync.metrics()
            if step:  # the first step is recorded, and not deferred
                with pytest.raises(RuntimeError, match="call it after"):
                    sync.metrics(residual=True)
                refused.append("between")
            opt.step()
            opt.zero_grad()
        sync.remove()
        return refused

    assert run_ranks(2, between) == [["between"] * 2] * 2


# - Waiting ----------------------------------------------------------------------------

NAP, LATE = 0.3, 1  # seconds, and the rank that sleeps so long in each step


def waited(scheme: str, nap: float) -> float:
    """Seconds that a step has waited, of four, after those that find out orders."""
    model = network()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = gradtide.replicate(model, opt, scheme)
    for step in range(7):
        if step == 3:
            sync.flush()
            sync.metrics()
        if dist.get_rank() == LATE:
            time.sleep(nap)
        loss_of(model, step).backward()
        opt.step()
        opt.zero_grad()
    sync.flush()
    seconds = sync.metrics()["exposed_seconds"]
    sync.remove()
    return seconds / 4


def with_and_without_naps(scheme: str) -> tuple[float, float]:
    """The first as it is where nothing else keeps ranks waiting: the less of two."""
    prompt = min(waited(scheme, 0.0), waited(scheme, 0.0))
    return prompt, waited(scheme, NAP)


@pytest.mark.product
@pytest.mark.waits
@pytest.mark.parametrize("name", SCHEMES)
def test_who_waits_for_a_late_rank_and_who_is_late_is_told(name: str) -> None:
    found = run_ranks(3, with_and_without_naps, SCHEMES[name])
    more = [late - prompt for prompt, late in found]
    assert more.pop(LATE) <= NAP / 3  # a busy machine has it wait without naps, too
    assert more == pytest.approx([NAP] * 2, abs=NAP / 3)
    whole = [late for _, late in found]
    assert whole.index(min(whole)) == LATE


# - Steps that are skipped -------------------------------------------------------------


def skipped(scheme: str, to_none: bool) -> list[float]:
    """The count after every step, with infinite gradients in steps 1 and 3."""
    model = network()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = gradtide.replicate(model, opt, scheme)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    counts = []
    for step in range(6):
        loss = loss_of(model, step)
        if step in (1, 3) and dist.get_rank() == 1:
            loss = loss * math.inf
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad(set_to_none=to_none)
        counts.append(sync.metrics()["skipped_steps"])
    assert sync.metrics()["step"] == 4
    return counts


@pytest.mark.product
@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("name", SCHEMES)
def test_what_a_scaler_skips_is_counted_by_the_next_backward(
    name: str, to_none: bool
) -> None:
    for counts in run_ranks(2, skipped, SCHEMES[name], to_none):
        assert counts == [0, 0, 1, 1, 2, 2]


def test_gradients_that_are_added_up_are_not_skipped() -> None:
    def accumulate() -> list[float]:
        counts = []
        for quiet in (True, False):
            model = network()
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            sync = gradtide.replicate(model, opt, SCHEMES["dense"])
            for step in range(3):
                if quiet:
                    with sync.no_sync():
                        loss_of(model, 2 * step).backward()
                else:
                    loss_of(model, 2 * step).backward()
                loss_of(model, 2 * step + 1).backward()
                opt.step()
                opt.zero_grad()
            counts.append(sync.metrics()["skipped_steps"])
            loss_of(model, 0).backward()
            opt.zero_grad()  # and no step
            with sync.no_sync():
                loss_of(model, 1).backward()
            loss_of(model, 2).backward()
            counts.append(sync.metrics()["skipped_steps"])
        return counts

    assert run_ranks(2, accumulate) == [[0, 1, 0, 1]] * 2


def test_what_a_closure_evaluates_is_not_skipped() -> None:
    def line_search() -> list[float]:
        model = network()
        opt = torch.optim.LBFGS(model.parameters(), max_iter=4)
        sync = gradtide.replicate(model, opt, SCHEMES["dense"])
        for step in range(2):

            def closure(step: int = step) -> Tensor:
                opt.zero_grad()
                loss = loss_of(model, step)
                loss.backward()
                return loss

            opt.step(closure)
        numbers = sync.metrics()
        return [numbers["step"], numbers["skipped_steps"]]

    assert run_ranks(2, line_search) == [[2, 0]] * 2


# - The examples -----------------------------------------------------------------------


class Writer:
    """As TensorBoard's; `written` are all that was logged."""

    written: list[tuple[str, float, int]] = []  # noqa: RUF012
    closed = 0

    def __init__(self, folder: str) -> None:
        assert folder.startswith("out/")

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.written.append((name, value, step))

    def close(self) -> None:
        Writer.closed += 1


def example(name: str, stands_in: dict[str, Any]) -> str:
    """What a rank prints, with these modules in the place of those installed."""
    sys.modules.update(stands_in)
    dist.init_process_group = lambda backend: None  # there is one
    dist.destroy_process_group = lambda: None
    out = io.StringIO()
    with redirect_stdout(out), redirect_stderr(out):
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return out.getvalue()


def tensorboard(installed: bool) -> str | list[tuple[str, float, int]]:
    module = SimpleNamespace(SummaryWriter=Writer) if installed else None
    said = example("log_metrics.py", {"torch.utils.tensorboard": module})
    assert Writer.closed == installed
    return Writer.written if installed else said


def test_the_example_logs_to_tensorboard() -> None:
    for written in run_ranks(2, tensorboard, True):
        names = {name for name, _, _ in written}
        assert names == {"loss", *documented()[:-2]}
        assert [step for name, _, step in written if name == "loss"] == [*range(1, 61)]


def test_the_example_prints_without_tensorboard() -> None:
    one, two = run_ranks(2, tensorboard, False)
    assert one.count("sent_bytes: ") == 60
    assert not two


Rows = list[tuple[Any, Any]]


def wandb() -> Rows:
    """What a rank logs to W&B, whose calls these are."""
    rows: Rows = []

    def init(*, project: str, config: dict[str, Any]) -> Any:
        rows.append((project, config))
        return SimpleNamespace(
            log=lambda data, step=None, commit=None: rows.append((data, step)),
            finish=lambda exit_code=None: rows.append(("end", exit_code)),
        )

    example("log_wandb.py", {"wandb": SimpleNamespace(init=init)})
    return rows


def mlflow() -> Rows:
    """What a rank logs to MLflow, whose calls these are."""
    rows: Rows = []
    module = SimpleNamespace(
        start_run=lambda: None,
        log_params=lambda params: rows.append(("gradtide", params)),
        log_metrics=lambda metrics, step=None: rows.append((metrics, step)),
        end_run=lambda status="FINISHED": rows.append(("end", None)),
    )
    example("log_mlflow.py", {"mlflow": module})
    return rows


@pytest.mark.parametrize("logger", [wandb, mlflow])
def test_one_rank_logs_a_run(logger: Callable[[], Rows]) -> None:
    (begin, *rows, end), others = run_ranks(2, logger)
    assert not others
    assert begin[1]["ranks"] == 2
    assert end[0] == "end"
    assert [numbers["step"] for numbers, _ in rows] == [*range(1, 21)]
    for numbers, step in rows:
        assert step in (None, numbers["step"])
        assert set(numbers) == {"loss", *documented()[:-2]}  # but for norms
        assert all(type(value) in (int, float) for value in numbers.values())


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_the_example_runs_with_the_package(name: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")

    def work() -> None:
        os.chdir(tmp_path)
        os.environ.update(WANDB_MODE="offline")
        os.environ.update(MLFLOW_TRACKING_URI=f"sqlite:///{tmp_path}/runs.db")
        example(f"log_{name}.py", {})

    run_ranks(2, work)
    assert any(tmp_path.iterdir())


def test_the_example_shows_how_training_gets_on() -> None:
    one, two = run_ranks(2, example, "log_progress.py", {})
    *_, last = one.splitlines()
    number = r"[\d.e+-]+"
    assert re.fullmatch(
        rf"batch 20/20, {number} a second, {number} ms exposed, {number} MB sent, "
        rf"density {number}",
        last,
    )
    assert not two


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_progress_line_is_written_over_and_ends_with_the_loop() -> None:
    def leave_early() -> str:
        model = network()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = gradtide.replicate(model, opt, SCHEMES["dense"])
        out = Terminal()
        for step in progress(iter(range(5)), sync, 0.0, out):
            loss_of(model, step).backward()
            opt.step()
            opt.zero_grad()
            if step == 3:
                break
        return out.getvalue()

    one, two = run_ranks(2, leave_early)
    lines = one.removesuffix("\n").split("\x1b[K")
    assert [text[:9] for text in lines] == [f"\rbatch {n}," for n in (1, 2, 3)] + [""]
    assert not two


@pytest.mark.parametrize("name", sorted(p.name for p in EXAMPLES.glob("log_*.py")))
def test_the_examples_are_short_and_can_be_copied(name: str) -> None:
    text = (EXAMPLES / name).read_text()
    assert len(text.splitlines()) <= 40
    assert "gradtide.lab" not in text
