"""Finding out during training which fusion suits it."""

from gradtide.planner.tuning.online import Tuner as Tuner
