"""What can be trained, and what all ranks must have in common.

Each rank checks for itself what it is given, then all compare, before anything else is
exchanged. A `SetupGuard` checks at every step what was added since.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from operator import is_
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradtide.core.fields import refuse
from gradtide.core.payload import settled, traits, wire_of
from gradtide.core.torch_internals import accumulation_hooks, tables
from gradtide.core.torch_internals.autograd import Hook
from gradtide.core.torch_internals.compilation import is_scripted, untraced
from gradtide.core.torch_internals.distributed import in_ddp
from gradtide.runtime.layout.broadcast import INTEGERS
from gradtide.runtime.layout.parameters import (
    averaged,
    shared_buffers,
    shared_parameters,
)
from gradtide.runtime.optimizer.deferred_step import Divides, holds
from gradtide.scheme import Scheme, undecided
from gradtide.transport import Transport, shards

if TYPE_CHECKING:
    from gradtide.core.grace import Grace

Signature: TypeAlias = Mapping[str, Any]
T = TypeVar("T")

# Where torch's own ways to average gradients are defined: DistributedDataParallel,
# replicate() and FullyShardedDataParallel, as classes of a module. What fully_shard()
# does is seen in the parameters.
EXCHANGING = (
    "torch.nn.parallel.distributed",
    "torch.distributed.fsdp.fully_sharded_data_parallel",
    "torch.distributed._composable",
)


def validate(
    model: nn.Module,
    buffers: str,
    check_every: int,
    ranks: Sequence[int],
    own: object = None,
) -> None:
    """Raise ValueError, naming the remedy, for what cannot be replicated.

    `ranks` are to do it, by their numbers in the default group. What `own` averages
    already is no hindrance.
    """
    for name, module in model.named_modules():
        for kind in type(module).__mro__:
            if kind.__module__.startswith(EXCHANGING):
                own = type(module)
                raise ValueError(
                    f"{name or 'the model'} is a {own.__name__} ({own.__module__}), "
                    "which exchanges gradients itself: pass the "
                    "plain module, or one that fully_shard() has sharded"
                )
        refuse_sparse(name or "the model", module)
    trainable = averaged(model)
    if not trainable:
        raise ValueError("no parameter of the model requires a gradient")
    for name, p in trainable:
        kind, reason = type(shards.local(p).data), shards.refusal(p, ranks)
        unfit = {
            f"{name} is lazy and has no shape yet: run one forward before "
            "replicate()": isinstance(p, nn.parameter.UninitializedParameter),
            f"{name} is on the meta device: materialise the model first": p.is_meta,
            f"{name} {reason}": reason is not None,
            f"{name} is a {kind.__name__}: gradtide replicates plain tensors, and "
            "DTensors of these": kind is not torch.Tensor,
            f"{name} is replicated already: call sync.remove() first; or, if two "
            "models share it, replicate one that holds both, with one optimizer: "
            "nn.ModuleList([a, b])": any(one is not own for one in owners(p)),
        }
        refuse(unfit)
    left, counts = shards.unmanaged(model), type(check_every) is int
    odd = next((n for n, b in shared_buffers(model) if not is_dense(b)), None)
    wrong = {
        f"the buffer {odd} is sparse, packed or on the meta device, and does not "
        "travel: keep it dense, or name it in the module's "
        "_ddp_params_and_buffers_to_ignore": odd is not None,
        f"{left} is not sharded by fully_shard(), as others are, or is whole at "
        "the moment: each rank inside would have a gradient of its own. Call "
        "fully_shard() on the model itself, too, without ignored_params, and "
        "model.reshard() before replicate(); or freeze it": left is not None,
        "the model is scripted and has buffers, which are sent before its forward: use "
        "buffers='local', or put it into a module of its own": (
            is_scripted(model) and buffers != "local" and bool(shared_buffers(model))
        ),
        f"buffers={buffers!r}: use 'broadcast', 'mean' or 'local'": (
            buffers not in ("broadcast", "mean", "local")
        ),
        f"check_every={check_every!r}: a number of steps; 0 for never": (
            not counts or check_every < 0
        ),
    }
    refuse(wrong)


def check_kinds(model: object, optimizer: object) -> None:
    """Raise TypeError for what is no module, or no optimizer but a text or a module.

    Before ranks connect: these are mistakes of a call, alike on all of them.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"the model is a {type(model).__name__}: pass the torch.nn.Module, then "
            "its optimizer, then the scheme"
        )
    if isinstance(optimizer, str | Scheme | nn.Module):
        raise TypeError(
            f"the optimizer is a {type(optimizer).__name__}: pass the torch.optim "
            "optimizer behind the model, and the scheme behind it"
        )


def is_dense(buffer: Tensor) -> bool:
    """Whether a buffer's memory holds its entries, each a number of bytes."""
    held = shards.local(buffer)
    packed = held.is_quantized and held.dtype not in INTEGERS
    return held.layout is torch.strided and not held.is_meta and not packed


def owners(p: Tensor) -> Iterator[Any]:
    """Who averages a parameter's gradients already: replicas."""
    for hook in accumulation_hooks(p):
        known = getattr(hook, "gradtide", None)
        if known is not None and (owner := known()) is not None:
            yield owner


def validate_scheme(model: nn.Module, scheme: Scheme) -> None:
    """Raise ValueError, naming the remedy, for what a scheme cannot do with a model."""
    collective, schedule, named = scheme.collective, scheme.schedule, averaged(model)
    odd = next((name for name, p in named if p.is_complex()), None)
    exact = traits(collective).dense and wire_of(collective) is None
    # Complex numbers have no order to select by, and what is cast, factorised or
    # weighed is real: they can only be added up.
    if odd is not None and not (exact and schedule.launch != "step"):
        raise ValueError(
            f"{odd} is complex, which {collective!r} with {schedule!r} cannot "
            "exchange: use 'wfbp' or 'dear', or keep a real parameter and "
            "torch.view_as_complex() in the forward"
        )
    sharded = next((name for name, p in named if shards.is_sharded(p)), None)
    if sharded is None:
        return
    reasons = {
        "K-FAC, which has to have whole layers: leave the preconditioner out": (
            scheme.preconditioner is not None
        ),
        "'auto', by which each group of ranks would choose for itself: choose with "
        "`gradtide plan`": undecided(scheme) is not None,
        "a schedule that updates in the next forward, where others read parameters "
        "first: use 'wfbp', or one that updates at step()": (
            schedule.update == "forward"
        ),
        "rounds of several steps, whose state is not kept by shard: use "
        "schedule='local', or one that exchanges gradients": schedule.rounds,
    }
    words = f"{sharded} is sharded, which does not go with"
    refuse({f"{words} {reason}": true for reason, true in reasons.items()})


def validate_optimizer(model: nn.Module, optimizer: Optimizer, scheme: Scheme) -> None:
    """Raise ValueError, naming the remedy, for steps that a schedule cannot make."""
    _refuse_wrapper(optimizer)
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    named, kind = averaged(model), type(optimizer).__name__
    left_out = [name for name, p in named if id(p) not in stepped]
    schedule = scheme.schedule
    joinable, lost = is_joinable(optimizer), next(iter(left_out), None)
    local, deferred = schedule.launch == "step", schedule.update == "forward"
    ordinary = not local and not deferred
    remedy = "use a schedule that exchanges gradients, such as 'wfbp'"
    wrong = {
        f"{kind} divides parameters among ranks, and these are sharded already: use a "
        "plain optimizer, whose state is sharded as they are": (
            joinable and any(shards.is_sharded(p) for _, p in named)
        ),
        "the optimizer holds none of the model's parameters: build it from this "
        "model, after the model was moved to its device": len(left_out) == len(named),
        f"{kind} exchanges parameters inside its step, which can neither be deferred "
        "nor be a rank's own: use a schedule that updates at step(), such as 'wfbp'": (
            joinable and not ordinary and not (deferred and divides(optimizer))
        ),
        f"{lost} requires a gradient but is not in the optimizer, so "
        "a deferred update, or an exchange of steps, would lose it: add it to a "
        "group, freeze it, pass gradtide.optim.Several([...]) if several optimizers "
        "share the model, or use 'wfbp'": lost is not None and not ordinary,
        # As schedule-free ones.
        f"{kind}.eval() moves parameters outside step(), on every rank by what it "
        f"remembers alone: {remedy}": (
            local and callable(getattr(optimizer, "eval", None))
        ),
        f"{kind} holds an optimizer that makes its steps, perhaps without its own "
        f"step(): pass the optimizer inside, or {remedy}": (
            local
            and bool(holds(optimizer))
            and not getattr(optimizer, "steps_what_it_holds", False)
        ),
    }
    refuse(wrong)
    if joinable and deferred:
        _refuse_undivided(optimizer, scheme)
    if not ordinary:
        from gradtide.runtime.optimizer.probing import check_deferrable, probe

        try_out = check_deferrable if deferred else probe
        try_out(optimizer)


def _refuse_undivided(optimizer: Optimizer, scheme: Scheme) -> None:
    """Raise ValueError for schemes under which such steps cannot be deferred."""
    own = settled(scheme.exchange)
    words = f"{type(optimizer).__name__} under {scheme!r}"
    refuse(
        {
            f"{words}: K-FAC makes of means what every rank steps by; leave one of "
            "both out": scheme.preconditioner is not None,
            f"{words}: owners step by means of all that there is, exact or in 16 bits; "
            "use 'dear' or dear(wire='bf16'), or a schedule that updates at step()": (
                not traits(own).dense or traits(own).rounds_off
            ),
        }
    )


def _refuse_wrapper(optimizer: object) -> None:
    """Raise ValueError for what has no steps to follow, saying what to pass."""
    # Wrappers that are one by name only have no hooks.
    hooked = hasattr(optimizer, "_optimizer_step_pre_hooks")
    if isinstance(optimizer, Optimizer) and hooked:
        return
    inside = [type(inner).__name__ for inner in holds(optimizer)]
    held = getattr(optimizer, "__dict__", {})
    where = [name for name, value in held.items() if isinstance(value, Optimizer)]
    remedy = "pass the optimizer of the model's parameters"
    if len(inside) == 1:
        remedy = (
            f"pass the {inside[0]} inside"
            + "".join(f", its .{name}" for name in where)
            + ", and if the wrapper moves parameters itself, a schedule that updates "
            "at step(), such as 'wfbp'"
        )
    elif inside:
        remedy = (
            f"it holds {', '.join(inside)}; pass one with a group for each kind of "
            "parameter, or derive it from torch.optim.Optimizer, give it the "
            "param_groups of all, and call their step() in its own"
        )
    raise ValueError(
        f"{type(optimizer).__name__} is not a torch.optim.Optimizer: {remedy}"
    )


def is_joinable(optimizer: Optimizer) -> bool:
    """Whether a step exchanges something itself, as ZeroRedundancyOptimizer's does.

    It is one of torch's by a class that is called Joinable, and one of ours by an
    attribute; or one that holds such a one.
    """
    return any(map(_exchanges, (optimizer, *holds(optimizer))))


def divides(optimizer: Optimizer) -> bool:
    """Whether all that such a step exchanges are answers of owners: see `dividing`."""
    exchanging = filter(_exchanges, (optimizer, *holds(optimizer)))
    return all(isinstance(one, Divides) for one in exchanging)


def _exchanges(optimizer: Optimizer) -> bool:
    return getattr(optimizer, "exchanges", False) or any(
        kind.__name__ == "Joinable" for kind in type(optimizer).__mro__
    )


class SetupGuard:
    """Refuses by name what a replica was not made for.

    At every step that is a trainable parameter that came later, for no bucket has it,
    or one of another dtype than it had; at every forward DistributedDataParallel around
    the model, which would average once more.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._known = {p: p.dtype for _, p in self._trainable()}
        alone = Hook(_refuse_ddp)
        self._handles = [
            optimizer.register_step_pre_hook(untraced(lambda *_: self.check())),
        ]
        if not is_scripted(model):
            # Whether torch's replicate() was called before or after.
            self._handles.append(model.register_forward_pre_hook(alone))
            self._handles.append(model.register_forward_hook(alone))
        self._look()

    def remove(self) -> None:
        """Look no longer."""
        for handle in self._handles:
            handle.remove()

    def _trainable(self) -> Iterator[tuple[str, Tensor]]:
        """What the model has and what the optimizer steps, by name."""
        named: list[tuple[str, Tensor]] = list(shared_parameters(self._model))
        for i, group in enumerate(self._optimizer.param_groups):
            name = f"a parameter of the optimizer's group {i}"
            named += [(name, p) for p in group["params"]]
        return ((name, p) for name, p in named if p.requires_grad)

    def _look(self) -> None:
        """Note what is there, so that `_signs` tell when that changes."""
        modules = list(self._model.modules())
        self._tables = [table for m in modules for table in tables(m)]
        self._frozen = [p for p in self._model.parameters() if not p.requires_grad]
        self._last = self._signs()

    def _signs(self) -> list[object]:
        """Other objects where anything was added, replaced, thawed or cast.

        Hot path: in every step. To go through the model takes ten times as long.
        """
        groups = self._optimizer.param_groups
        return [
            *chain.from_iterable(group["params"] for group in groups),
            *chain.from_iterable([table.values() for table in self._tables]),
            *[p.requires_grad for p in self._frozen],
            *[p.dtype for p in self._known],
        ]

    def check(self) -> None:
        """RuntimeError, with the name of a parameter that came later."""
        now, last = self._signs(), self._last
        if len(now) == len(last) and all(map(is_, now, last)):
            return
        whole = shards.unsharded(self._model)
        for name, p in self._trainable():
            if p not in self._known and not any(owners(p)) and id(p) not in whole:
                raise RuntimeError(
                    f"{name} was added or unfrozen after replicate(), or replaces "
                    "another, so no bucket has it and it would not be averaged: call "
                    "sync.refresh() (of a wrapper, its refresh()) on every rank, "
                    "behind such a change"
                )
            if self._known.get(p, p.dtype) is not p.dtype:
                raise RuntimeError(
                    f"{name} was {self._known[p]} at replicate() and is {p.dtype} now: "
                    "cast the model before replicate(), or call sync.remove() on every "
                    "rank and replicate() again"
                )
        self._look()


def _refuse_ddp(*_: object) -> None:
    """Raise RuntimeError where something else averages in this forward."""
    if in_ddp():
        raise RuntimeError(
            "the model runs inside DistributedDataParallel or torch's replicate(), "
            "which exchanges gradients itself: leave that out, or call sync.remove()"
        )


def check_ranks_agree(
    transport: Transport,
    prepare: Callable[[], tuple[T, Signature]],
    remedy: str = "build the same model and optimizer, with the same scheme, on every "
    "rank",
) -> T:
    """Run `prepare` on every rank and compare what the ranks say of themselves.

    Returns the first result of `prepare`; the second is the rank's signature. Whatever
    `prepare` raises on some rank, *every* rank raises, so that none waits for another:
    that rank its own error, the others ValueError with its number and its words, or
    RuntimeError if it is of a kind that nobody foresaw. Otherwise ValueError names the
    first thing that differs, the two ranks that differ in it, and the `remedy`.

    So nothing that can fail on one rank alone belongs behind this call.
    """
    call = prepare.__qualname__.partition(".<locals>")[0]
    try:
        result, signature = prepare()
    except Exception as error:
        foreseen = isinstance(error, ValueError | TypeError)
        kind = type(error).__name__
        words = str(error) or kind if foreseen else f"{kind}: {error}"
        transport.gather_objects((words, foreseen, {}), call)
        raise
    answers = transport.gather_objects(("", True, signature), call)
    for rank, (words, foreseen, _) in enumerate(answers):
        if words:
            told = f"rank {rank} cannot take part: {words}"
            raise ValueError(told) if foreseen else RuntimeError(told)
    first = answers[0][-1]
    for rank, (*_, other) in enumerate(answers):
        for key in {**first, **other}:
            ours, theirs = first.get(key, "not there"), other.get(key, "not there")
            if ours != theirs:
                raise ValueError(
                    f"{key} differs between ranks: rank 0 has {ours}, rank {rank} has "
                    f"{theirs}; {remedy}"
                )
        if list(first) != list(other):
            raise ValueError(
                f"rank {rank} registers its parameters in another order than rank 0; "
                "build the same model on every rank"
            )
    return result


def describe(
    model: nn.Module,
    scheme: object,
    buffers: str,
    check_every: int,
    grace: Grace | None = None,
    optimizer: Optimizer | None = None,
) -> Signature:
    """A rank's signature: its scheme, then every parameter and buffer."""
    named = {"scheme": repr(scheme), "check_every": str(check_every)}
    named |= {"buffers": buffers, "grace": str(grace and grace.seconds)}
    named |= describe_optimizer(optimizer)
    for name, p in shared_parameters(model):
        frozen = "" if p.requires_grad else " frozen"
        named[f"parameter {name}"] = shards.described(p) + frozen
    for name, buffer in shared_buffers(model):
        named[f"buffer {name}"] = shards.described(buffer)
    return named


def describe_optimizer(optimizer: Optimizer | None) -> Signature:
    """A rank's signature of its optimizer: its class, or that there is none."""
    kind = "none" if optimizer is None else type(optimizer).__name__
    return {"the optimizer": kind}


def refuse_sparse(name: str, module: nn.Module) -> None:
    """Raise ValueError for an embedding whose gradients are sparse tensors."""
    if getattr(module, "sparse", False) is True:
        raise ValueError(
            f"{name} has sparse gradients, which gradtide does not average: build "
            "the embedding with sparse=False"
        )
