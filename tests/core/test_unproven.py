"""What hardly ran on its hardware says so, once, where it begins."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gradtide.core.unproven import warn_unproven
from gradtide.selectors import kernels
from gradtide.transport import nccl, staged


@pytest.fixture(autouse=True)
def _as_in_a_new_process() -> Iterator[None]:
    warn_unproven.cache_clear()
    yield
    warn_unproven.cache_clear()


def over_nccl(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    pg: Any = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
    passed_on = {"gather_objects": None, "close": None, "progress": None}
    control: Any = SimpleNamespace(hosts=((0,),), **passed_on)
    return nccl.NcclTransport(pg, control, torch.device("cuda"))


def over_host_memory(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(torch, "Stream", lambda device: None)
    passed_on = {"gather_objects": None, "close": None, "carried": None}
    passed_on["abandon"] = None
    host: Any = SimpleNamespace(
        group=None, progress=None, hosts=((0,),), delay=0.0, **passed_on
    )
    return staged.StagedTransport(host, torch.device("cuda"))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (over_nccl, "over NCCL has run for minutes"),
        (over_host_memory, "through host memory, has run for minutes"),
    ],
)
def test_it_is_said_once_with_what_to_do(
    make: Callable[[pytest.MonkeyPatch], Any],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.warns(UserWarning, match=words) as told:
        made = make(monkeypatch)
    assert len(told) == 1
    assert made
    for part in ("Unproven are", "an issue", "python -m torch.utils.collect_env"):
        assert part in str(told[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert make(monkeypatch)


def test_what_is_proven_says_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", "numba is not installed")
        kernels.above(torch.ones(4), 0.5, 10)
