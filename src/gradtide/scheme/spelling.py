"""Texts of older versions in today's spelling, for the message that refuses them."""

from __future__ import annotations

import re

WORDS = {
    "leader": "cltk",
    "corrected": "momentum_correction",
    "Agreed": "PartitionedTopK",
    "Leader": "CLTk",
    "Corrected": "MomentumCorrection",
}
_WORD = re.compile(rf"\b({'|'.join(WORDS)})\b")
_SUFFIXED = re.compile(r"\b(?P<name>[a-z]\w{1,12})-(?P<suffix>dear|local|bf16|fp16)\b")
_ENDS_OR_NAMED = re.compile(r"[][()]|\w+\s*=")


def respelled(text: str) -> str:
    """Return a text with today's names, and with arguments in place of suffixes.

    "oktopk-dear(0.1, warmup=40)" becomes "oktopk(0.1, schedule='dear', warmup=40)". A
    text without old names is returned as it is.
    """
    text = _WORD.sub(lambda match: WORDS[match[0]], text)
    while match := _SUFFIXED.search(text):
        call = _call(match["name"], match["suffix"], text[match.end() :])
        text = text[: match.start()] + call
    return text


def _call(name: str, suffix: str, rest: str) -> str:
    """The call of a recipe with what its suffix said, and the text behind it."""
    kind = "schedule" if suffix in ("dear", "local") else "wire"
    said = f"{kind}={suffix!r}"
    if not rest.startswith("("):
        return f"{name}({said}){rest}"
    end = 1 + _end_of_positional(rest[1:])
    args, behind = rest[1:end].strip().rstrip(","), rest[end:]
    closed = not behind or behind[0] == ")"
    if kind == "wire" and (args or not closed):  # the wire was given again: it counted
        return name + rest
    joined = ", ".join(filter(None, [args, said]))
    return f"{name}({joined}{'' if closed else ', '}{behind}"


def _end_of_positional(text: str) -> int:
    """Where the first named argument of a call begins, or else its last bracket is."""
    depth = 0
    for match in _ENDS_OR_NAMED.finditer(text):
        closing = match[0] in ")]"
        if depth == 0 and (closing or match[0].endswith("=")):
            return match.start()
        depth += (match[0] in "([") - closing
    return len(text)
