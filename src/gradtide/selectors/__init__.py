"""Which entries are worth sending: selectors, local and pure."""

from gradtide.selectors.kernels import largest as largest
from gradtide.selectors.selectors import SELECTORS as SELECTORS
from gradtide.selectors.selectors import Exact as Exact
from gradtide.selectors.selectors import Selector as Selector
from gradtide.selectors.selectors import Threshold as Threshold
