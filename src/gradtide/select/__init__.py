"""Which entries are worth sending: selectors, local and pure.

A new one is one file and one line here.
"""

from gradtide.select.base import Selector as Selector
from gradtide.select.base import largest as largest
from gradtide.select.exact import Exact as Exact
from gradtide.select.threshold import Threshold as Threshold

SELECTORS = (Exact, Threshold)
