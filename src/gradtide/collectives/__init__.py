"""The averaging algorithms; a new one is one file and one line here.

Those of `contrib` are yardsticks, to hold others against.
"""

from gradtide.collectives._entries import Selecting as Selecting
from gradtide.collectives.auto import Auto as Auto
from gradtide.collectives.contrib.acpsgd import ACPSGD as ACPSGD
from gradtide.collectives.contrib.by_norm import ByNorm as ByNorm
from gradtide.collectives.contrib.cltk import CLTk as CLTk
from gradtide.collectives.contrib.gtopk import GTopK as GTopK
from gradtide.collectives.contrib.topkdsa import TopkDSA as TopkDSA
from gradtide.collectives.dense import Dense as Dense
from gradtide.collectives.lowrank import PowerSGD as PowerSGD
from gradtide.collectives.momentum_correction import (
    MomentumCorrection as MomentumCorrection,
)
from gradtide.collectives.oktopk import OkTopk as OkTopk
from gradtide.collectives.partitioned import PartitionedTopK as PartitionedTopK
from gradtide.collectives.partitions import Dynamic as Dynamic
from gradtide.collectives.partitions import Even as Even
from gradtide.collectives.topk import TopK as TopK
from gradtide.collectives.topka2a import TopKA2A as TopKA2A
from gradtide.collectives.warmup import Warmup as Warmup

COLLECTIVES = (
    Dense,
    TopK,
    GTopK,
    TopKA2A,
    TopkDSA,
    OkTopk,
    PartitionedTopK,
    CLTk,
    PowerSGD,
    ACPSGD,
)
WRAPPERS = (Warmup, MomentumCorrection)
PARTITIONS = (Even, Dynamic, ByNorm)
