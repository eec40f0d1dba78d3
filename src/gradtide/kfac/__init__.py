"""K-FAC over many ranks: curvature that is summed, inverted and applied where it pays.

config.py          the hyper-parameters
layers.py          which layers are preconditioned, and their gradients as matrices
statistics.py      what they see in forward and backward, as factors
packing.py         symmetric matrices as vectors
invert.py          damped inverses, and what they cost
assign.py          who inverts what
distributions.py   who sums, inverts and preconditions what: mpd, spd, pad, dp
flows.py           how sums and inverses travel
preconditioner.py  all of it, in a model and an engine
state.py           what has to be saved of it
"""

from gradtide.kfac.config import DISTRIBUTIONS as DISTRIBUTIONS
from gradtide.kfac.config import KFAC as KFAC
