"""Which gradients travel together: pure functions from tensor sizes to slices."""

from gradtide.fusion.formulas import BySize as BySize
from gradtide.fusion.formulas import Cost as Cost
from gradtide.fusion.formulas import Cuts as Cuts
from gradtide.fusion.formulas import Fusion as Fusion
from gradtide.fusion.formulas import MgWfbp as MgWfbp
from gradtide.fusion.formulas import PerTensor as PerTensor
from gradtide.fusion.formulas import Trace as Trace
from gradtide.fusion.formulas import overlapped as overlapped
from gradtide.fusion.search import Bayesian as Bayesian
from gradtide.fusion.search import BinarySearch as BinarySearch
from gradtide.fusion.search import Search as Search
from gradtide.fusion.search import Trial as Trial
from gradtide.fusion.search import best as best
from gradtide.fusion.search import search as search

# In the order in which they are listed; the parser finds them here.
FUSIONS = (BySize, PerTensor, Cuts, MgWfbp, BinarySearch, Bayesian)
