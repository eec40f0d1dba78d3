"""Schemes: what is exchanged, in which buckets, when, and what is made of it.

auto.py      `Auto`, which stands for what a plan will choose
config.py    `Scheme`, and which parts go together
recipes.py   names of schemes, and the one grammar in which they are varied
parser.py    texts: a recipe or a constructor call; `parse(repr(scheme)) == scheme`
spelling.py  texts of older versions in today's spelling, for the message that says so
"""

from gradtide.scheme.auto import Auto as Auto
from gradtide.scheme.config import Scheme as Scheme
from gradtide.scheme.config import check as check
from gradtide.scheme.config import knows_optimizer as knows_optimizer
from gradtide.scheme.config import start as start
from gradtide.scheme.config import takes_momentum_over as takes_momentum_over
from gradtide.scheme.config import undecided as undecided
from gradtide.scheme.config import with_levels as with_levels
from gradtide.scheme.parser import NAMES as NAMES
from gradtide.scheme.parser import as_scheme as as_scheme
from gradtide.scheme.parser import parse as parse
from gradtide.scheme.recipes import RECIPES as RECIPES
from gradtide.scheme.recipes import prepared as prepared
from gradtide.scheme.recipes import recipe as recipe
