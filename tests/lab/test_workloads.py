"""The computed workloads: contracts, counts, and that they really learn."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from gradtide.lab.workloads import WORKLOADS, Workload, build, gpt

COMPUTED = ["gpt", "gpt-small", "digits", "mlp", "tiny600"]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As in the lab, and deterministic."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def train(workload: Workload, num_steps: int) -> list[float]:
    schedule = workload.scheduler and workload.scheduler(workload.optimizer)
    losses = []
    for step in range(num_steps):
        loss = workload.loss(workload.model, workload.batch(step))
        loss.backward()
        if workload.max_norm is not None:
            nn.utils.clip_grad_norm_(workload.model.parameters(), workload.max_norm)
        workload.optimizer.step()
        workload.optimizer.zero_grad()
        if schedule:
            schedule.step()
        losses.append(loss.item())
    return losses


@pytest.mark.product
@pytest.mark.parametrize(
    ("name", "num_parameters", "num_tensors"),
    [
        ("gpt", 2_779_584, 40),
        ("gpt-small", 393_888, 22),
        ("digits", 9_978, 8),
        ("mlp", 3_159_050, 8),
        ("tiny600", 316_800, 600),
    ],
)
def test_counts(name: str, num_parameters: int, num_tensors: int) -> None:
    parameters = list(build(name, rank=0, size=2).model.parameters())
    assert len(parameters) == num_tensors
    assert sum(p.numel() for p in parameters) == num_parameters


@pytest.mark.parametrize("name", COMPUTED)
def test_ranks_share_the_model_but_not_the_data(name: str) -> None:
    first, second = (build(name, rank=rank, size=2, seed=3) for rank in (0, 1))
    states = first.model.state_dict(), second.model.state_dict()
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    assert not torch.equal(first.batch(0)[0], second.batch(0)[0])
    other = build(name, rank=0, size=2, seed=4)
    weights = next(first.model.parameters()), next(other.model.parameters())
    assert not torch.equal(*weights)


@pytest.mark.parametrize("name", COMPUTED)
def test_batch_is_a_pure_function_of_seed_rank_and_step(name: str) -> None:
    first, second = (build(name, rank=1, size=2, batch_size=4) for _ in range(2))
    late = first.batch(7)
    assert not torch.equal(first.batch(6)[0], late[0])
    for tensor, again in zip(late, second.batch(7), strict=True):
        assert torch.equal(tensor, again)
    assert len(late[0]) == 4


@pytest.mark.product
@pytest.mark.parametrize("name", COMPUTED)
def test_global_random_state_is_left_alone(name: str) -> None:
    before = torch.get_rng_state()
    workload = build(name, rank=0, size=2, batch_size=2)
    workload.loss(workload.model, workload.batch(0)).backward()
    assert workload.evaluate is not None
    workload.evaluate(workload.model)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.product
@pytest.mark.parametrize("name", COMPUTED)
def test_evaluation_is_deterministic_and_restores_the_mode(name: str) -> None:
    workload = build(name, rank=0, size=2)
    assert workload.evaluate is not None
    scores = workload.evaluate(workload.model)
    assert scores == workload.evaluate(workload.model)
    assert scores["loss"] > 0
    assert all(module.training for module in workload.model.modules())


@pytest.mark.slow
def test_gpt_learns() -> None:
    workload = build("gpt", rank=0, size=1, batch_size=2)
    losses = train(workload, 30)
    assert losses[0] == pytest.approx(5.55, abs=0.3)  # log 256: knows nothing
    assert sum(losses[-5:]) / 5 < 3.8


def test_gpt_has_no_biases_and_clips() -> None:
    workload = build("gpt", rank=0, size=1)
    assert not [n for n, _ in workload.model.named_parameters() if "bias" in n]
    assert workload.max_norm == 1.0


def test_gpt_decays_matrices_only() -> None:
    matrices, others = build("gpt", rank=0, size=1).optimizer.param_groups
    assert matrices["weight_decay"] == 0.1
    assert others["weight_decay"] == 0.0
    assert {p.dim() for p in matrices["params"]} == {2}
    assert {p.dim() for p in others["params"]} == {1}


def test_gpt_warms_up_then_decays() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = gpt.warm_up_cosine(optimizer)
    rates = []
    for _ in range(gpt.DECAY_STEPS + 10):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert rates[0] == pytest.approx(1 / gpt.WARM_UP_STEPS)
    assert max(rates) == rates[gpt.WARM_UP_STEPS] == 1.0
    assert rates[-1] == pytest.approx(gpt.FINAL_RATE)


def test_text_is_split_and_bounded() -> None:
    train_text, held_out = gpt.corpus(max_bytes=1_000_000)
    assert len(train_text) + len(held_out) == 1_000_000
    assert len(train_text) > 4 * len(held_out) > 0
    x, y = gpt.sample(train_text, seed=0, rank=0, size=3, step=0)
    assert x.shape == y.shape == (3, gpt.BLOCK)
    assert torch.equal(x[:, 1:], y[:, :-1])


def test_digits_learn() -> None:
    workload = build("digits", rank=0, size=1)
    train(workload, 60)
    assert workload.evaluate is not None
    assert workload.evaluate(workload.model)["accuracy"] > 0.85


def test_digits_give_every_image_to_one_rank_an_epoch() -> None:
    ranks = [build("digits", rank=rank, size=3, batch_size=50) for rank in range(3)]
    num_steps = 1437 // 150
    parts = [w.batch(step)[0] for step in range(num_steps) for w in ranks]
    images = torch.cat(parts).flatten(1)
    assert len(images) == len(torch.unique(images, dim=0)) == 150 * num_steps


def test_digits_have_buffers() -> None:
    assert list(build("digits", rank=0, size=1).model.buffers())


def test_digits_need_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ValueError, match=r"pip install 'gradtide\[lab\]'"):
        build("digits", rank=0, size=1)


def test_tiny600_has_small_tensors_only_and_learns() -> None:
    workload = build("tiny600", rank=0, size=1)
    assert max(p.numel() for p in workload.model.parameters()) == 1024
    losses = train(workload, 30)
    assert losses[-1] < 0.7 * losses[0]


def test_mlp_learns() -> None:
    losses = train(build("mlp", rank=0, size=1), 60)
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "resnet"}, "choose one of gpt, gpt-small"),
        ({"name": "mlp", "rank": 2}, "rank 2 of 2"),
        ({"name": "mlp", "step_ms": 3.0}, "really computes"),
        ({"name": "mlp", "batch_size": 0}, "1 or more"),
        ({"name": "digits", "batch_size": 1000}, "at most 718"),
        ({"name": "replay:gpt2", "batch_size": 4}, "step_ms"),
        ({"name": "replay:gpt2", "step_ms": -1.0}, "milliseconds"),
    ],
)
def test_mistakes_are_explained(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(**{"rank": 0, "size": 2, **arguments})  # type: ignore[arg-type]


def test_names_are_unique() -> None:
    assert len(set(WORKLOADS)) == len(WORKLOADS) == 12
