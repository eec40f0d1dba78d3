"""Files that say what lies between hosts: sites with their hosts, and how far apart.

    {
      "sites": [
        {"name": "office", "hosts": 3, "rate": "1gbit"},
        {"name": "home", "rate": "100mbit", "up": "20mbit", "delay": "15ms"}
      ],
      "paths": [{"between": ["office", "home"], "delay": "10ms", "loss": "0.1%"}]
    }

What happens, and when, is in "events", or in a file with nothing else:

    {"events": [
      {"at": "30s", "host": 2, "link": "down"}, {"at": "60s", "host": 2, "link": "up"},
      {"at": "90s", "host": 2, "rate": "5%"},
      {"at": "100s", "kill": 3}, {"at": "110s", "start": 3}
    ]}

Hosts are numbered in the order of their sites. A site's delay, jitter and loss are
those of each of its hosts' links, in every path of theirs. Files that come with
gradtide are in the folder `internets`, and are asked for by name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path as File
from typing import Any, NamedTuple, TypeVar

from gradtide.lab.amounts import parse_share, parse_time
from gradtide.lab.events import Cut, Event, Killed, Slowed, Started
from gradtide.lab.internet import QUEUE, Internet, Link, Path
from gradtide.lab.rate import limited

FOLDER = File(__file__).with_name("internets")
FILE = ("sites", "paths", "queue", "events")
PATH = ("delay", "jitter", "loss")
LINK = ("rate", "up")
EVENT = ("at", "host", "link", *LINK, "kill", "start")
SITE = ("name", "hosts", "rate", "up", *PATH)

T = TypeVar("T")


def names() -> list[str]:
    """Of the files that come with gradtide."""
    return sorted(file.stem for file in FOLDER.glob("*.json"))


def read(where: str) -> Internet:
    """What a file says, or one that comes with gradtide. ValueError where none does."""
    path = FOLDER / f"{where}.json" if where in names() else File(where)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        instead = " or ".join(names())
        raise ValueError(
            f"--internet {where}: {_unread(error)}; give a file, or {instead}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--internet {where} is no JSON: {error}") from None
    try:
        return internet(found)
    except ValueError as error:
        raise ValueError(f"--internet {where}: {error}") from None


def _unread(error: OSError) -> str:
    """Why a file cannot be read."""
    return (error.strerror or str(error)).lower()


class _Site(NamedTuple):
    name: str
    hosts: int
    link: Link


def internet(found: Any) -> Internet:
    """What the contents of a file say; ValueError for what is wrong with it."""
    whole = _fields(found, FILE, "the file")
    rows = _list(whole, "sites", "the file")
    sites = [_site(row, f"site {number}") for number, row in enumerate(rows, 1)]
    known = [site.name for site in sites]
    if twice := [name for name in known if known.count(name) > 1]:
        raise ValueError(f"site {twice[0]!r} is there twice: names differ")
    between: dict[frozenset[str], Path] = {}
    for number, row in enumerate(_list(whole, "paths", "the file", []), 1):
        name = f"path {number}"
        ends = _ends(row, known, name)
        if ends in between:
            raise ValueError(f"{name}: between {' and '.join(sorted(ends))} once more")
        between[ends] = _path(row, name)
    hosts = [site for site in sites for _ in range(site.hosts)]
    paths = tuple(
        tuple(between.get(frozenset((a.name, b.name)), Path()) for b in hosts)
        for a in hosts
    )
    queue = _given(whole, "queue", "queue", parse_time, QUEUE)
    links = tuple(site.link for site in hosts)
    happens = events(_list(whole, "events", "the file", []), links)
    return Internet(links, paths, queue, happens)


def read_events(where: str, links: tuple[Link, ...]) -> tuple[Event, ...]:
    """A timetable in a file of its own, for hosts with these links."""
    try:
        found = json.loads(File(where).read_text(encoding="utf-8"))
        return events(_list(_fields(found, FILE[-1:], "the file"), FILE[-1], ""), links)
    except OSError as error:
        raise ValueError(f"--events {where}: {_unread(error)}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--events {where}: {error}") from None


def events(rows: list[Any], links: tuple[Link, ...]) -> tuple[Event, ...]:
    """What rows say that happens, in the order of time. ValueError for what cannot."""
    found = [_event(row, f"event {n}", links) for n, row in enumerate(rows, 1)]
    found.sort(key=lambda event: event.at)
    down: set[int] = set()
    for change in (event.change for event in found):
        if isinstance(change, Cut):
            if (change.host in down) == change.down:
                state = "down" if change.down else "up"
                raise ValueError(f"host {change.host}'s link is {state} already then")
            (down.add if change.down else down.remove)(change.host)
    return tuple(found)


def _event(row: Any, name: str, links: tuple[Link, ...]) -> Event:
    found = _fields(row, EVENT, name)
    if "at" not in found:
        raise ValueError(f'{name} has no time: write "at": "30s"')
    at = _given(found, "at", name, parse_time, 0.0)
    keys = frozenset(found) - {"at"}
    if keys in ({"kill"}, {"start"}):
        (key,) = keys
        rank = _number(found, key, name, None)
        return Event(at, (Killed if key == "kill" else Started)(rank))
    if not (keys == {"host", "link"} or {"host", "rate"} <= keys <= {*LINK, "host"}):
        raise ValueError(
            f'{name}: write one of "kill": 1, "start": 1, "host": 1 with "link": '
            '"down", and "host": 1 with "rate": "5%"'
        )
    host = _number(found, "host", name, len(links))
    if "link" in found:
        if found["link"] not in ("down", "up"):
            raise ValueError(f"{name}: a link is down or up, not {found['link']!r}")
        return Event(at, Cut(host, found["link"] == "down"))
    rate = _part(found, "rate", name, links[host].rate)
    of = links[host].sends
    if "up" in found:
        up = _part(found, "up", name, of)
    else:
        up = _part(found, "rate", name, of)  # as --rate alone is for both
    return Event(at, Slowed(host, rate, up))


def _part(found: Mapping[str, Any], key: str, name: str, whole: float) -> float:
    """Bits/s, as such or as a percentage of `whole`."""
    text = found[key]
    if isinstance(text, str) and text.strip().endswith("%"):
        bits = whole * parse_share(f"{name}: {key}", text)
    else:
        bits = _given(found, key, name, _rate, 0.0)
    if not 1e5 <= bits <= 1e11:
        raise ValueError(f"{name}: {key} is {bits:g} bits/s: choose 100kbit to 100gbit")
    return bits


def _number(found: Mapping[str, Any], key: str, name: str, size: int | None) -> int:
    value = found[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{name}: {key} is a number, from 0 on, not {value!r}")
    if size is not None and value >= size:
        raise ValueError(f"{name}: there are hosts 0 to {size - 1}, not {value}")
    return value


def _site(row: Any, name: str) -> _Site:
    found = _fields(row, SITE, name)
    if not isinstance(own := found.get("name"), str):
        raise ValueError(f'{name} has no name: write "name": "office"')
    name = f"site {own!r}"
    hosts = found.get("hosts", 1)
    if not isinstance(hosts, int) or isinstance(hosts, bool) or hosts < 1:
        raise ValueError(f"{name}: hosts are a number, 1 or more, not {hosts!r}")
    if "rate" not in found:
        raise ValueError(f'{name} has no rate: write "rate": "1gbit"')
    rate = _given(found, "rate", name, _rate, 0.0)
    up = _given(found, "up", name, _rate, None)
    return _Site(own, hosts, Link(rate, up, _path(row, name, SITE)))


def _path(row: Any, name: str, allowed: tuple[str, ...] = ("between", *PATH)) -> Path:
    found = _fields(row, allowed, name)
    delay, jitter = (_given(found, k, name, parse_time, 0.0) for k in PATH[:2])
    loss = _given(found, "loss", name, parse_share, 0.0)
    try:
        return Path(delay, jitter, loss)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _ends(row: Any, known: list[str], name: str) -> frozenset[str]:
    ends = row.get("between") if isinstance(row, dict) else None
    if not isinstance(ends, list) or len(ends) != 2:
        raise ValueError(f'{name}: write "between": ["{known[0]}", "{known[-1]}"]')
    for end in ends:
        if end not in known:
            raise ValueError(f"{name}: {end!r} is none of {', '.join(known)}")
    return frozenset(ends)


def _fields(row: Any, allowed: tuple[str, ...], name: str) -> Mapping[str, Any]:
    if not isinstance(row, dict):
        raise ValueError(f"{name}: a mapping is expected, with {', '.join(allowed)}")
    for key in row:
        if key not in allowed:
            raise ValueError(f"{name}: {key!r} is none of {', '.join(allowed)}")
    return row


def _list(
    row: Mapping[str, Any], key: str, name: str, default: list[Any] | None = None
) -> list[Any]:
    found = row.get(key, default)
    if not isinstance(found, list) or (default is None and not found):
        raise ValueError(f'{name} has no list "{key}"')
    return found


def _given(
    row: Mapping[str, Any],
    key: str,
    name: str,
    parse: Callable[[str, str], T],
    default: T,
) -> T:
    if key not in row:
        return default
    if not isinstance(row[key], str):
        raise ValueError(f"{name}: write {key!r} as text, with its unit")
    return parse(f"{name}: {key}", row[key])


def _rate(name: str, text: str) -> float:
    return limited(text, f"{name} {text!r}: a link has a limit, such as 1gbit")
