"""The scheme `auto`: profile the first steps, plan, and switch."""

from gradtide.planner.auto.selector import AutoSelector as AutoSelector
