"""K-FAC's stages on a device: a step without any, with factors, and with both."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from gpu.hooks import alone
from gpu.model import TINY, Entrant, Shape, transformer
from gpu.results import Bar, Book
from gpu.setting import Setting

PLAIN = "wfbp"
# Which stages the timed steps have; the first two have had all of them once.
STAGES = {
    "none": "factor_every=1000, inverse_every=1000",
    "factors": "factor_every=1, inverse_every=1000",
    "factors and inverses": "factor_every=1, inverse_every=1",
}
# A step of which most are made: factors every 10 steps, inverses every 100.
BARS = (Bar("a step without its stages, of wfbp's", "none", "ms", 1.3, per=(PLAIN,)),)


def measure(book: Book, setting: Setting) -> None:
    schemes = {PLAIN: PLAIN}
    schemes |= {name: f"pad_kfac({given})" for name, given in STAGES.items()}
    with alone(setting):
        book.measure({n: partial(timed, setting, s) for n, s in schemes.items()})


def timed(setting: Setting, scheme: str) -> dict[str, Any]:
    """Milliseconds and waits of a step, and the seconds that stages were busy."""
    shape = TINY if setting.tiny else Shape(768, 12, 6, 512, 256)
    setting.begin_peak()
    model = transformer(setting, shape)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    entrant = Entrant(scheme, model, optimizer)
    tokens = torch.randint(
        shape.vocabulary, (2 if setting.tiny else 8, shape.length + 1)
    ).to(setting.device)
    step = partial(entrant.step, tokens)
    repeat, warm = (2, 1) if setting.tiny else (6, 2)
    found: dict[str, Any] = {"ms": setting.mean_milliseconds(step, repeat, warm)}
    if entrant.replica.kfac is not None:
        entrant.replica.kfac.clear()
        step()
        setting.synchronize()
        found |= {k: v for k, v in entrant.replica.kfac.stages()._asdict().items() if v}
    if setting.cuda:
        found |= {"waits": setting.waits(step), "memory": setting.peak()}
    entrant.leave()
    return found
