"""The scheme `auto`: profile the first steps, plan, and switch."""

from gradtide.auto.pilot import Pilot as Pilot
from gradtide.auto.pilot import start as start
from gradtide.auto.pilot import undecided as undecided
