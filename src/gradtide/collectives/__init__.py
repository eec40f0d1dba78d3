"""The averaging algorithms; a new one is one file and one line here.

Those of `contrib` are yardsticks, to hold others against. They, and others that few
schemes ask for, are loaded by who asks for them.
"""

import importlib
import typing

from gradtide.collectives._entries import Selecting as Selecting
from gradtide.collectives.dense import Dense as Dense
from gradtide.collectives.momentum_correction import (
    MomentumCorrection as MomentumCorrection,
)
from gradtide.collectives.partitioned import PartitionedTopK as PartitionedTopK
from gradtide.collectives.partitions import Dynamic as Dynamic
from gradtide.collectives.partitions import Even as Even
from gradtide.collectives.topk import TopK as TopK
from gradtide.collectives.topka2a import TopKA2A as TopKA2A
from gradtide.collectives.warmup import Warmup as Warmup

if typing.TYPE_CHECKING:
    from gradtide.collectives.contrib.acpsgd import ACPSGD as ACPSGD
    from gradtide.collectives.contrib.arctopk import ARCTopK as ARCTopK
    from gradtide.collectives.contrib.by_norm import ByNorm as ByNorm
    from gradtide.collectives.contrib.cltk import CLTk as CLTk
    from gradtide.collectives.contrib.covap import COVAP as COVAP
    from gradtide.collectives.contrib.demo import DeMo as DeMo
    from gradtide.collectives.contrib.gtopk import GTopK as GTopK
    from gradtide.collectives.contrib.topkdsa import TopkDSA as TopkDSA
    from gradtide.collectives.lowrank import PowerSGD as PowerSGD
    from gradtide.collectives.oktopk import OkTopk as OkTopk
    from gradtide.collectives.tiled import TiledTopK as TiledTopK

    COLLECTIVES: tuple[type, ...]
    WRAPPERS: tuple[type, ...]
    PARTITIONS: tuple[type, ...]

_KINDS = {  # what there is, and where, if it is loaded by who asks for it
    "COLLECTIVES": {
        "Dense": "",
        "TopK": "",
        "GTopK": "contrib.gtopk",
        "TopKA2A": "",
        "TopkDSA": "contrib.topkdsa",
        "OkTopk": "oktopk",
        "PartitionedTopK": "",
        "CLTk": "contrib.cltk",
        "TiledTopK": "tiled",
        "ARCTopK": "contrib.arctopk",
        "COVAP": "contrib.covap",
        "DeMo": "contrib.demo",
        "PowerSGD": "lowrank",
        "ACPSGD": "contrib.acpsgd",
    },
    "WRAPPERS": {"Warmup": "", "MomentumCorrection": ""},
    "PARTITIONS": {"Even": "", "Dynamic": "", "ByNorm": "contrib.by_norm"},
}
PARTS = tuple(name for names in _KINDS.values() for name in names)
LATER = {n: there for names in _KINDS.values() for n, there in names.items() if there}


def __getattr__(name: str) -> typing.Any:
    """One of `LATER`, or all of a kind."""
    found: typing.Any
    if name in _KINDS:
        found = tuple(globals().get(n) or __getattr__(n) for n in _KINDS[name])
    elif name in LATER:
        found = getattr(importlib.import_module(f"{__name__}.{LATER[name]}"), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found
    return found
