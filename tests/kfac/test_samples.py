"""How many samples a loss averages."""

from __future__ import annotations

import pytest
import torch

from gradtide.kfac.samples import batch, tokens


def test_samples_of_the_first_tensor() -> None:
    ids, x = torch.zeros(3, 5, dtype=torch.long), torch.zeros(3, 5, 7)
    assert tokens((ids,), {}) == tokens((x,), {}) == 15
    assert batch((), {"ids": ids}) == batch(({"x": x},), {}) == 3
    assert batch((torch.tensor(1.0), x), {}) == 3


def test_a_model_without_tensors_is_told_what_to_do() -> None:
    with pytest.raises(ValueError, match="give it the batch as a tensor"):
        batch((), {"name": "x"})
