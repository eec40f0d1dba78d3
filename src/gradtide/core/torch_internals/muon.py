"""Of torch's Muon: what it does with a matrix."""

from __future__ import annotations

from torch.optim._muon import _adjust_lr as adjust_lr
from torch.optim._muon import _zeropower_via_newtonschulz as orthogonalize

__all__ = ["adjust_lr", "orthogonalize"]
