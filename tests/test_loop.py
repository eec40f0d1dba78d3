"""What a loop says of its steps is told to the session, or refused at once."""

from __future__ import annotations

from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from gradtide.loop import Loop
from gradtide.session import Session


class _Session(SimpleNamespace):
    """What a session without other ranks would hear."""

    def __init__(self, kfac: bool = False, shards: bool = False) -> None:
        super().__init__()
        self.told: list[Any] = []
        statistics = SimpleNamespace(quiet=False)
        self.kfac = SimpleNamespace(statistics=statistics) if kfac else None
        self.notices = SimpleNamespace(
            weights=SimpleNamespace(give=self.told.append), stop=False
        )
        self.hooks = SimpleNamespace(stand_in=lambda: self.told.append("stands in"))
        self.auto: Any = None
        self.owner: Any = None
        self.scheme = SimpleNamespace(schedule=SimpleNamespace(rounds=False))
        self.training = SimpleNamespace(
            quiet=False,
            lost=False,
            placement=SimpleNamespace(shards=shards),
            gradient_info=SimpleNamespace(clip=lambda *_: torch.tensor(3.0)),
            exchange_now=self.told.append,
            surviving=lambda call: call,
            end_round=lambda: self.told.append("round ends"),
        )

    def refuse_moment(self, call: str) -> None:
        self.told.append(call)


def _loop(**what: bool) -> tuple[Loop, _Session]:
    session = _Session(**what)
    return Loop(cast(Session, session)), session


@pytest.mark.parametrize("kfac", [False, True])
def test_what_is_quiet_is_so_until_the_outermost_end(kfac: bool) -> None:
    loop, session = _loop(kfac=kfac)

    def quiet() -> bool:
        if kfac:
            assert session.kfac.statistics.quiet == session.training.quiet
        return bool(session.training.quiet)

    with loop.no_sync():
        with suppress(KeyError), loop.no_sync():
            assert quiet()
            raise KeyError
        assert quiet()
    assert not quiet()
    loop.be_quiet(True)
    with loop.no_sync():
        pass
    assert quiet()


def test_a_batch_that_is_no_good() -> None:
    loop, session = _loop()
    loop.skip()
    assert session.told == ["stands in", True]
    with loop.no_sync(), pytest.raises(RuntimeError, match="the step's last backward"):
        loop.skip()
    for what, word in (("kfac", "K-FAC"), ("shards", "sharded parameters")):
        loop, session = _loop(**{what: True})
        with pytest.raises(ValueError, match=rf"skip\(\) does not work with {word}"):
            loop.skip()
        assert not session.told


def test_weights_are_given() -> None:
    loop, session = _loop()
    loop.weight(2.0)
    assert session.told == [2.0]
    loop, session = _loop(kfac=True)
    with pytest.raises(ValueError, match=r"weight\(\) does not work with K-FAC"):
        loop.weight(2.0)
    assert not session.told


def test_norms() -> None:
    loop, session = _loop()
    assert float(loop.clip_grad_norm_(1.0)) == 3
    session.auto = SimpleNamespace(
        inspector=SimpleNamespace(note=lambda: session.told.append("clipped"))
    )
    assert float(loop.clip_grad_norm_(1.0)) == 3
    assert session.told == ["clipped"]
    session.training.lost = True  # the step is none
    assert float(loop.clip_grad_norm_(1.0)) == 0
    assert session.told == ["clipped"]


def test_only_rounds_end() -> None:
    loop, session = _loop()
    loop.end_round()
    assert not session.told
    session.scheme.schedule.rounds = True
    loop.end_round()
    assert session.told == ["end_round", "round ends"]


def test_any_rank_may_stop() -> None:
    loop, session = _loop()
    loop.stop()
    assert session.notices.stop
