"""What was never run on its hardware says so, once, where it begins."""

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
from gradtide.wire import tools


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
    host: Any = SimpleNamespace(group=None, progress=None, hosts=((0,),), **passed_on)
    return staged.StagedTransport(host, torch.device("cuda"))


def by_triton(monkeypatch: pytest.MonkeyPatch) -> Any:
    found = SimpleNamespace(scan=lambda x, threshold, limit: "found")
    monkeypatch.setattr(kernels.GPU, "module", lambda: found)
    x: Any = SimpleNamespace(device=torch.device("cuda"), numel=lambda: 10)
    return kernels.scan(x, 0.5, 10)


def encoded(monkeypatch: pytest.MonkeyPatch) -> Any:
    gpu = tools.TOOLS["cuda"]
    found: Any = SimpleNamespace(module=lambda: SimpleNamespace(cast=lambda *_: None))
    monkeypatch.setitem(tools.TOOLS, "cuda", gpu._replace(kernels=found))
    x: Any = SimpleNamespace(device=torch.device("cuda"), dtype=torch.float32)
    cast = tools.compiled("cast", x)
    assert cast is not None
    cast(x, x)
    return cast


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (over_nccl, "over NCCL has never"),
        (over_host_memory, "through host memory, has never"),
        (by_triton, "selection of entries by Triton kernels has never"),
        (encoded, "encoding of values by Triton kernels has never"),
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
