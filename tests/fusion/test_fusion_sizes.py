"""Cuts that somebody else has worked out."""

from __future__ import annotations

import pytest

from gradtide.fusion import FUSIONS, BySize, Cuts, Trace
from gradtide.scheme import Scheme, parse


def test_cuts_are_what_they_say() -> None:
    assert Cuts((1, 4))(Trace([5] * 4)) == [slice(0, 1), slice(1, 4)]
    with pytest.raises(ValueError, match="for 4 tensors"):
        Cuts((1, 4))(Trace([5] * 5))


@pytest.mark.parametrize("ends", [(), (0, 3), (3, 3), (4, 2)])
def test_cuts_that_are_none_are_refused(ends: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="ascending"):
        Cuts(ends)


@pytest.mark.parametrize("kind", FUSIONS)
def test_fusions_are_constructor_calls(kind: type) -> None:
    fusion = kind((2, 5)) if kind is Cuts else kind()
    scheme = Scheme(fusion=fusion)
    assert parse(repr(scheme)) == scheme


def test_times_belong_to_tensors() -> None:
    with pytest.raises(ValueError, match="2 backward times for 3 tensors"):
        Trace([1, 2, 3], backward=[0.1, 0.2])
    assert BySize()(Trace([1, 2], forward=[0.1, 0.1])) == [slice(0, 2)]
