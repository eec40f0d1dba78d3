"""Data parallelism on the user's own module and optimizer, by hooks alone.

Gradients are taken in as backward produces them and leave in buckets. Their means are back
in `.grad` when backward returns; or, under a schedule that updates before the next forward,
they are applied just before a module that reads the parameters runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from gradtide.admit import admit
from gradtide.agree import agree, describe
from gradtide.deferred import DeferredStep
from gradtide.engine import Engine
from gradtide.layout import GradientBucket, Named, Slot, lay_out
from gradtide.ops import AllGather, AllReduce, Broadcast
from gradtide.promise import Promise
from gradtide.scheme import Scheme, check, parse
from gradtide.transport import ProcessGroup, Transport, connect

Buffers: TypeAlias = Literal["broadcast", "local"]


def replicate(
    model: nn.Module,
    optimizer: Optimizer,
    scheme: str | Scheme = "wfbp",
    *,
    process_group: ProcessGroup | None = None,
    buffers: Buffers = "broadcast",
) -> Replica:
    """Average the gradients of `model` over all ranks of `process_group` (None: all).

    A collective call. Every rank passes the same architecture, already on its device, and
    the same scheme (a recipe's name, a constructor call as text, or a Scheme); parameters
    and buffers are overwritten with rank 0's. The module and the optimizer stay the user's:
    train as on one machine. With `buffers="broadcast"` every training forward begins with
    rank 0's buffers, as in DDP; with "local" each rank keeps its own.

    Raises RuntimeError when torch.distributed is not initialised, and ValueError, on every
    rank, where the model, the optimizer or the scheme cannot be used or differ between
    ranks.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    transport = connect(process_group, device)

    def prepare() -> tuple[Scheme, dict[str, str]]:
        chosen = check(scheme) if isinstance(scheme, Scheme) else parse(scheme)
        admit(model, optimizer, chosen.schedule, buffers)
        return chosen, describe(model, chosen)

    try:
        chosen = agree(transport, prepare)
    except (ValueError, TypeError):
        transport.close()
        raise
    return Replica(model, optimizer, chosen, transport, buffers)


class Home:
    """Where a parameter's gradient goes; follows it when the buckets are laid out anew."""

    def __init__(self, home: GradientBucket, slot: Slot) -> None:
        self.move(home, slot)

    def move(self, home: GradientBucket, slot: Slot) -> None:
        self.home, self.slot = home, slot


class Replica:
    """The link between a module, its optimizer and the other ranks.

    Made by `replicate`. All methods are collective calls unless they say otherwise.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        scheme: Scheme,
        transport: Transport,
        buffers: Buffers,
    ) -> None:
        self.model, self.optimizer, self.scheme = model, optimizer, scheme
        self.engine = Engine(transport)
        self._sync_buffers = buffers == "broadcast"
        self._eager = scheme.schedule.launch == "ready"
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        self._homes: dict[nn.Parameter, Home] = {}
        self._lay_out(named[::-1])
        # - The first backward is recorded, so that buckets follow the real order.
        self._recorded: list[str] | None = []
        self._called: set[nn.Module] = set()
        # - Where the current backward stands.
        self._quiet = False  # inside no_sync()
        self._open = False  # between a backward's first gradient and its end
        self._cursor = 0  # buckets launched in this backward
        # - Where the current update stands; empty unless updates are deferred.
        self._held: list[GradientBucket] = []
        self._due: set[GradientBucket] = set()
        self._step: DeferredStep | None = None
        self._used: Callable[[], Any] | None = None
        self._reads: dict[nn.Module, list[GradientBucket]] = {}
        self._handles: list[Any] = []
        self._broadcast([*model.parameters(), *model.buffers()])
        self._attach()

    # - The user's side -----------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally, in `.grad`, without exchanging them."""
        quiet, self._quiet = self._quiet, True
        try:
            yield
        finally:
            self._quiet = quiet

    def clip_grad_norm_(
        self, max_norm: float, *, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Scale the averaged gradients to a total 2-norm of at most `max_norm`.

        Call between backward and step, as torch's function of this name. Returns the exact
        norm before scaling (a scalar), the same on every rank: every rank computes the norm
        of the part of the mean that it owns. Covers all trainable parameters of the model.
        Raises RuntimeError for a non-finite norm if asked to.
        """
        shares = [self._share(home) for home in self._buckets if self._has_mean(home)]
        total = self._norm([own for own, _ in shares])
        if error_if_nonfinite and not torch.isfinite(total):
            raise RuntimeError(f"the norm of the averaged gradients is {total.item()}")
        factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
        if (
            factor.is_cuda or float(factor) != 1.0
        ):  # only the host's value is free to read
            for _, whole in shares:
                whole.mul_(factor.to(whole.dtype))
        return total

    def gather_gradients(self) -> None:
        """Have the averaged gradients in `.grad` now, also under a deferred schedule.

        The next `step()` is then an ordinary one; its second half hides behind nothing.
        """
        if self._held:
            self.engine.release(home.bucket for home in reversed(self._held))
            held, self._held = self._held, []
            for home in held:
                for slot in home.slots:
                    if isinstance(slot.param.grad, Promise):
                        slot.param.grad = None
            self._deliver(held)

    @torch.no_grad()
    def flush(self) -> None:
        """Apply what `step()` has deferred. Local: no rank waits for another's call."""
        for home in reversed(self._buckets):
            self._apply(home)

    def remove(self) -> None:
        """Apply what is deferred and detach: module and optimizer are as before."""
        self.gather_gradients()
        self.flush()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.engine.transport.close()

    # - Hooks -----------------------------------------------------------------------------

    def _attach(self) -> None:
        """Register all hooks; plain functions, so that copies of the module share them."""
        keep = self._handles.append

        for p in self._homes:
            keep(p.register_post_accumulate_grad_hook(self._gradient_hook(p)))
        keep(self.model.register_forward_pre_hook(lambda *_: self._before_forward()))
        keep(self.model.register_forward_hook(lambda *a: self._after_forward(a[-1])))
        if self.scheme.schedule.update != "forward":
            return
        keep(self.optimizer.register_step_pre_hook(lambda *a: self._defer(*a)))
        keep(self.optimizer.register_state_dict_pre_hook(lambda *_: self.flush()))
        keep(self.optimizer.register_load_state_dict_pre_hook(lambda *_: self.flush()))
        for module in self.model.modules():
            keep(module.register_forward_pre_hook(lambda m, _: self._before_read(m)))
            keep(module.register_state_dict_pre_hook(lambda *_: self.flush()))
            keep(module.register_load_state_dict_pre_hook(lambda *_: self.flush()))

    def _before_forward(self) -> None:
        if self._open and torch._C._current_graph_task_id() == -1:
            raise RuntimeError(
                "the last backward pass raised before its end, so the ranks may have sent "
                "different gradients: end the run, or call sync.remove() on every rank and "
                "replicate() again"
            )
        training = self.model.training and torch.is_grad_enabled()
        if self._sync_buffers and training and not self._quiet:
            self._broadcast(list(self.model.buffers()))

    def _after_forward(self, output: Any) -> None:
        """Learn of the backward through the output before any gradient is produced.

        A gradient hook alone could not tell the backward's end from that of a nested one
        (re-entrant activation checkpointing runs backward passes inside backward).
        """
        if torch.is_grad_enabled():
            for leaf in tree_leaves(output):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    leaf.register_hook(lambda _: self._begin())

    def _before_read(self, module: nn.Module) -> None:
        if self._recorded is not None:
            self._called.add(module)
        elif self._due:
            for home in self._reads.get(module, ()):
                self._apply(home)

    # - Backward --------------------------------------------------------------------------

    @torch.no_grad()
    def _begin(self) -> None:
        """A backward pass through the model begins."""
        if self._open:
            return
        self._abandon()
        if self._quiet:
            return
        if self._recorded:
            self._follow(self._recorded)
        self._open = True
        torch.autograd.Variable._execution_engine.queue_callback(self._end)  # type: ignore[no-untyped-call]

    def _gradient_hook(self, p: nn.Parameter) -> Callable[[nn.Parameter], None]:
        """Called when the parameter's gradient is complete.

        Hot path: models have hundreds of parameters, and Python is on backward's way.
        """
        cell = self._homes[p]

        def take(_: nn.Parameter) -> None:
            if self._quiet:
                return
            if not self._open:  # the backward did not start at the model's own output
                self._begin()
            slot, home = cell.slot, cell.home
            if slot.arrived:
                self._take_again(home, slot)
                return
            slot.arrived = True
            home.missing -= 1
            if self._recorded is not None:
                self._recorded.append(slot.name)
            if not home.missing and self._eager:
                self._launch_full()

        take.gradtide = True  # type: ignore[attr-defined]  # how admit() knows its own
        return take

    @torch.no_grad()
    def _launch_full(self) -> None:
        """Send the buckets that are full and have nothing unsent before them."""
        while self._cursor < len(self._buckets):
            if self._buckets[self._cursor].missing:
                break
            self._launch()

    def _take_again(self, home: GradientBucket, slot: Slot) -> None:
        if self._buckets.index(home) < self._cursor:
            raise RuntimeError(
                f"{slot.name} got a second gradient in one backward pass after its bucket "
                "had left: use checkpoint(..., use_reentrant=False), or a scheme with "
                "schedule=SEQUENTIAL"
            )

    @torch.no_grad()
    def _end(self) -> None:
        """The backward pass is over: what got no gradient leaves too, so nobody hangs."""
        self._open = False
        if not any(slot.arrived for home in self._buckets for slot in home.slots):
            return  # torch.autograd.grad(): nothing was accumulated
        while self._cursor < len(self._buckets):
            self._launch()
        self._cursor = 0
        arrived = [slot.arrived for home in self._buckets for slot in home.slots]
        flags = torch.tensor(arrived, dtype=torch.int32)
        self._used = self.engine.ask("used", AllReduce(flags))
        for home in self._buckets:
            home.rearm()
        if self._deferring:
            self._held = list(self._buckets)
            for home in self._buckets:
                for slot in home.slots:
                    promise = self._promises[slot.param]
                    promise.zeroed = False
                    slot.param.grad = promise
        else:
            self._deliver(self._buckets)

    def _launch(self) -> None:
        """Send the next bucket in plan order."""
        home = self._buckets[self._cursor]
        if home in self._due:
            self._refuse_stale(home)
            self._apply(home)
        home.take_in()
        home.bucket.hold = self._deferring
        self.engine.launch(home.bucket)
        self._cursor += 1

    def _refuse_stale(self, home: GradientBucket) -> None:
        """No module read this bucket since step(); then nothing else may have, either."""
        for slot in home.slots:
            if slot.arrived:
                raise RuntimeError(
                    f"{slot.name} was used outside the forward of its module, before its "
                    "deferred update: call sync.flush() before such a forward, or use a "
                    "schedule that updates at step(), such as 'wfbp'"
                )

    def _deliver(self, homes: Sequence[GradientBucket]) -> None:
        for home in homes:
            self.engine.finish(home.bucket)
        self._learn_used()
        for home in homes:
            home.expose()

    def _learn_used(self) -> None:
        """Which parameters got a gradient on some rank: on the others all leave it alone."""
        if self._used is not None:
            counts = self._used().tolist()
            self._used = None
            slots = (slot for home in self._buckets for slot in home.slots)
            for slot, count in zip(slots, counts, strict=True):
                slot.used = count > 0

    # - The deferred update -----------------------------------------------------------------

    @property
    def _deferring(self) -> bool:
        return self.scheme.schedule.update == "forward" and self._recorded is None

    @torch.no_grad()
    def _defer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """step() was called: note what it would do, and let the second halves go."""
        if any(a is not None for a in (*args[1:], kwargs.get("closure"))):
            raise RuntimeError(
                "step(closure) evaluates the model inside the step, which a deferred "
                "update cannot: call step() without a closure, or use 'wfbp'"
            )
        self.flush()
        if not self._held:
            return
        self._step = DeferredStep(optimizer)
        for home in self._held:
            for slot in home.slots:
                promise = self._promises[slot.param]
                slot.wanted = slot.param.grad is promise and not promise.zeroed
                if slot.param.grad is promise:
                    slot.param.grad = None
        self.engine.release(home.bucket for home in reversed(self._held))
        self._due, self._held = set(self._held), []

    def _apply(self, home: GradientBucket) -> None:
        """Carry out the deferred step for one bucket, if it is still due."""
        if home not in self._due:
            return
        assert self._step is not None
        self._due.remove(home)
        self.engine.finish(home.bucket)
        self._learn_used()
        start = time.perf_counter()
        pairs = zip(home.slots, home.gradients(), strict=True)
        updates = [(s.param, mean) for s, mean in pairs if s.wanted and s.used]
        device = home.bucket.load.flat.device.type
        # As at step(): outside the forward's inference mode and autocast.
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            torch.autocast(device, enabled=False),
        ):
            aside = [p.grad for p, _ in updates]  # no_sync() may have begun anew
            for p, mean in updates:
                p.grad = mean
            self._step.apply(p for p, _ in updates)
            for (p, _), grad in zip(updates, aside, strict=True):
                p.grad = grad
        self.engine.applied.append((start, time.perf_counter()))

    def _abandon(self) -> None:
        """Drop means that no step() wanted: a GradScaler skipped it, or zero_grad() did."""
        if not self._held:
            return
        for home in self._held:
            for slot in home.slots:
                grad = slot.param.grad
                if isinstance(grad, Promise):
                    if not grad.zeroed:
                        raise RuntimeError(
                            "two backward passes before one step(): under a deferred "
                            "schedule all but the last belong inside sync.no_sync(); or "
                            "call sync.gather_gradients() between them"
                        )
                    slot.param.grad = None
        for home in self._held:
            self.engine.drop(home.bucket)
            home.clean = True
        self._held = []
        self._learn_used()

    def _unscale(self, asked: Promise, found_inf: Tensor, inv_scale: Tensor) -> None:
        """A GradScaler's check and scaling, by the owners, for all tensors of a kind."""
        shares = [
            whole
            for home in self._held
            for _, whole in [self._share(home)]
            if (whole.dtype, whole.device) == (asked.dtype, asked.device)
        ]
        own = torch.zeros_like(found_inf)
        torch._amp_foreach_non_finite_check_and_unscale_(shares, own, inv_scale)
        anywhere = self.engine.ask("found_inf", AllReduce(own))()
        found_inf.copy_(torch.maximum(found_inf, anywhere.clamp(max=1.0)))

    # - The owner's part --------------------------------------------------------------------

    def _has_mean(self, home: GradientBucket) -> bool:
        return home in self._held or home.mean is not None

    def _share(self, home: GradientBucket) -> tuple[Tensor, Tensor]:
        """This rank's part of the mean, and all of the mean that this rank holds."""
        if home in self._held:
            part, mean = self.engine.held(home.bucket)
            if part is not None:
                return part, part
        else:
            mean = home.mean
            self._refuse_replaced(home)
        assert mean is not None
        rank, size = self.engine.transport.group
        return mean.view(size, -1)[rank], mean

    def _refuse_replaced(self, home: GradientBucket) -> None:
        assert home.mean is not None
        begin, end = home.mean.data_ptr(), home.mean.nbytes
        for slot in home.slots:
            grad = slot.param.grad
            if grad is not None and not 0 <= grad.data_ptr() - begin < max(end, 1):
                raise RuntimeError(
                    f"{slot.name}.grad is no longer the tensor that backward left there: "
                    "clip with torch.nn.utils.clip_grad_norm_ instead"
                )

    def _norm(self, parts: Sequence[Tensor]) -> Tensor:
        squares = [
            torch.linalg.vector_norm(part, dtype=_wide(part.dtype)).double().square()
            for part in parts
        ]
        device = squares[0].device if squares else torch.device("cpu")
        own = torch.zeros(1, dtype=torch.float64, device=device)
        for square in squares:
            own += square.to(device)
        all_parts = self.engine.ask("norm", AllGather(own))()
        return torch.sqrt(all_parts.sum()).float()

    # - Set-up ------------------------------------------------------------------------------

    def _lay_out(self, ready: Sequence[Named]) -> None:
        size = self.engine.transport.group.size
        self._named = ready
        self._buckets = lay_out(ready, self.scheme.fusion, self.scheme.collective, size)
        for home in self._buckets:
            for slot in home.slots:
                self._homes.setdefault(slot.param, Home(home, slot)).move(home, slot)
        if self.scheme.schedule.update == "forward":
            self._promises = {p: Promise.of(p, self._unscale) for _, p in ready}

    def _follow(self, recorded: Sequence[str]) -> None:
        """Lay the buckets out anew, in the order in which rank 0's gradients got ready."""
        self._recorded = None
        order = self.engine.transport.gather_objects(list(recorded))[0]
        place = {name: i for i, name in enumerate(order)}
        before = {p: (home.home, home.slot) for p, home in self._homes.items()}
        self._lay_out(sorted(self._named, key=lambda n: place.get(n[0], len(place))))
        for p, (old, slot) in before.items():
            if not old.clean:
                new = self._homes[p]
                left = slot.of(old.bucket.load.flat)
                new.slot.of(new.home.bucket.load.flat).copy_(left)
                new.home.clean = False
        self._find_reads()

    def _find_reads(self) -> None:
        """Which buckets a module needs before it runs.

        The parameters of a module whose forward was never called (an attention's output
        projection, say) are read by the nearest module above it that was.
        """
        modules = dict(self.model.named_modules(remove_duplicate=False))
        reads: dict[nn.Module, set[GradientBucket]] = {}
        for name, module in modules.items():
            own = [p for p in module.parameters(recurse=False) if p in self._homes]
            while modules[name] not in self._called and name:
                name = name.rpartition(".")[0]
            reads.setdefault(modules[name], set()).update(
                self._homes[p].home for p in own
            )
        last_first = {home: -i for i, home in enumerate(self._buckets)}
        self._reads = {
            module: sorted(homes, key=last_first.__getitem__)
            for module, homes in reads.items()
            if homes
        }

    def _broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite tensors with rank 0's, one message per dtype and device."""
        kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for tensor in tensors:
            kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
        for alike in kinds.values():
            flat = torch.cat([tensor.reshape(-1) for tensor in alike])
            self.engine.ask("broadcast", Broadcast(flat, 0))()
            if self.engine.transport.group.rank != 0:
                pieces = flat.split([tensor.numel() for tensor in alike])
                for tensor, piece in zip(alike, pieces, strict=True):
                    tensor.copy_(piece.view(tensor.shape))


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute a norm in."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
