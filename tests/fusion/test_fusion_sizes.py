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


def test_little_before_a_large_tensor_travels_with_it() -> None:
    """Less than a tenth of a bucket, which alone would cost a start-up."""
    nbytes = [1_000_000, 500_000, 20_000_000, 3_000_000, 1_000_000]
    by_size = BySize(10.0, ends=1.0, pieces=1)
    assert by_size(Trace(nbytes)) == [
        slice(0, 1),
        slice(1, 3),
        slice(3, 4),
        slice(4, 5),
    ]
    nbytes[1] = 1_500_000
    assert by_size(Trace(nbytes))[1:3] == [slice(1, 2), slice(2, 3)]
