"""K-FAC as a part of a scheme: hyper-parameters only."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from gradtide.fusion import Fusion

DISTRIBUTIONS = ("mpd", "spd", "pad", "dp")


@dataclass(frozen=True)
class KFAC:
    """Precondition averaged gradients by Kronecker factors (Martens and Grosse, 2015).

    For a layer with inputs a (with a column of ones for the bias) and gradients g of
    its outputs, A = mean of a a^T and G = mean of g g^T are averaged over steps, and
    the gradient D becomes (G + gamma_G I)^-1 D (A + gamma_A I)^-1 before the optimizer
    sees it. `distribution` says who computes what:

    - "mpd": all-reduce of the factors after backward, inverted round-robin
      (Pauloski et al., SC 2020; Osawa et al., CVPR 2019).
    - "spd": factors leave as they get ready, fused; inverted where time is least, small
      ones everywhere; inverses are gathered (Shi et al., ICDCS 2021).
    - "pad": factors are reduced to their owners only (Shi et al., INFOCOM 2023).
    - "dp": a layer's owner builds its factors from its own batch; nothing but
      preconditioned gradients travels (Zhang et al., 2022).

    `workers` is the share of ranks that precondition a layer themselves (KAISA,
    Pauloski et al., SC 2021): 1 sends inverses to all, less sends them to fewer ranks,
    which send preconditioned gradients to the others; less memory, more messages.
    Without it "mpd" and "spd" have all ranks work, "dp" one for each layer, and "pad"
    either, whichever takes less time to hand out (`distributions.share`).

    `placement` goes by the cube of the factors' rows, which is the same in every run;
    or, "measured", by what inversions and messages take on rank 0 at start-up. `fusion`
    says which factors travel together. Without one, and with "measured", "spd" and
    "pad" decide that after the forward and backward of the first step, from the times
    at which factors were there; "pad" together with the placement. What is neither
    Linear nor a convolution, or has more than `max_dim` inputs or outputs, gets plain
    gradients.
    """

    distribution: Literal["mpd", "spd", "pad", "dp"] = "spd"
    damping: float = 0.003  # larger => closer to plain gradients
    decay: float = 0.95  # of the running factors; larger => a longer memory
    kl_clip: float | None = 0.001  # larger => longer steps; None: no limit
    factor_every: int = 1  # steps between factors
    inverse_every: int = 1  # steps between inverses
    form: Literal["inverse", "eigen"] = "inverse"
    wire: Literal["bf16"] | None = None  # what factors are cast to when they travel
    workers: float | None = None
    samples: Literal["batch", "tokens"] = "batch"  # what the loss is a mean over
    placement: Literal["cubic", "measured"] = "cubic"
    max_dim: int | None = 8192  # rows of a factor; larger layers are left alone
    fusion: Fusion | None = None  # None: BySize(25.0, pieces=4), or as measured

    def __post_init__(self) -> None:
        for name, allowed in (
            ("distribution", DISTRIBUTIONS),
            ("form", ("inverse", "eigen")),
            ("wire", ("bf16", None)),
            ("samples", ("batch", "tokens")),
            ("placement", ("cubic", "measured")),
        ):
            value = getattr(self, name)
            if value not in allowed:
                listed = ", ".join(map(repr, allowed))
                raise ValueError(f"KFAC({name}={value!r}): {name} is one of {listed}")
        for name in ("factor_every", "inverse_every"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(
                    f"KFAC({name}={value!r}): a number of steps, 1 or more"
                )
        if self.inverse_every % self.factor_every:
            raise ValueError(
                f"KFAC(inverse_every={self.inverse_every}, "
                f"factor_every={self.factor_every}): inverses are made of new factors, "
                "so inverse_every is a multiple of factor_every"
            )
        self._check_numbers()

    def _check_numbers(self) -> None:
        if not self.damping > 0:
            raise ValueError(f"KFAC(damping={self.damping!r}): a positive number")
        if not 0 <= self.decay < 1:
            raise ValueError(f"KFAC(decay={self.decay!r}): at least 0, less than 1")
        if self.kl_clip is not None and not self.kl_clip > 0:
            raise ValueError(
                f"KFAC(kl_clip={self.kl_clip!r}): a positive number, or None for none"
            )
        if self.workers is not None and not 0 < self.workers <= 1:
            raise ValueError(
                f"KFAC(workers={self.workers!r}): a share of the ranks, over 0, up to 1"
            )
        if self.distribution == "dp" and self.workers not in (None, 1):
            raise ValueError(
                "KFAC('dp', workers=...): every layer has one worker there"
            )
        if self.fusion is not None and (
            isinstance(self.fusion, type) or not callable(self.fusion)
        ):
            raise ValueError(f"KFAC(fusion={self.fusion!r}): not a fusion")

    @property
    def early(self) -> bool:
        """Whether factors leave when they are ready, not after backward."""
        return self.distribution in ("spd", "pad")

    @property
    def planned(self) -> bool:
        """Whether fusion is decided from the times of a step."""
        return self.early and self.fusion is None and self.placement == "measured"

    def __repr__(self) -> str:
        """The constructor call with what differs from the defaults."""
        changed = [
            f"{f.name}={getattr(self, f.name)!r}"
            for f in fields(self)[1:]
            if getattr(self, f.name) != f.default
        ]
        return f"KFAC({', '.join([repr(self.distribution), *changed])})"
