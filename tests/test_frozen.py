"""Only what some rank trained moves; what waits arrives when it is trained."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradtide
from gradtide.collectives import TopK
from gradtide.fusion import BySize
from gradtide.selectors import Exact
from tests.ranks import run_ranks

SIZE = 512
ALONE = "fusion=BySize(0.001, 0.0005, 1)"  # every parameter is a bucket
TOPK = "TopK(0.05, select=Exact())"
EXACT_AFTERWARDS = {
    "topk": f"Scheme({TOPK}, {ALONE})",
    "dear": f"Scheme({TOPK}, {ALONE}, schedule=DEAR)",
    "int8": f"Scheme(Dense('int8'), {ALONE})",
    "sign": f"Scheme(Dense('sign'), {ALONE}, schedule=DEAR)",
    "momentum": f"Scheme(MomentumCorrection({TOPK}), {ALONE})",
    "local": f"Scheme({TOPK}, {ALONE}, schedule=LOCAL)",
    "outer": f"Scheme({TOPK}, {ALONE}, schedule=LOCAL, "
    "outer=OuterSGD(0.7, momentum=0.9, nesterov=True))",
    "diloco": f"Scheme(Dense(), {ALONE}, schedule=Schedule('step', every=2), "
    "outer=OuterSGD(0.7, momentum=0.9, nesterov=True))",
    "sparseloco": f"Scheme(TiledTopK(0.015625, wire='2bit'), {ALONE}, "
    "schedule=Schedule('step', every=2, decay=0.95))",
}
LATE = (
    f"Scheme(Dense('e3m0'), {ALONE}, schedule=Schedule('step', every=4, delay=1, "
    "fragments=2, mix=0.5), outer=OuterSGD(0.7, momentum=0.9, nesterov=True))"
)


class Pair(nn.Module):
    """Two parameters; `right` is left out of a forward, or frozen, when it is idle."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterList([torch.ones(SIZE), torch.ones(SIZE)])

    @property
    def left(self) -> nn.Parameter:
        return self.layers[0]

    @property
    def right(self) -> nn.Parameter:
        return self.layers[1]

    def forward(self, left: Tensor, right: Tensor | None) -> Tensor:
        loss = (self.left * left).sum()
        return loss if right is None else loss + (self.right * right).sum()


class Run:
    """A training whose gradients do not depend on parameters, nor on idle steps."""

    def __init__(self, scheme: Any, optimizer: str = "sgd", lr: float = 0.5) -> None:
        self.model = Pair()
        kinds: dict[str, Any] = {
            "sgd": lambda p: torch.optim.SGD(p, lr),
            "momentum": lambda p: torch.optim.SGD(p, lr, momentum=0.5),
            "adamw": lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1),
        }
        self.optimizer = kinds[optimizer](self.model.parameters())
        self.sync = gradtide.replicate(self.model, self.optimizer, scheme)
        self.steps = self.uses = 0
        self.sums = {"left": torch.zeros(SIZE), "right": torch.zeros(SIZE)}

    def step(self, mine: bool, frozen: bool = False) -> None:
        left = self._batch("left", self.steps)
        self.steps += 1
        self.model.right.requires_grad_(not (frozen and not mine))
        right = self._batch("right", self.uses) if mine else None
        self.uses += mine
        given = self._batch("left", 10**6) if frozen and not mine else right
        self.model(left, given).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def right(self) -> Tensor:
        return self.model.right.detach().clone()

    def _batch(self, name: str, number: int) -> Tensor:
        """Small whole numbers, so that all sums are exact."""
        seed = 2 * (1000 * dist.get_rank() + number) + (name == "left")
        rng = torch.Generator().manual_seed(seed)
        values = torch.randint(-8, 9, (SIZE,), generator=rng).float()
        if number < 10**6:
            self.sums[name] += values
        return values


def optimizer_of(name: str) -> str:
    return {"momentum": "momentum", "int8": "adamw", "local": "adamw"}.get(name, "sgd")


@pytest.mark.product
@pytest.mark.parametrize("name", EXACT_AFTERWARDS)
def test_idle_steps_change_no_bit(name: str) -> None:
    """With idle steps in between a parameter ends as it does without them."""

    def run(size: int) -> Any:
        def work() -> Any:
            ends = []
            for idle, frozen in ((0, False), (4, False), (4, True)):
                one = Run(EXACT_AFTERWARDS[name], optimizer_of(name))
                for _ in range(6):
                    one.step(True)
                before = one.right()
                for _ in range(idle):
                    one.step(False, frozen)
                    assert torch.equal(one.right(), before)
                for _ in range(6):
                    one.step(True)
                ends.append(one.right().tolist())
                one.sync.remove()
            return ends

        return run_ranks(size, work)

    for size in (2, 1) if name in ("local", "diloco") else (2,):
        for without, unused, frozen in run(size):
            assert unused == without
            assert frozen == without
            assert without != [1.0] * SIZE


def test_a_round_that_comes_late_moves_nothing_that_is_frozen() -> None:
    def work() -> Any:
        one, moved = Run(LATE, "adamw"), []
        for _ in range(8):
            one.step(True)
        for _ in range(24):
            before = one.right()
            one.step(False, True)
            moved.append(not torch.equal(before, one.right()))
        frozen = one.right()
        for _ in range(8):
            one.step(True)
        thawed = one.right()
        one.sync.end_round()
        last = one.right()
        one.sync.remove()
        return moved, (frozen - thawed).abs().max().item(), last.tolist()

    found = run_ranks(2, work)
    for moved, by, last in found:
        assert not any(moved[4:])  # the round in which it was frozen trained it
        assert by > 0
        assert last == found[0][2]


@pytest.mark.product
@pytest.mark.parametrize(
    ("schedule", "together", "levels"),
    [
        ("WFBP", False, 1),
        ("WFBP", True, 1),
        ("DEAR", False, 1),
        ("DEAR", True, 1),
        ("WFBP", True, 2),
        ("DEAR", False, 2),
    ],
)
def test_the_law_holds_over_idle_steps(
    schedule: str, together: bool, levels: int
) -> None:
    """Ranks train, freeze and leave out unlike; in the end all of it has arrived.

    While something waits, buckets are cut anew, for another collective.
    """
    size, cuts = 2 * levels, ["", f", {ALONE}"]
    rest = f"schedule={schedule}, levels={levels}"
    one_way, other = (f"{rest}{cut}" for cut in cuts[:: 1 if together else -1])

    def work() -> Any:
        one, rank = Run(f"Scheme({TOPK}, {one_way})", lr=1.0), dist.get_rank()
        for step in range(40):
            before = one.right()
            phase = step // 8
            mine = {0: True, 1: False, 2: rank == 0, 3: step % 3 == 0, 4: rank == 1}
            one.step(mine[phase], frozen=step % 2 == 0)
            if phase == 1 or (phase == 3 and not mine[3]):
                assert torch.equal(before, one.right())
                norms = one.sync.metrics(residual=True)
                assert norms["waiting_norm"] <= norms["residual_norm"]
                # On a host each rank has another part of the bucket.
                assert norms["waiting_norm"] > 0 or levels > 1
            if step == 12:
                one.sync.adopt(f"Scheme(TopKA2A(0.05), {other})")
        one.sync.adopt("wfbp")
        one.step(True)
        sums, model = one.sums, one.model
        whole = {"left": model.left.detach(), "right": model.right.detach()}
        for value in sums.values():
            dist.all_reduce(value)
        one.sync.remove()
        return [(1 - sums[name] / size).equal(value) for name, value in whole.items()]

    assert run_ranks(size, work) == [[True, True]] * size


def test_what_waits_is_undone_with_its_steps() -> None:
    def work() -> Any:
        ends = []
        for again in (False, True):
            one = Run(EXACT_AFTERWARDS["topk"])
            start = copy.deepcopy(one.model.state_dict())
            if again:
                for step in range(6):
                    one.step(step < 4)
                one.model.load_state_dict(start)
                one.steps = one.uses = 0
            for _ in range(4):
                one.step(True)
            ends.append([p.tolist() for p in one.model.parameters()])
            one.sync.remove()
        return ends

    for alone, undone in run_ranks(2, work):
        assert undone == alone


def test_what_waits_does_not_travel() -> None:
    """Large entries of a frozen parameter take no place of what is trained."""

    def work() -> Any:
        one = Run(gradtide.Scheme(TopK(0.05, select=Exact())))
        for _ in range(4):
            one.step(True)
        sent = []
        for _ in range(4):
            one.step(False, True)
            (bucket,) = one.sync._training.placement.buckets
            assert bucket.mean is not None
            sent.append({s.name: bool(s.of(bucket.mean).any()) for s in bucket.slots})
        one.sync.remove()
        return sent

    for first, *others in run_ranks(2, work):
        assert first["layers.0"]
        assert others == [{"layers.1": False, "layers.0": True}] * 3


@pytest.mark.product
@pytest.mark.parametrize(
    "name", ["topk", "momentum", "sign", "local", "outer", "diloco"]
)
def test_a_state_saves_what_waits(name: str) -> None:
    def work() -> Any:
        ends = []
        for stop in (False, True):
            one = Run(EXACT_AFTERWARDS[name], optimizer_of(name))
            for step in range(14):
                if stop and step == 7:  # idle, and in the middle of a round
                    saved = copy.deepcopy(one.sync.state_dict())
                    states = one.model.state_dict(), one.optimizer.state_dict()
                    model, optimizer = map(copy.deepcopy, states)
                    one.sync.remove(end_round=False)
                    again = Run(EXACT_AFTERWARDS[name], optimizer_of(name))
                    again.model.load_state_dict(model)
                    again.optimizer.load_state_dict(optimizer)
                    again.sync.load_state_dict(saved)
                    again.steps, again.uses = one.steps, one.uses
                    one = again
                one.step(not 4 <= step < 10)
            ends.append([p.tolist() for p in one.model.parameters()])
            one.sync.remove()
        return ends

    for through, resumed in run_ranks(2, work):
        assert resumed == through


@pytest.mark.parametrize("name", ["topk", "local"])
def test_what_waits_waits_under_another_scheme(name: str) -> None:
    """Buckets that are cut anew keep the residual of what is not trained."""

    def work() -> Any:
        one = Run(EXACT_AFTERWARDS[name], optimizer_of(name))
        for step in range(9):
            one.step(step < 6)
        before = one.sync.metrics(residual=True)["waiting_norm"]
        one.sync.adopt(replace(one.sync.scheme, fusion=BySize(1e-4)))
        one.step(False)
        after = one.sync.metrics(residual=True)["waiting_norm"]
        one.sync.remove()
        return before, after

    for before, after in run_ranks(2, work):
        assert 0 < before == after


def test_steps_that_wait_are_no_gradients_of_another_warm_up() -> None:
    """Where steps are exchanged already, a warm-up sends all of these."""

    def work() -> Any:
        ends = []
        for warm in (False, True):
            one = Run(f"Scheme({TOPK}, {ALONE}, schedule=LOCAL)")
            for _ in range(5):
                one.step(True)
            own = f"Warmup({TOPK}, 2)" if warm else TOPK
            one.sync.adopt(f"Scheme({own}, {ALONE}, schedule=LOCAL)")
            for _ in range(5):
                one.step(True)
            one.sync.adopt(f"Scheme(Dense(), {ALONE}, schedule=LOCAL)")
            one.step(True)
            ends.append([p.tolist() for p in one.model.parameters()])
            one.sync.remove()
        return ends

    for plain, warmed in run_ranks(2, work):
        assert plain == warmed


def test_a_deferred_norm_counts_what_is_trained() -> None:
    def work(scheme: str) -> Any:
        one, norms = Run(scheme), []
        for step in range(10):
            mine = not 4 <= step < 8
            loss = one.model(
                one._batch("left", step), one._batch("right", step) if mine else None
            )
            loss.backward()
            norms.append(float(one.sync.clip_grad_norm_(1.0)))
            one.optimizer.step()
            one.optimizer.zero_grad()
        one.sync.remove()
        return norms

    for wire in ("", ", wire='int8'"):
        now, later = (
            run_ranks(
                2, work, f"Scheme(TopK(0.05{wire}, select=Exact()), schedule={how})"
            )
            for how in ("WFBP", "DEAR")
        )
        for one, other in zip(now, later, strict=True):
            assert other == pytest.approx(one, rel=1e-5)


def test_a_parameter_that_is_twice_in_its_group_is_stepped_twice() -> None:
    def work(scheme: str) -> Any:
        model = nn.Linear(4, 2)
        nn.init.ones_(model.weight)
        with pytest.warns(UserWarning, match="duplicate"):
            optimizer = torch.optim.AdamW([model.weight, model.bias, model.weight], 0.1)
        sync = gradtide.replicate(model, optimizer, scheme)
        for _ in range(4):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        sync.remove()
        return model.weight.tolist()

    assert run_ranks(2, work, "dear") == run_ranks(2, work, "wfbp")
