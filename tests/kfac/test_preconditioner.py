"""K-FAC on real ranks: models and habits of users, bytes, and what is refused."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.kfac.test_product import KFACS, batch, network, scheme, train
from tests.ranks import run_ranks
from tests.test_replica import (
    Attention,
    Backwards,
    Branches,
    Checkpointed,
    Shared,
    frozen,
)
from torch import nn
from torch.nn.functional import cross_entropy

import gradtide
from gradtide.kfac import parts
from gradtide.kfac.invert import Eigen
from gradtide.scheme import parse


def normed() -> nn.Module:
    """With buffers, which are broadcast in every forward, and a grouped convolution."""
    return nn.Sequential(
        nn.Unflatten(1, (4, 3)), nn.Conv1d(4, 8, 3, padding="same", groups=2),
        nn.BatchNorm1d(8), nn.Flatten(), nn.Linear(24, 4),
    )  # fmt: skip


MODELS = {
    "branches": Branches,
    "shared": Shared,
    "checkpointed": lambda: Checkpointed(False),
    "re-entrant": lambda: Checkpointed(True),
    "attention": Attention,
    "backwards": Backwards,
    "frozen": frozen,
    "normed": normed,
}


@pytest.mark.slow
@pytest.mark.parametrize("turn", range(2))
def test_models_of_users(turn: int) -> None:
    """Each model with two of three ways to distribute K-FAC."""
    kfacs = ("spd", "pad-half", "dp")
    pairs = [(name, kfacs[(i + turn) % 3]) for i, name in enumerate(MODELS)]

    def seeded(name: str) -> nn.Module:
        torch.manual_seed(5)
        model: nn.Module = MODELS[name]()
        return model

    def run() -> list[tuple[str, list[list[float]]]]:
        return [
            (
                f"{name} {kfac}",
                [
                    train(
                        scheme("Dense()", KFACS[kfac], schedule),
                        steps=4,
                        make=lambda name=name: seeded(name),
                    )
                    for schedule in ("WFBP", "DEAR")
                ],
            )
            for name, kfac in pairs
        ]

    for results in zip(*run_ranks(2, run), strict=True):
        name, (wfbp, dear) = results[0]
        assert results[1] == results[0], f"{name}: replicas differ"
        assert wfbp == dear, name
        assert all(map(math.isfinite, wfbp)), name


def scaled(text: str, scale: float | None, poison: int = -1) -> list[float]:
    """Parameters after some steps; in step `poison` rank 1 has an infinite loss."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 4))
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=scale or 1.0, enabled=scale is not None, growth_interval=3
    )
    sync = gradtide.replicate(model, opt, text, grad_scaler=scaler)
    for step in range(6):
        x, y = batch(step, dist.get_rank())
        loss = cross_entropy(model(x), y)
        if step == poison and dist.get_rank() == 1:
            loss = loss * math.inf
        scaler.scale(loss).backward()
        if step % 2:
            scaler.unscale_(opt)
            sync.clip_grad_norm_(0.5)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    sync.remove()
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


def test_loss_scaling_changes_nothing_and_bad_steps_are_skipped() -> None:
    def run() -> list[list[list[float]]]:
        return [
            [
                scaled(scheme("Dense()", KFACS[kfac], schedule), *how)
                for schedule in ("WFBP", "DEAR")
                for how in ((None,), (1024.0,), (1024.0, 2), (1024.0, 0))
            ]
            for kfac in ("pad", "dp")
        ]

    ranks = run_ranks(2, run)
    assert ranks[0] == ranks[1]
    for plain, by_1024, late, first, *dear in (map(torch.tensor, r) for r in ranks[0]):
        torch.testing.assert_close(by_1024, plain, rtol=1e-4, atol=1e-5)
        assert late.isfinite().all()
        assert first.isfinite().all()
        for own, other in zip((plain, by_1024, late, first), dear, strict=True):
            torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5)


def test_habits() -> None:
    """Two forwards before a backward, gradients read, dropped steps, other groups."""

    def habits(text: str) -> list[float]:
        torch.manual_seed(0)
        model = normed()
        opt = torch.optim.SGD(
            [
                {"params": list(model[1].parameters()), "lr": 0.01},
                {"params": [*model[2].parameters(), *model[4].parameters()]},
            ],
            lr=0.05,
        )
        sync = gradtide.replicate(model, opt, text, buffers="local")
        for step in range(8):
            x, y = batch(step, dist.get_rank())
            loss = cross_entropy(model(x), y)
            if step in (3, 6):
                loss = loss + model(2 * x).square().mean()
            loss.backward()
            if step == 4:
                sync.gather_gradients()
                assert all(p.grad is not None for p in model.parameters())
            if step != 5:
                opt.step()
            opt.zero_grad()
            if step == 6:
                with torch.no_grad():
                    model.eval()(x)
                model.train()
        sync.remove()
        return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()

    def run() -> list[list[float]]:
        return [
            habits(scheme("Dense()", KFACS[kfac], schedule))
            for kfac in ("mpd", "spd", "pad-half", "dp-seldom")
            for schedule in ("WFBP", "DEAR")
        ]

    ranks = run_ranks(2, run)
    assert ranks[0] == ranks[1]
    for wfbp, dear in zip(ranks[0][::2], ranks[0][1::2], strict=True):
        assert wfbp == dear


def traffic(text: str) -> Counter[str]:
    """Payload bytes of this rank by kind of bucket, over three steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 150), *(nn.Linear(150, 150) for _ in range(3)))
    opt = torch.optim.SGD(model.parameters(), lr=1e-4)
    sync = gradtide.replicate(model, opt, text)
    for step in range(3):
        model(batch(step, dist.get_rank())[0]).square().mean().backward()
        opt.step()
        opt.zero_grad()
    sent: Counter[str] = Counter()
    for record in sync.engine.telemetry.records:
        sent[record.bucket.rstrip("0123456789")] += record.payload_bytes
    sync.remove()
    return sent


def test_bytes_of_factors() -> None:
    names = ("mpd", "spd", "pad", "dp")
    ranks = run_ranks(4, lambda: [traffic(f"{name}_kfac") for name in names])
    mpd, spd, pad, dp = (
        sum(rank[i]["kfac.A"] + rank[i]["kfac.G"] for rank in ranks) for i in range(4)
    )
    assert spd == mpd
    assert pad <= 0.55 * mpd
    assert dp == 0
    assert sum(rank[3]["kfac.inverse"] for rank in ranks) == 0


def test_fusion_and_owners_are_planned_after_the_first_backward() -> None:
    def run(text: str) -> list[object]:
        model = network()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = gradtide.replicate(model, opt, text)
        assert sync.kfac is not None
        found: list[object] = [sync.kfac.costs.ready]
        for step in range(3):
            x, y = batch(step, dist.get_rank())
            cross_entropy(model(x), y).backward()
            found += [sync.kfac.costs.ready, sync.kfac.placed]
            opt.step()
            opt.zero_grad()
        names = [bucket.name for bucket in sync.kfac.factors]
        sync.remove()
        return [*found, names]

    named = ("pad_kfac(", "pad_kfac(workers=1.0, ", "pad_kfac(workers=0.5, ")
    planned = [
        f"{name}placement='measured')"
        for name in (*named, "spd_kfac(schedule='dear', ")
    ]
    texts = [*planned, "mpd_kfac(placement='measured')", "pad_kfac"]
    first, second = run_ranks(2, lambda: [run(text) for text in texts])
    assert first == second
    for before, after, placed, again, still, *_, names in first[: len(planned)]:
        assert before == ()
        assert len(after) == len(placed.messages) == 6
        assert after == again
        assert placed == still
        assert len(names) == len(set(placed.messages))
        assert max(after[:3]) < min(after[3:])  # forward, and then backward
    for before, after, *_ in first[len(planned) :]:
        assert before == after == ()


def test_two_runs_are_equal_to_the_bit() -> None:
    """Whatever inversions take: here what is small takes longest in the second run."""

    def run(turned: bool) -> list[object]:
        if turned:
            parts.estimate_inverses = lambda dims, *_: {d: 1.0 / d for d in dims}
        found: list[object] = []
        for recipe in (
            "mpd_kfac",
            "spd_kfac",
            "pad_kfac",
            "pad_kfac(schedule='dear')",
            "dp_kfac",
        ):
            model = network()
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            sync = gradtide.replicate(model, opt, recipe)
            for step in range(4):
                x, y = batch(step, dist.get_rank())
                cross_entropy(model(x), y).backward()
                opt.step()
                opt.zero_grad()
            assert sync.kfac is not None
            found += [
                sync.kfac.placed,
                [bucket.name for bucket in sync.kfac.factors],
            ]
            sync.remove()
            found += [p.tolist() for p in model.parameters()]
        return found

    assert run_ranks(2, run, False) == run_ranks(2, run, True)


@pytest.mark.parametrize("kfac", ["mpd", "spd-eigen"])
def test_ranks_use_the_same_inverses_down_to_their_layout(kfac: str) -> None:
    """A product of transposed memory is rounded differently, for some shapes only."""

    def run() -> list[object]:
        model = network()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = gradtide.replicate(model, opt, scheme("Dense()", KFACS[kfac], "WFBP"))
        cross_entropy(model(batch(0, 0)[0]), batch(0, 0)[1]).backward()
        opt.step()
        assert sync.kfac is not None
        found: list[object] = []
        for curvature in sync.kfac.curvatures.values():
            assert set(curvature.current) == {"A", "G"}
            for one in curvature.current.values():
                matrix = one.vectors if isinstance(one, Eigen) else one
                found += [matrix.stride(), matrix.tolist()]
        return found

    first, second = run_ranks(2, run)
    assert first == second


BAD = {
    "KFAC('kaisa')": "distribution",
    "KFAC('mpd', damping=0.0)": "damping",
    "KFAC('mpd', decay=1.0)": "decay",
    "KFAC('mpd', kl_clip=0)": "kl_clip",
    "KFAC('mpd', factor_every=3, inverse_every=4)": "multiple",
    "KFAC('mpd', workers=1.5)": "workers",
    "KFAC('dp', workers=0.5)": "worker",
    "KFAC('pad', wire='fp16')": "wire",
}


@pytest.mark.parametrize(("text", "word"), BAD.items())
def test_bad_hyper_parameters_are_refused(text: str, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        parse(f"Scheme(preconditioner={text})")


def test_a_recipe_takes_hyper_parameters_and_its_repr_parses() -> None:
    scheme = parse("pad_kfac(schedule='dear', damping=0.1, fusion=BySize(3.0))")
    assert scheme.preconditioner is not None
    assert scheme.preconditioner.damping == 0.1
    assert parse(repr(scheme)) == scheme
    with pytest.raises(ValueError, match="by name"):
        parse("pad_kfac(0.1)")


def refused(make: Any, text: str, act: Any) -> str:
    model = make()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        act(model, opt, gradtide.replicate(model, opt, text))
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "accepted"


def test_what_cannot_be_preconditioned_is_refused() -> None:
    def linear() -> nn.Module:
        return nn.Linear(12, 4)

    def run() -> list[str]:
        return [
            refused(lambda: nn.LayerNorm(4), "mpd_kfac", lambda *_: None),
            refused(linear, "mpd_kfac", lambda m, o, s: s.adopt("wfbp")),
        ]

    for nothing, adopted in run_ranks(2, run):
        assert "leave the preconditioner out" in nothing
        assert "stays as it is" in adopted
