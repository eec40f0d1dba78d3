"""Sparse exchange on real ranks: the product of collective, schedule, optimizer,
accumulation and clipping; gradients that are not numbers; a run stopped and resumed."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import gradtide
from gradtide.collectives import COLLECTIVES, Dense
from gradtide.runtime.layout import buckets
from gradtide.scheme import Scheme, parse
from tests.conftest import Product
from tests.ranks import run_ranks

SELECTING = [kind for kind in COLLECTIVES if hasattr(kind, "density")]
SPARSE = [kind.__name__ for kind in SELECTING]
YARDSTICKS = [kind.__name__ for kind in SELECTING if "contrib" in kind.__module__]
RECOMMENDED = [name for name in SPARSE if name not in YARDSTICKS]
LOW_RANK = ["PowerSGD", "ACPSGD"]
COARSE = ["COVAP", "DeMo"]  # what they choose is no entry
SCHEDULES = ("SEQUENTIAL", "WFBP", "DEAR")
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-3, foreach=True),
}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 20))


def batch(step: int) -> Tensor:
    rng = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(8, 40, generator=rng)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def train(
    scheme: str,
    optimizer: str = "sgd",
    steps: int = 6,
    accumulate: int = 1,
    max_norm: float | None = None,
) -> Tensor:
    model = network()
    opt = OPTIMIZERS[optimizer](model.parameters())
    sync = gradtide.replicate(model, opt, scheme)
    for step in range(steps):
        with sync.no_sync():
            for part in range(accumulate - 1):
                model(batch(100 + 10 * step + part)).square().mean().backward()
        model(batch(step)).square().mean().backward()
        if max_norm is not None:
            sync.clip_grad_norm_(max_norm)
        opt.step()
        opt.zero_grad()
    sync.remove()
    return weights(model)


def named(collective: str, density: float, schedule: str) -> str:
    size = 2 if collective in LOW_RANK + COARSE else density
    # Two buckets, so that DEAR holds one and the other runs on.
    return (
        f"Scheme({collective}({size}), BySize(0.004, ends=0.001), schedule={schedule})"
    )


@pytest.mark.product(each=12)
@pytest.mark.parametrize(
    ("collective", "size"),
    [*((name, 2) for name in RECOMMENDED), *((name, 3) for name in SPARSE)],
)
def test_the_product_of_features(collective: str, size: int, product: Product) -> None:
    combined = product(OPTIMIZERS, (1, 2), (None, 0.1), other=size > 2)
    schemes = [named(collective, 0.1, schedule) for schedule in SCHEDULES]

    def run() -> list[tuple[Any, list[list[float]]]]:
        results = []
        for number, case in enumerate(combined):
            optimizer, accumulate, max_norm = case
            trained = [
                train(scheme, optimizer, 4, accumulate, max_norm).tolist()
                # To launch after backward means the same for all of them.
                for scheme in schemes[number > 0 :]
            ]
            results.append((case, trained))
        return results

    ranks = run_ranks(size, run)
    for results in zip(*ranks, strict=True):
        case, first = results[0]
        for _, other in results[1:]:
            assert other == first, f"replicas differ: {case}"
        if case[2] is None:  # the norm of a held part is added up in another order
            assert all(schedule == first[0] for schedule in first), case
        for schedule in first[1:]:
            torch.testing.assert_close(
                torch.tensor(schedule), torch.tensor(first[0]), msg=str(case)
            )


def test_where_everything_travels_it_is_the_dense_mean() -> None:
    options = [("sgd", 4, 2, None), ("adamw", 4, 1, 0.1)]

    def run() -> list[list[list[float]]]:
        schemes = ["wfbp", *(named(collective, 1.0, "DEAR") for collective in SPARSE)]
        return [[train(s, *given).tolist() for s in schemes] for given in options]

    for dense, *others in run_ranks(3, run)[0]:
        for collective, everything in zip(SPARSE, others, strict=True):
            torch.testing.assert_close(
                torch.tensor(everything), torch.tensor(dense), msg=collective
            )


@pytest.mark.product(each=6)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gradients_may_be_taken_in_as_they_arrive(schedule: str) -> None:
    def run() -> list[list[float]]:
        trained = []
        for large in (buckets.LARGE, 1):
            buckets.LARGE = large  # type: ignore[attr-defined]
            for scheme in ("OkTopk", "PartitionedTopK", "TopKA2A"):
                weights = train(named(scheme, 0.1, schedule), "sgd", 5, 2)
                trained.append(weights.tolist())
        return trained

    for together in run_ranks(2, run):
        assert together[:3] == together[3:]


def poisoned(scheme: str, scaled: bool) -> str | list[float]:
    """Train with a NaN on rank 1 in step 2: the error, or the weights."""
    model = network()
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    sync = gradtide.replicate(model, opt, scheme)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=scaled)
    try:
        for step in range(6):
            loss = model(batch(step)).square().mean()
            if step == 2 and dist.get_rank() == 1:
                loss = loss + model[2].weight[3, 4] * math.nan
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
        sync.flush()
    except RuntimeError as error:
        return str(error)
    return weights(model).tolist()


@pytest.mark.product(each=6)
@pytest.mark.parametrize("collective", SPARSE + LOW_RANK)
def test_nan_is_refused_by_name_or_skipped_everywhere(collective: str) -> None:
    schemes = [named(collective, 0.05, s) for s in ("WFBP", "DEAR", "LOCAL")]

    def both() -> list[Any]:
        return [[poisoned(s, scaled=yes) for yes in (True, False)] for s in schemes]

    ranks = run_ranks(2, both)
    for scheme, first, *others in zip(schemes, *ranks, strict=True):
        for weights, message in (first, *others):
            assert isinstance(weights, list), (scheme, weights)
            assert all(map(math.isfinite, weights)), scheme
            assert weights == first[0], scheme
            assert "2.weight" in message, scheme
            assert "rank 1" in message, scheme


def resumed(scheme: str, through: Callable[[dict[str, Any]], dict[str, Any]]) -> bool:
    """Whether a run that was stopped ends where one does that was not."""

    def start() -> tuple[nn.Module, torch.optim.Optimizer, gradtide.Replica]:
        model = network()
        opt = OPTIMIZERS["adamw"](model.parameters())
        return model, opt, gradtide.replicate(model, opt, scheme)

    def go(model: Any, opt: Any, steps: range) -> None:
        for step in steps:
            model(batch(step)).square().mean().backward()
            opt.step()
            opt.zero_grad()

    model, opt, sync = start()
    go(model, opt, range(4))
    saved = through(
        {
            "model": model.state_dict(),
            "optimizer": opt.state_dict(),
            "sync": sync.state_dict(),
        }
    )
    go(model, opt, range(4, 9))
    sync.flush()
    fresh, fresh_opt, fresh_sync = start()
    fresh.load_state_dict(saved["model"])
    fresh_opt.load_state_dict(saved["optimizer"])
    fresh_sync.load_state_dict(saved["sync"])
    go(fresh, fresh_opt, range(4, 9))
    fresh_sync.flush()
    return torch.equal(weights(model), weights(fresh))


def by_torch_save(state: dict[str, Any]) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)  # type: ignore[no-any-return]


@pytest.mark.product(each=12)
@pytest.mark.parametrize("collective", SPARSE + LOW_RANK + COARSE)
def test_a_resumed_run_is_the_same_run(collective: str) -> None:
    schemes = [named(collective, 0.05, schedule) for schedule in ("WFBP", "DEAR")]

    def run() -> list[bool]:
        return [resumed(scheme, by_torch_save) for scheme in schemes]

    assert all(map(all, run_ranks(2, run)))


@pytest.mark.filterwarnings("ignore")  # torch's own deprecations
def test_distributed_checkpoints_keep_every_ranks_remainder(tmp_path: Any) -> None:
    scheme = named("TopK", 0.05, "WFBP")

    def by_dcp(state: dict[str, Any]) -> dict[str, Any]:
        dcp.save({"sync": state["sync"]}, checkpoint_id=tmp_path)
        model = network()
        opt = OPTIMIZERS["adamw"](model.parameters())
        sync = gradtide.replicate(model, opt, scheme)
        read = {"sync": sync.state_dict()}
        dcp.load(read, checkpoint_id=tmp_path)
        return {**by_torch_save(state), **read}

    assert all(run_ranks(2, lambda: resumed(scheme, by_dcp)))


def test_another_number_of_ranks_keeps_the_sum_of_the_remainders() -> None:
    scheme = named("TopK", 0.05, "WFBP")

    def left() -> bytes:
        model = network()
        opt = torch.optim.SGD(model.parameters(), lr=0.05)
        sync = gradtide.replicate(model, opt, scheme)
        model(batch(0)).square().mean().backward()
        buffer = io.BytesIO()
        torch.save(sync.state_dict(), buffer)
        return buffer.getvalue()

    saved = [torch.load(io.BytesIO(state)) for state in run_ranks(3, left)]
    together = {key: value for state in saved for key, value in state.items()}

    def total(states: list[Any], size: int) -> dict[str, Tensor]:
        rows = [states[r][f"rank{r}"]["remainders"] for r in range(size)]
        return {name: sum(row[name] for row in rows) for name in rows[0]}  # type: ignore[misc]

    def taken_over() -> tuple[bytes, str]:
        model = network()
        opt = torch.optim.SGD(model.parameters(), lr=0.05)
        sync = gradtide.replicate(model, opt, scheme)
        with pytest.raises(ValueError, match="needs those of") as caught:
            sync.load_state_dict({"world_size": 3, "order": None, "scheme": ""})
        sync.load_state_dict(together)
        buffer = io.BytesIO()
        torch.save(sync.state_dict(), buffer)
        return buffer.getvalue(), str(caught.value)

    after = [torch.load(io.BytesIO(state)) for state, _ in run_ranks(2, taken_over)]
    expected, found = total(saved, 3), total(after, 2)
    assert any(bool(value.any()) for value in expected.values())
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)


def test_recipes_are_sparse_or_dense() -> None:
    assert isinstance(parse("oktopk(0.001)"), Scheme)
    assert not isinstance(parse("oktopk(schedule='dear')").collective, Dense)
