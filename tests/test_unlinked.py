"""Copies of what holds a replica."""

from __future__ import annotations

import pytest

from gradtide.replica import Unlinked


def test_a_copy_says_what_it_is_not() -> None:
    with pytest.raises(AttributeError, match="no link to the other ranks"):
        Unlinked().flush()
