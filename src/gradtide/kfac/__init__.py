"""K-FAC over many ranks: curvature is summed, inverted and applied where it pays."""

from gradtide.kfac.config import DISTRIBUTIONS as DISTRIBUTIONS
from gradtide.kfac.config import KFAC as KFAC
