"""docs/papers.md of a record of papers.py: what is stated, and figures for its text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

REACHED = 0.15

TEXT = Path(__file__).with_name("papers.md")  # the page, with names for figures


@dataclass(frozen=True)
class Claim:
    """A figure that a paper states; of several values of the clock, the largest.

    `lab` and `why` are texts with names for figures.
    """

    system: str
    states: str
    paper: float
    clock: tuple[str, ...]
    lab: str = "-"
    why: str = "-"
    unit: str = "x"
    bound: bool = False  # what is stated is a bound from above


MODELS = "resnet50", "densenet201", "bert_base", "bert_large"


def _dear(name: str) -> tuple[str, ...]:
    return tuple(f"dear_{model}.{name}" for model in MODELS)


CLAIMS = (
    Claim(
        "TopKA2A",
        "density above which gathered top-k is slower, 32 GPUs",
        1 / 62,
        ("topka2a_where.above",),
        unit="",
    ),
    Claim(
        "",
        "density below which dense is slower",
        0.5,
        ("topka2a_where.below",),
        unit="",
    ),
    Claim(
        "",
        "words, of (2 k + n) (P - 1) / P",
        1.0,
        ("topka2a.words",),
        "{lab.topka2a_words:.3f} (8 hosts)",
        "shorter indices",
        unit="",
    ),
    Claim(
        "",
        "BERT-Large over DDP, 32 GPUs, 10 GbE",
        1.41,
        ("topka2a.bert",),
        "{lab.topka2a_ddp:.2f}x (ResNet-50, 8 hosts, 100 Mb/s)",
        "with buckets of 25 MB {topka2a.bert_25mb:.2f}x",
    ),
    Claim("", "up to, over DDP, all models", 1.73, ("topka2a.most",)),
    Claim("", "GPT-2 over DDP", 1.72, ("topka2a.gpt2_most",), why="batch unknown"),
    Claim(
        "Ok-Topk",
        "words, of k (P - 1) / P: below",
        6.0,
        ("oktopk.words",),
        "{lab.oktopk_words:.2f} (8 hosts)",
        unit="",
        bound=True,
    ),
    Claim(
        "",
        "over the slowest rival, BERT, 256 GPUs",
        12.95,
        ("oktopk.slowest",),
        "{lab.oktopk_ddp:.1f}x DDP (ResNet-50, 8 hosts, 100 Mb/s)",
        "rivals sort",
    ),
    Claim(
        "",
        "over the fastest rival",
        3.29,
        ("oktopk.fastest",),
        why="their dense all-reduce: MPI from host memory",
    ),
    Claim(
        "DeAR",
        "up to, over others that fuse, 64 GPUs, 10 GbE",
        1.83,
        _dear("ethernet_25mb"),
        "{lab.dear_ddp:.2f}x (ResNet-50, 8 hosts, 250 Mb/s)",
        "start-ups of rivals: {dear.start4:.2f}x in a run with theirs",
    ),
    Claim("", "the same, 100 Gb/s", 1.15, _dear("infiniband_25mb")),
    Claim(
        "SPD-KFAC",
        "over D-KFAC, ResNet-50",
        1.26,
        ("kfac_resnet50.spd_d",),
        why="calibrated to such rows",
    ),
    Claim(
        "",
        "over D-KFAC, ResNet-152",
        1.35,
        ("kfac_resnet152.spd_d",),
        why="calibrated to such rows",
    ),
    Claim(
        "",
        "over MPD-KFAC, ResNet-50",
        1.13,
        ("kfac_resnet50.spd_mpd",),
        why="calibrated to such rows",
    ),
    Claim(
        "",
        "over MPD-KFAC, ResNet-152",
        1.19,
        ("kfac_resnet152.spd_mpd",),
        why="calibrated to such rows",
    ),
    Claim(
        "PAD-KFAC",
        "up to, over distributed K-FAC before it, 64 GPUs",
        1.36,
        ("kfac_resnet50.pad_mpd", "kfac_resnet152.pad_mpd"),
        "{lab.pad_mpd:.2f}x (small network, 4 hosts, 1 Gb/s)",
    ),
    Claim("Top-k, 8 V100", "share of selection", 0.676, ("selection.share",), unit="%"),
    Claim("", "a step, of the dense one", 3.36, ("selection.slower",)),
    Claim(
        "MiCRO, ExDyna, DEFT",
        "entries that arrive, in k, 16 ranks",
        1.0,
        ("build_up.micro_16", "build_up.exdyna_16", "build_up.deft_16"),
        "{lab.micro_density:.2f}, {lab.exdyna_density:.2f}, {lab.deft_density:.2f} "
        "(4 hosts)",
        unit="",
    ),
    Claim("DiLoCo", "fewer bytes, rounds of 500", 500.0, ("rounds.diloco",)),
    Claim(
        "Streaming DiLoCo",
        "fewer bits than 16 in every step",
        400.0,
        ("rounds.streaming",),
        why="scales of blocks",
    ),
    Claim(
        "SparseLoCo",
        "a message shorter than the model",
        146.0,
        ("rounds.sparseloco",),
        why="scales of blocks",
    ),
    Claim(
        "1-bit Adam",
        "up to, fewer bits than 16",
        5.0,
        ("rounds.onebit",),
        why="its wire after 15 % of dense steps",
    ),
)


def page(values: Mapping[str, Mapping[str, float]]) -> str:
    """The text of the page, of a record's values."""
    names = {name: SimpleNamespace(**found) for name, found in values.items()}
    names["dear"] = SimpleNamespace(
        tuned=_most(values, _dear("ethernet_tuned")),
        mb25=_most(values, _dear("ethernet_25mb")),
        mb4=_most(values, _dear("ethernet_4mb")),
        start4=_most(values, _dear("start_ups_4mb")),
        start25=_most(values, _dear("start_ups_25mb")),
        ib25=_most(values, _dear("infiniband_25mb")),
    )
    claims = ["| system | what is stated | paper | clock | off | lab | why |"]
    claims += ["|---|---|--:|--:|--:|---|---|"]
    claims += [_row(claim, values, names) for claim in CLAIMS]
    rows = _dear_rows(values)
    tables = {"claims": "\n".join(claims), "dear_table": "\n".join(rows)}
    return TEXT.read_text().format(**tables, **names)


def off(claim: Claim, values: Mapping[str, Mapping[str, float]]) -> float:
    """How far the clock is from the paper, as a share of what the paper states."""
    return _most(values, claim.clock) / claim.paper - 1


def _most(values: Mapping[str, Mapping[str, float]], keys: tuple[str, ...]) -> float:
    parts = (key.split(".") for key in keys)
    return max(values[section][name] for section, name in parts)


def _row(
    claim: Claim,
    values: Mapping[str, Mapping[str, float]],
    names: Mapping[str, SimpleNamespace],
) -> str:
    far = off(claim, values)
    told = f"{100 * far:+.1f} %".replace("-0.0", "0.0")
    if claim.bound:
        told, far = ("within", 0.0) if far <= 0 else (told, math.inf)
    if abs(far) > REACHED:
        told = f"{told} **missed**"
    shown = [_shown(x, claim.unit) for x in (claim.paper, _most(values, claim.clock))]
    texts = [text.format(**names) for text in (claim.lab, claim.why)]
    cells = [claim.system, claim.states, *shown, told, *texts]
    return f"| {' | '.join(cells)} |"


def _shown(value: float, unit: str) -> str:
    if unit == "%":
        return f"{100 * value:.1f} %"
    digits = 0 if value >= 100 else 2 if value >= 0.1 else 4
    return f"{value:.{digits}f}{unit}"


def _dear_rows(values: Mapping[str, Mapping[str, float]]) -> list[str]:
    columns = "tuned", "25mb", "mg", "4mb", "unfused", "both_unfused"
    found = []
    for network, said in (("ethernet", "10 GbE"), ("infiniband", "100 Gb/s")):
        for model in MODELS:
            own = values[f"dear_{model}"]
            cells = [f"{own[f'{network}_{name}']:.2f}" for name in columns]
            label = TITLES[model]
            found.append(f"| {label}, {said} | {' | '.join(cells)} |")
    return found


TITLES = {
    "resnet50": "ResNet-50, 64",
    "densenet201": "DenseNet-201, 32",
    "bert_base": "BERT-Base, 64",
    "bert_large": "BERT-Large, 32",
}
