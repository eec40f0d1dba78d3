"""Files that say what lies between hosts."""

from __future__ import annotations

import json
from pathlib import Path as File
from typing import Any

import pytest

from gradtide.lab.atlas import internet, names, read, read_events
from gradtide.lab.internet import Link, Path

OFFICE = {"name": "office", "hosts": 2, "rate": "1gbit"}
HOME = {"name": "home", "rate": "100mbit", "up": "20mbit", "delay": "15ms"}
BETWEEN = {"between": ["office", "home"], "delay": "10ms", "loss": "0.1%"}


def test_hosts_are_those_of_the_sites_in_their_order() -> None:
    found = internet({"sites": [OFFICE, HOME], "paths": [BETWEEN], "queue": "80ms"})
    assert found.links == (Link(1e9), Link(1e9), Link(1e8, 2e7, Path(0.015)))
    assert found.path(0, 1) == Path()
    assert found.path(0, 2).delay == found.path(2, 1).delay == pytest.approx(0.025)
    assert found.path(1, 2).loss == pytest.approx(0.001)
    assert found.queue == 0.08
    assert found.slowest == 2e7


def test_what_comes_with_gradtide_can_be_read() -> None:
    assert names() == ["home", "transatlantic"]
    assert read("home").links[3].up == 2e7
    ocean = read("transatlantic")
    assert ocean.path(0, 1).delay == 0.001
    assert (ocean.path(1, 2).delay, ocean.path(1, 2).jitter) == (0.09, 0.002)
    assert ocean.path(1, 2).loss == pytest.approx(0.0001)


def test_a_file_of_ones_own_can_be_read(tmp_path: File) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"sites": [OFFICE]}))
    assert len(read(str(file)).links) == 2
    for text in ("{", "[" * 10**5):
        file.write_text(text)
        with pytest.raises(ValueError, match=r"mine\.json is no JSON"):
            read(str(file))
        with pytest.raises(ValueError, match=r"--events .*mine\.json: "):
            read_events(str(file), ())
    with pytest.raises(ValueError, match=r"no such file .*; give a file, or home or"):
        read(str(tmp_path / "none.json"))
    with pytest.raises(ValueError, match="is a directory; give a file, or home or"):
        read(str(tmp_path))
    with pytest.raises(ValueError, match=r"--events .*: is a directory"):
        read_events(str(tmp_path), ())


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ([], "the file: a mapping is expected, with sites"),
        ({}, 'the file has no list "sites"'),
        ({"sites": []}, 'the file has no list "sites"'),
        ({"sites": [OFFICE], "path": []}, "'path' is none of sites, paths, queue"),
        ({"sites": [{"rate": "1gbit"}]}, "site 1 has no name"),
        ({"sites": [{"name": "a"}]}, "site 'a' has no rate"),
        ({"sites": [{**OFFICE, "rate": 5}]}, "write 'rate' as text, with its unit"),
        ({"sites": [{**OFFICE, "rate": "none"}]}, "a link has a limit"),
        ({"sites": [{**OFFICE, "rate": "fast"}]}, "is not a rate"),
        ({"sites": [{**OFFICE, "hosts": 0}]}, "site 'office': hosts are a number"),
        ({"sites": [{**OFFICE, "hosts": True}]}, "site 'office': hosts are a number"),
        ({"sites": [{**OFFICE, "delay": "5"}]}, "site 'office': delay '5' is no time"),
        ({"sites": [{**OFFICE, "jitter": "5ms"}]}, "site 'office': a jitter of"),
        ({"sites": [OFFICE, OFFICE]}, "site 'office' is there twice"),
        ({"sites": [OFFICE], "paths": {}}, 'the file has no list "paths"'),
        ({"sites": [OFFICE], "paths": [{}]}, 'path 1: write "between"'),
        ({"sites": [OFFICE], "paths": [BETWEEN]}, "path 1: 'home' is none of office"),
        ({"sites": [OFFICE, HOME], "paths": [BETWEEN] * 2}, "path 2: .* once more"),
        ({"sites": [OFFICE], "queue": "0ms"}, "a queue of 0 s: choose"),
    ],
)
def test_what_is_wrong_is_said_by_name(found: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        internet(found)
