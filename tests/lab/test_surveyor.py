"""What a host does to measure; test_probe.py has what comes of it between hosts."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from gradtide.lab.surveyor import Survey


class Alone:
    """A circle of one host that measures the way to itself."""

    rank, size = 0, 2
    addresses = (["127.0.0.1", 0],) * 2

    def share(self, value: object) -> list[object]:
        return [value] * 2


@pytest.fixture
def survey(monkeypatch: pytest.MonkeyPatch) -> Iterator[Survey]:
    monkeypatch.setattr("gradtide.lab.surveyor._PORT", 29417)
    monkeypatch.setattr("gradtide.lab.surveyor._HEARD", 0.0)
    found = Survey(Alone(), 0.2, [[1e7, 1e7]] * 2)  # type: ignore[arg-type]
    yield found
    found.door.close()


@pytest.mark.alone
def test_it_sends_evenly_and_no_more_than_was_said(survey: Survey) -> None:
    start = time.monotonic()
    sent = survey._send(1, bytes(100), 500.0, 0.4)
    assert 0.4 <= time.monotonic() - start < 1.5
    assert 100 < sent <= 220


@pytest.mark.alone
def test_what_nobody_has_read_is_counted_and_so_is_what_found_no_room(
    survey: Survey,
) -> None:
    before = survey._arrived()
    sent = survey._send(1, bytes(1000), 20000.0, 0.2)
    assert sent > 500, "more than a socket has room for"
    # Other programs of this machine may be sent something, too.
    assert 0 <= survey._arrived() - before - sent < 50


@pytest.mark.alone
def test_where_nothing_is_lost_and_nothing_slow_it_says_so(survey: Survey) -> None:
    found = survey.round_trips()
    assert found[0][0] == 0.0
    assert 0 < found[0][1] < 0.1
    assert -0.2 < survey.count(1) < 0.01
    assert survey.in_turn(lambda receiver: 5.0) == [[0.0, 5.0], [5.0, 0.0]]
    assert not [t for t in threading.enumerate() if "_answer" in t.name]
