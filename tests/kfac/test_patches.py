"""Rows of convolutions against the gradients that autograd computes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gradtide.kfac.layers import supported

CONVOLUTIONS = [
    nn.Conv1d(4, 6, 3),
    nn.Conv1d(4, 6, 4, stride=2, padding=1, dilation=2, groups=2),
    nn.Conv2d(4, 6, 3),
    nn.Conv2d(4, 6, 1),
    nn.Conv2d(4, 6, 1, stride=2),
    nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2)),
    nn.Conv2d(4, 6, 3, groups=2, bias=False, padding=1),
    nn.Conv2d(4, 8, 3, groups=4, padding="same", dilation=2),
    nn.Conv2d(4, 6, (4, 3), padding="same"),
    nn.Conv2d(4, 6, 3, padding="valid"),
    nn.Conv2d(4, 6, 3, padding=(2, 1), padding_mode="reflect"),
    nn.Conv2d(4, 6, 3, padding="same", padding_mode="circular"),
    nn.Conv2d(4, 6, 3, padding=2, padding_mode="replicate"),
    nn.Conv3d(4, 6, 2, groups=2, padding=1),
]


@pytest.mark.filterwarnings("ignore:Using padding='same' with even")
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("module", CONVOLUTIONS, ids=str)
def test_rows_give_the_gradient_of_each_sample(
    module: nn.Module, channels_last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sum_positions g a^T equals autograd's gradient, sample by sample."""
    monkeypatch.setattr("gradtide.kfac.patches.PIECE", 400)  # pieces of a few samples
    (layer,) = supported(module)
    spatial = module.weight.dim() - 2
    x = torch.randn(3, 4, *[7, 6, 5][:spatial])
    if channels_last and spatial > 1:
        last = torch.channels_last if spatial == 2 else torch.channels_last_3d
        x = x.to(memory_format=last)
    for one in (*x.split(1), x[0], x):
        module.zero_grad()
        y = module(one)
        g = torch.randn_like(y)
        y.backward(g)
        a = torch.cat(list(layer.inputs(module, one)), 1)
        if layer.bias is not None:
            a = torch.cat([a, torch.ones(*a.shape[:2], 1)], 2)
        expected = layer.matrix(*(p.grad for p in layer.params))
        actual = layer.outputs(g).mT @ a
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
