"""Totals grow, whatever is forgotten."""

from __future__ import annotations

from gradtide.core.telemetry import Record, Telemetry


def seen() -> Telemetry:
    telemetry = Telemetry()
    telemetry.wait(1.0, 1.5)
    telemetry.record(Record("grad0", "AllGather", 8, 2.0, 2.25))
    telemetry.record(Record("grad1", "AllGather", 8, 3.0, 3.25))
    telemetry.select(3, 30)
    return telemetry


def test_totals_outlive_what_is_cleared() -> None:
    telemetry = seen()
    assert len(telemetry.records) == 2
    for _ in range(2):
        telemetry.clear()
        assert not telemetry.records
        assert not telemetry.exposed_seconds
        assert not telemetry.exchange_seconds
        assert not telemetry.offered
    assert telemetry.totals() == {
        "exposed_seconds": 0.5,
        "exchange_seconds": 0.5,
        "selected": 3,
        "offered": 30,
        "dense_bytes": 0,
        "compressed_bytes": 0,
    }
    telemetry.select(1, 10)
    assert telemetry.totals()["offered"] == 40


def test_an_exchange_counts_as_compressed_if_it_sent_less_than_densely() -> None:
    telemetry = seen()
    telemetry.exchange(sent=80, dense=80, selected=10, offered=10)
    telemetry.exchange(sent=8, dense=160, selected=1, offered=20)
    totals = telemetry.totals()
    assert (totals["dense_bytes"], totals["compressed_bytes"]) == (240, 160)
    assert (totals["selected"], totals["offered"]) == (14, 60)


def test_what_was_not_cleared_counts_once() -> None:
    telemetry = seen()
    telemetry.clear()
    telemetry.wait(1.0, 1.25)
    assert telemetry.exposed_seconds == 0.25
    assert telemetry.totals()["exposed_seconds"] == 0.75
