"""Dense exchanges without loss: the bits of those that send all bytes, in fewer."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks
from torch import Tensor, nn

import gradtide
from gradtide import Dense
from gradtide.collectives import _lossless
from gradtide.collectives.levels import by_levels
from gradtide.core.ops import AllToAll, Flow, Group, payload_bytes
from gradtide.core.payload import Payload
from gradtide.planner.rehearsal.rehearsal import scripts
from gradtide.scheme import parse
from gradtide.testing import check_law, lockstep
from gradtide.wire import codec_of, lossless

SIZES = (1, 2, 3, 4, 5, 7, 8, 16)
SHORTER: Any = {None: Dense(None, lossless=True), "bf16": Dense("bf16", lossless=True)}


def buckets(size: int, numel: int, dtype: torch.dtype) -> list[Tensor]:
    """Whole numbers whose sums are exact in any order."""
    rng = torch.Generator().manual_seed(size)
    return [
        torch.randint(-9, 9, (numel,), generator=rng).to(dtype) for _ in range(size)
    ]


def means(collective: Any, flats: list[Tensor]) -> tuple[list[Tensor], Counter[str]]:
    traffic, size = Counter[str](), len(flats)
    flows: list[Flow] = [
        collective.reduce(Payload(flat, [flat]), Group(rank, size))
        for rank, flat in enumerate(flats)
    ]
    return lockstep(flows, traffic), traffic


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("wire", SHORTER)
def test_the_law(wire: Any, size: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        # Sums of bfloat16 are rounded at every addition.
        bound = 1e-5 if wire is None and dtype == torch.float32 else 2.0**-5
        for numel in (size, 700 * size):
            check_law(SHORTER[wire], size, numel=numel, dtype=dtype, tolerance=bound)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("wire", SHORTER)
def test_means_are_those_that_all_bytes_give(wire: Any, size: int) -> None:
    dtypes = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
    for dtype in dtypes:
        flats = buckets(size, 900 * size, dtype)
        expected, _ = means(Dense(wire), [flat.clone() for flat in flats])
        found, _ = means(SHORTER[wire], flats)
        assert all(mean.equal(expected[0]) for mean in found), dtype


@pytest.mark.parametrize(("wire", "most"), [(None, 0.86), ("bf16", 0.72)])
def test_fewer_bytes_travel(wire: Any, most: float) -> None:
    rng = torch.Generator().manual_seed(0)
    flats = [torch.randn(4 * 4096, generator=rng) for _ in range(4)]
    _, whole = means(Dense(wire), [flat.clone() for flat in flats])
    _, short = means(SHORTER[wire], flats)
    sent = short["AllToAll"] / (whole["Mean"] + whole["AllToAll"] + whole["AllGather"])
    assert 0.5 < sent < most


def test_bits_are_those_of_a_ring() -> None:
    """From the rank after the part's owner around: as `transport.ring` adds."""
    rng = torch.Generator().manual_seed(0)
    flats = [torch.randn(5 * 300, generator=rng) for _ in range(5)]
    rows = [flat.clone().view(5, -1) for flat in flats]
    found, _ = means(SHORTER[None], flats)
    for owner, part in enumerate(found[0].view(5, -1)):
        total = rows[(owner + 1) % 5][owner].clone()
        for i in range(2, 6):
            total = rows[(owner + i) % 5][owner] + total
        assert part.equal(total / 5)


def test_what_has_no_shorter_form_travels_as_it_is() -> None:
    for dtype in (torch.float64, torch.float16):
        _, traffic = means(SHORTER[None], buckets(3, 300, dtype))
        assert set(traffic) == {"Mean", "rounds"}


def test_what_a_request_says_is_what_heads_say() -> None:
    payload = Payload(torch.randn(600), [])
    flow: Any = _lossless.mean(payload, codec_of("bf16", torch.float32), Group(0, 2))
    heads = flow.send(None).tensor
    asked = flow.send(heads)
    assert isinstance(asked, AllToAll)
    assert asked.used is not None
    told = heads.contiguous().view(torch.int64)
    assert list(asked.used) == told[:, 0].tolist()
    flow.close()


@pytest.mark.parametrize("wire", ["fp16", "int8", "e3m0", "2bit", "sign"])
def test_wires_without_exponents_are_refused(wire: Any) -> None:
    with pytest.raises(ValueError, match="use wire='bf16' or no wire"):
        Dense(wire, lossless=True)


SCHEMES = ("wfbp", "dear", "sequential")


@pytest.mark.product
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("wire", [None, "bf16"])
def test_training_comes_to_the_same_bits(wire: str | None, size: int) -> None:
    run_ranks(size, _train, wire)


def _train(wire: str | None) -> None:
    for name in SCHEMES:
        for levels in (1, 2) if dist.get_world_size() == 4 else (1,):
            ends = []
            for own in ("", ", lossless=True"):
                text = f"{name}(wire={wire!r}{own}, levels={levels})"
                ends.append(_trained(parse(text)))
            assert ends[0].equal(ends[1]), (name, levels)


def _trained(scheme: gradtide.Scheme) -> Tensor:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(60, 70), nn.Tanh(), nn.Linear(70, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ddp = gradtide.DistributedDataParallel(model, scheme=scheme)
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(4):
        optimizer.zero_grad()
        ddp(torch.randn(8, 60)).square().mean().backward()
        optimizer.step()
    state = ddp.state_dict()
    return torch.cat([value.flatten() for value in state.values()])


def test_by_levels_only_what_crosses_links_is_shortened() -> None:
    rng = torch.Generator().manual_seed(0)
    flats = [torch.randn(4 * 4096, generator=rng) for _ in range(4)]
    copies = [flat.clone() for flat in flats]
    expected, whole = means(by_levels(Dense("bf16"), 2), copies)
    found, short = means(by_levels(SHORTER["bf16"], 2), flats)
    assert all(mean.equal(expected[0]) for mean in found)
    across = whole["AllToAll across"] + whole["AllGather across"]
    assert short["AllToAll across"] < 0.72 * across
    inside = {name: n for name, n in whole.items() if name.endswith("inside")}
    assert inside
    assert inside.items() <= short.items()


def test_a_rehearsal_takes_what_gradients_are_likely_to() -> None:
    whole, short = (
        scripts(own, 4 * 5000, torch.float32, (), 4)[-1]
        for own in (Dense("bf16"), SHORTER["bf16"])
    )
    bytes_ = [
        sum(payload_bytes(op, Group(0, 4)) for act in script.acts for op in act.asked)
        for script in (whole, short)
    ]
    assert bytes_[1] / bytes_[0] == pytest.approx(1 - lossless.SHORTER / 2, abs=0.01)
