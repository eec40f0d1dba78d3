"""K-FAC as a part of a scheme: hyper-parameters only."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, TypeAlias, get_args

from gradtide.core.fields import check_fields, refuse
from gradtide.fusion import Fusion

Distribution: TypeAlias = Literal["mpd", "spd", "pad", "dp"]
DISTRIBUTIONS: tuple[Distribution, ...] = get_args(Distribution)


@dataclass(frozen=True)
class KFAC:
    """Precondition averaged gradients by Kronecker factors of the curvature.

    The method is by Martens and Grosse (ICML 2015). For a layer with inputs a (and a
    one for its bias) and gradients g of its outputs, the means A of a a^T and G of g
    g^T enter running averages. The gradient D becomes (G + gamma_G I)^-1 D (A + gamma_A
    I)^-1 before the optimizer sees it. What is neither Linear nor a convolution gets
    plain gradients.

    Cost: `distribution` says who computes what, and what travels on top of the
    gradients. For F elements of factors and N of gradients (float32, symmetric matrices
    as triangles) a rank sends, times (P - 1) / P:

    - "mpd": 12 F bytes. All-reduce of the factors after backward; inverses are made
      round-robin (Osawa et al., CVPR 2019; Pauloski et al., SC 2020).
    - "spd": 8 F to 12 F bytes. Factors leave as they get ready, fused. Inverses are
      made where that takes the least time, small ones everywhere, and gathered (Shi et
      al., ICDCS 2021).
    - "pad": 4 F bytes, and the lesser of 4 F and 4 N. Factors are reduced to their
      owners only (Shi et al., INFOCOM 2023).
    - "dp": 4 N bytes. A layer's owner builds its factors from its own batch, and only
      preconditioned gradients travel (Zhang et al., Scalable K-FAC training for deep
      neural networks with distributed preconditioning, 2022).

    Residual: none. Factors are exact means, but for `wire`.

    Args:
        distribution: "mpd", "spd", "pad" or "dp", as above. The default, "spd",
            computes what one process would of the whole batch, and overlaps factors and
            inverses with backward.
        damping: What is added to the eigenvalues of the curvature, above 0; to those of
            A and G about its square root each. Larger values are closer to plain
            gradients. The default, 0.003, is a customary start.
        decay: The share of the running averages that a step leaves, at least 0 and less
            than 1. Larger values remember longer. The default, 0.95, is an average over
            about 20 steps.
        kl_clip: The limit of a step's length, above 0, as the learning rate squared
            times the product of gradient and preconditioned gradient, over all layers.
            Larger values allow longer steps; None is no limit, and lets updates of DEAR
            overlap. The default, 0.001, is the customary one.
        factor_every: Steps from one set of factors to the next, 1 or more. The default,
            1, is what the papers compare; 10 sends a tenth.
        inverse_every: Steps from one set of inverses to the next, a multiple of
            `factor_every`. The default, 1, is what the papers compare; 100 is usual in
            practice.
        form: "inverse" damps and inverts each factor. "eigen" takes its eigenvectors,
            which damps the product exactly, and takes longer; so the first is the
            default.
        wire: What factors are cast to when they travel: "bf16" halves their bytes,
            None, the default, rounds nothing.
        workers: The share of ranks that precondition a layer themselves (KAISA,
            Pauloski et al., SC 2021), above 0 and at most 1. With 1 inverses are sent
            to all; with less they go to fewer ranks, which send preconditioned
            gradients to the others: less memory, more messages. None, the default,
            takes all ranks for "mpd" and "spd", one a layer for "dp", and for "pad"
            whichever takes less time to hand out.
        samples: What the loss is a mean over: "batch", the default, is the rows of the
            first tensor that the model is given, as for most losses. "tokens" is all
            positions of its sequences, as for language models.
        placement: What decides on who inverts what. "cubic", the default, goes by the
            cube of a factor's rows, so that two runs are the same to the bit.
            "measured" goes by what inversions and messages take on rank 0 at start-up,
            and without a `fusion` also decides by it which factors travel together;
            runs may differ.
        max_dim: The largest number of inputs or outputs, 1 or more, of a layer that is
            preconditioned. Larger layers get plain gradients. None is no limit. A
            factor of the default, 8192 rows, has 268 MB in float32.
        fusion: Which factors travel together, as for gradients. None, the default, is
            `BySize(25.0, pieces=4)`, or what was measured.

    Raises:
        ValueError: A field is of the wrong kind or outside its range, or two of them do
            not go together.
    """

    distribution: Distribution = "spd"
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
        check_fields(self)
        clip, workers, factors = self.kl_clip, self.workers, self.factor_every
        every, steps = self.inverse_every, "a number of steps, 1 or more"
        wrong = {
            f"KFAC(damping={self.damping!r}): a positive number": self.damping <= 0,
            f"KFAC(decay={self.decay!r}): at least 0, less than 1": (
                not 0 <= self.decay < 1
            ),
            f"KFAC(kl_clip={clip!r}): a positive number, or None for none": (
                clip is not None and clip <= 0
            ),
            f"KFAC(factor_every={factors!r}): {steps}": factors < 1,
            f"KFAC(inverse_every={every!r}): {steps}": every < 1,
            f"KFAC(workers={workers!r}): a share of the ranks, over 0, up to 1": (
                workers is not None and not 0 < workers <= 1
            ),
            f"KFAC(inverse_every={every}, factor_every={factors}): inverses are made "
            "of new factors, so inverse_every is a multiple of factor_every": (
                bool(every % max(factors, 1))
            ),
            "KFAC('dp', workers=...): every layer has one worker there": (
                self.distribution == "dp" and workers not in (None, 1)
            ),
        }
        refuse(wrong)

    @property
    def early(self) -> bool:
        """Whether factors leave when they are ready, and not after backward."""
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
