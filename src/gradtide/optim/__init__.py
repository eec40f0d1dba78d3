"""Optimizers whose step is divided among ranks. Needs torch 2.9 or later."""

from gradtide.optim.muon import DistributedMuon

__all__ = ["DistributedMuon"]
