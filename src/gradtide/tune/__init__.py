"""Finding out during training which fusion suits it."""

from gradtide.tune.online import Tuner as Tuner
