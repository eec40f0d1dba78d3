"""The averaging algorithms; a new one is one file and one line here."""

from gradtide.collectives._entries import Selecting as Selecting
from gradtide.collectives.agreed import Agreed as Agreed
from gradtide.collectives.auto import Auto as Auto
from gradtide.collectives.corrected import Corrected as Corrected
from gradtide.collectives.dense import Dense as Dense
from gradtide.collectives.gtopk import GTopK as GTopK
from gradtide.collectives.leader import Leader as Leader
from gradtide.collectives.levels import TwoLevel as TwoLevel
from gradtide.collectives.lowrank import ACPSGD as ACPSGD
from gradtide.collectives.lowrank import PowerSGD as PowerSGD
from gradtide.collectives.oktopk import OkTopk as OkTopk
from gradtide.collectives.partitions import ByNorm as ByNorm
from gradtide.collectives.partitions import Dynamic as Dynamic
from gradtide.collectives.partitions import Even as Even
from gradtide.collectives.topk import TopK as TopK
from gradtide.collectives.topka2a import TopKA2A as TopKA2A
from gradtide.collectives.topka2a import TopkDSA as TopkDSA
from gradtide.collectives.warmup import Warmup as Warmup

COLLECTIVES = (
    Dense,
    TopK,
    GTopK,
    TopKA2A,
    TopkDSA,
    OkTopk,
    Agreed,
    Leader,
    PowerSGD,
    ACPSGD,
)
WRAPPERS = (Warmup, Corrected, TwoLevel)
PARTITIONS = (Even, Dynamic, ByNorm)
