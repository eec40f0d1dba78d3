"""What K-FAC learns from one step: covariances of layers' inputs and output gradients.

A = E[a a^T] and G = E[g g^T] (Martens and Grosse, 2015; for convolutions Grosse and
Martens, 2016), where g is the gradient of one sample's loss:

- The loss is a mean over N samples, so what autograd gives, d, is g / N. Over all rows
  (samples, and positions of each) A = sum a a^T / rows and G = N sum d d^T: positions
  are treated as independent, and their contributions to a sample's gradient add up.
- Several forwards and backwards, of one layer or one step, are one larger batch: rows
  and samples are added up. The loss has to be divided accordingly, as always.
- A is taken in the forward and G in the backward, when they are in the cache; nothing
  is kept of either but the sums.

Knows nothing of other ranks, of running averages and of inverses.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from gradtide.core.torch_internals import base_of
from gradtide.core.torch_internals.autograd import Hook, in_backward, is_traced
from gradtide.kfac.layers import Factor, Kind, Layer, sequence
from gradtide.kfac.packing import add_gram
from gradtide.kfac.samples import batch

# Told of a factor as soon as it is complete: fp32 [groups, d, d], of which only the
# upper triangle counts; it is valid during the call, and may be overwritten.
Ready: TypeAlias = Callable[[Layer, Kind, Tensor], None]


_SEES = (  # why it is called, also where torch.compile would trace it
    "K-FAC sees what goes into each layer, which is outside of compiled code: compile "
    "what is between layers, or use a scheme without K-FAC"
)


@dataclass
class _Sum:
    """A factor in the making."""

    factor: Tensor | None = None
    weight: int = 0  # rows of A or samples of G in `factor`
    calls: int = 0  # that were seen in this step, outside of `quiet`
    expected: int = 0  # calls of the last step; 0: not known, only `finish` completes
    done: bool = False
    at: float = 0.0  # when something was added last, of time.perf_counter()
    seconds: float = 0.0  # that it took in this step


class Statistics:
    """The factors of one step, from hooks that are there only while they are wanted.

    `arm()` before the forward, `finish()` after the last backward of a step. Forwards
    without gradients, and of modules in eval mode, do not count. While `quiet` is set
    (micro-batches that are not the last) sums are only added to.

    A layer that is called several times in a step is complete after as many calls as
    in the last step; what is not complete by then, and everything in the first step,
    is handed out by `finish()`. A call beyond that number is left out of the factor.

    Activation checkpointing: what is computed again is not counted again. With
    use_reentrant=True, whose first forward is without gradients, the second counts, and
    A gets ready in the backward.

    `scale` is asked once a step for what the loss was multiplied by (`GradScaler`'s
    `get_scale`; None: by nothing), and `samples` in each forward for the number of
    samples that the loss is a mean over: `batch`, `tokens` or the user's own. Where the
    model's own forward is not called, the first dimension of a layer's input counts as
    samples.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Layer],
        ready: Ready,
        samples: Callable[[tuple[Any, ...], dict[str, Any]], int] = batch,
        scale: Callable[[], float] | None = None,
    ) -> None:
        self.quiet = False
        self.trains: Callable[[], bool] = lambda: True  # this thread; others only read
        self.seconds = 0.0  # that factors took, with what `ready` did with them
        self._model, self._ready = model, ready
        self._ask_samples, self._ask_scale = samples, scale
        self._sums = {factor: _Sum() for factor in sequence(layers)}
        self._seen: set[Layer] = set()  # in a forward of this step
        self._samples = 0  # in all forwards of this step
        self._counted = False  # the forward under way has been added to `_samples`
        self._scale: float | None = None
        self._scratch: dict[torch.device, Tensor] = {}
        self._handles: list[Any] = []

    # - The life of a step -------------------------------------------------------------

    @property
    def armed(self) -> bool:
        return bool(self._handles)

    def arm(self) -> None:
        """Collect from now on; what an unfinished step has collected is dropped."""
        self.disarm()
        keep = self._handles.append
        for layer, kind in self._sums:
            for module in layer.modules if kind == "A" else ():
                hook = self._hook(partial(self._after_layer, layer))
                keep(module.register_forward_hook(hook, with_kwargs=True))
        before = self._hook(self._before_model)
        keep(self._model.register_forward_pre_hook(before, with_kwargs=True))

    def _hook(self, call: Callable[..., None]) -> Hook:
        """A hook that sees nothing of a thread that only reads.

        It may be removed while that is in the forward: torch leaves out `kwargs` then.
        """

        def seen(*given: Any) -> None:
            if (self.trains() or in_backward()) and not is_traced():
                call(*given)

        return Hook(seen, needed=_SEES)

    def disarm(self) -> None:
        """Drop what was collected, and cost nothing from now on."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._seen.clear()
        self._samples, self._counted, self._scale = 0, False, None
        for factor, part in self._sums.items():
            self._sums[factor] = _Sum(expected=part.expected)

    def times(self) -> dict[Factor, float]:
        """When each factor of this step was last added to, seconds since the first.

        What this rank had nothing for comes last. Before `finish`.
        """
        moments = {factor: part.at for factor, part in self._sums.items()}
        seen = [at for at in moments.values() if at] or [0.0]
        return {f: (at or max(seen)) - min(seen) for f, at in moments.items()}

    def spent(self) -> dict[Factor, float]:
        """Seconds that each factor of this step took. Before `finish`."""
        return {factor: part.seconds for factor, part in self._sums.items()}

    def finish(self) -> list[Factor]:
        """Hand out what is left, A in order of the layers and G in reverse; disarm.

        Returns the factors that this step has nothing for: of layers that were not
        used, or whose output got no gradient.
        """
        missing = []
        for factor, part in self._sums.items():
            part.expected = part.calls or part.expected
            if part.factor is not None:
                self._hand_out(factor, part)
            elif not part.done:
                missing.append(factor)
        self.disarm()
        return missing

    # - Hooks --------------------------------------------------------------------------

    def _before_model(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        if self._model.training and torch.is_grad_enabled() and not in_backward():
            self._samples += self._ask_samples(args, kwargs)
            self._counted = True

    def _after_layer(
        self, layer: Layer, module: nn.Module, args: Any, kwargs: Any, output: Tensor
    ) -> None:
        """A forward of the module is over: take A, and wait for its gradient."""
        if not (module.training and output.requires_grad and output.numel()):
            return
        if output.dtype is torch.float16:  # which underflows unless losses are scaled
            self.check_scale()
        again = in_backward()
        if again and layer in self._seen:
            return  # what is computed again is not counted
        if not again:
            self._seen.add(layer)
        x: Tensor = args[0] if args else kwargs["input"]
        if not (self._counted or (again and self._samples)):
            self._samples += x.shape[0]
            self._counted = True
        rows = output.numel() // layer.weight.shape[0]
        self._add((layer, "A"), rows, lambda: layer.inputs(module, x.detach()))
        # Of an input with more than two dimensions Linear returns a view, whose node an
        # operation in place behind it (ReLU) cuts out of the graph; not so the base's.
        base = base_of(output)
        if base is not None and base.numel() == output.numel() and base.requires_grad:
            output = base
        hook = partial(self._after_gradient, layer)
        output.register_hook(hook)  # type: ignore[no-untyped-call]

    def _after_gradient(self, layer: Layer, g: Tensor) -> None:
        if not self.armed:
            return  # a backward through the graph of a step that is over
        self._counted = False
        self._add((layer, "G"), self._samples, lambda: [layer.outputs(g.detach())])

    # - Sums ---------------------------------------------------------------------------

    def _add(
        self, factor: Factor, weight: int, rows: Callable[[], Iterable[Tensor]]
    ) -> None:
        """Add rows to a factor. `weight`: rows of A, or all samples so far for G."""
        (layer, kind), part = factor, self._sums[factor]
        part.calls += not self.quiet
        if part.done:
            return
        complete = not self.quiet and part.calls == part.expected
        if kind == "A":
            old, part.weight = part.weight, part.weight + weight
            alpha, beta = 1 / part.weight, old / part.weight
        else:
            if self._scale is None:
                self._scale = 1.0 if self._ask_scale is None else self._ask_scale()
            alpha, beta = weight / self._scale**2, weight / (part.weight or 1)
            part.weight = weight
        device, start = layer.weight.device, time.perf_counter()
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            if part.factor is None:
                beta = 0.0
                part.factor = self._matrix(factor, temporary=complete)
            bias = kind == "A" and layer.bias is not None
            add_gram(part.factor, rows(), alpha, beta, bias)
            if complete:
                self._hand_out(factor, part)
        if not self.quiet:
            part.at = time.perf_counter()
        spent = time.perf_counter() - start
        part.seconds += spent
        self.seconds += spent

    def _hand_out(self, factor: Factor, part: _Sum) -> None:
        made, part.factor, part.done = part.factor, None, True
        assert made is not None
        self._ready(*factor, made)

    def _matrix(self, factor: Factor, temporary: bool) -> Tensor:
        """Memory for a factor: its own, or what all share that leave at once."""
        layer, kind = factor
        shape, device = layer.shape(kind), layer.weight.device
        if not temporary:
            return torch.empty(shape, device=device, dtype=torch.float32)
        if device not in self._scratch:
            length = max(prod(other.shape(k)) for other, k in self._sums)
            self._scratch[device] = torch.empty(
                length, device=device, dtype=torch.float32
            )
        return self._scratch[device][: prod(shape)].view(shape)

    def check_scale(self) -> None:
        """The loss was scaled: raises RuntimeError where nobody said by how much."""
        if self._ask_scale is None:
            raise RuntimeError(
                "K-FAC's factors are squares of gradients, so it has to know by what a "
                "GradScaler multiplies the loss: call replicate(..., "
                "grad_scaler=scaler), for float16 without one with "
                "torch.amp.GradScaler(enabled=False)"
            )
