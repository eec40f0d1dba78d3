"""K-FAC over many ranks: curvature that is summed, inverted and applied where it pays.

config.py          the hyper-parameters
layers.py          which layers are preconditioned, and their gradients as matrices
statistics.py      what they see in forward and backward, as factors
packing.py         symmetric matrices: sums of outer products, and as vectors
invert.py          damped inverses
costs.py           how long inversions and messages take, as all ranks agree on it
assign.py          who inverts what
distributions.py   mpd, spd, pad and dp as assignments
buckets.py         factors on their way to being summed
flows.py           how sums and inverses travel
curvature.py       what a rank knows of one layer, and makes of it
sharing.py         what is handed out of inverses, or of what these make
parts.py           what of it computes, and where; can be replaced
preconditioner.py  all of it, in a model and an engine
stages.py          where the time goes
"""

from gradtide.kfac.config import DISTRIBUTIONS as DISTRIBUTIONS
from gradtide.kfac.config import KFAC as KFAC
