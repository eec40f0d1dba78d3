"""Optimizers whose step is divided among ranks, and several optimizers as one.

Needs torch 2.9 or later.
"""

from gradtide.optim.muon import DistributedMuon
from gradtide.optim.several import Several

__all__ = ["DistributedMuon", "Several"]
