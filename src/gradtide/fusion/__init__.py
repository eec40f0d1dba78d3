"""Which gradients travel together: pure functions from tensor sizes to slices."""

from gradtide.fusion.base import Cost, Fusion, Trace
from gradtide.fusion.mgwfbp import MgWfbp, overlapped
from gradtide.fusion.search import Bayesian, BinarySearch, Search, Trial, best, search
from gradtide.fusion.sizes import BySize, Cuts, PerTensor

# In the order in which they are listed; the parser finds them here.
FUSIONS = (BySize, PerTensor, Cuts, MgWfbp, BinarySearch, Bayesian)

__all__ = [
    "FUSIONS",
    "Bayesian",
    "BinarySearch",
    "BySize",
    "Cost",
    "Cuts",
    "Fusion",
    "MgWfbp",
    "PerTensor",
    "Search",
    "Trace",
    "Trial",
    "best",
    "overlapped",
    "search",
]
