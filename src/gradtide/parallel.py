"""gradtide in the place of torch's DistributedDataParallel, by one import.

The class is a thin face on `replicate`: it has DDP's constructor and manners, and is
recognised where programs ask for DDP. None of DDP's machinery is made.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from types import new_class
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Joinable
from torch.nn.parallel import DistributedDataParallel as Torchs
from torch.optim import Optimizer

from gradtide.collectives import Dense
from gradtide.core.payload import traits
from gradtide.core.schedule import WFBP
from gradtide.core.torch_internals import disable_dynamo, ignored_by_ddp
from gradtide.core.torch_internals.compilation import leave_out
from gradtide.core.torch_internals.distributed import (
    BufferCommHookLocation,
    check_default_group,
    log_and_throw,
)
from gradtide.ddp_arguments import (
    Log,
    logging_data,
    only_device,
    own_group,
    reducer,
    sends_buffers,
    wires_of_hooks,
)
from gradtide.replica import Replica
from gradtide.runtime.guards.validation import check_kinds, owners
from gradtide.runtime.layout.parameters import (
    averaged,
    shared_buffers,
    shared_parameters,
)
from gradtide.scheme import Scheme
from gradtide.session import Buffers
from gradtide.transport import ProcessGroup

Recipe: TypeAlias = "str | Scheme"

SCHEME = "GRADTIDE_SCHEME"  # in the environment: what programs use that say nothing

# What to do where two models have a parameter in common.
HELD = "wrap one module that holds both, nn.ModuleList([a, b]), with one optimizer"

# Exchanged backward passes after which an optimizer should have made a step.
PATIENCE = 200


class DistributedDataParallel(Torchs):
    """Torch's DistributedDataParallel (DDP) with gradtide's exchange of gradients.

    It is constructed and used as DDP is, and `isinstance(model,
    torch.nn.parallel.DistributedDataParallel)` holds. The optimizer is built as usual,
    before or after: it is found at its first step. A scheme that has to know it begins
    after that step; until then exact means are exchanged (see `replicate`). The
    constructor is a collective call.

    `no_sync`, `require_backward_grad_sync`, `join` and
    `_set_params_and_buffers_to_ignore_for_model` do what they do in DDP. So does a
    pickle or a copy: it is linked to the other ranks when it is first trained. Wrapping
    a module anew takes it over from the wrapper before. Where two wrapped modules share
    a parameter, the later one has it, and the other refuses to be trained: wrap one
    module that holds both.

    Args:
        module: The module to train, already on its device.
        device_ids: The one GPU of the module, to which inputs are moved; None for a
            module on the CPU, or for inputs that are there already.
        output_device: Ignored: outputs are where the module leaves them.
        dim: Ignored, as by DDP for a single device.
        broadcast_buffers: Whether forwards begin with rank 0's buffers. None, the
            default, stands for True. With False, buffers are not made equal at the
            beginning either.
        init_sync: Whether parameters and buffers start as rank 0's.
        process_group: The ranks that train together; None for all.
        bucket_cap_mb: Ignored: the scheme's fusion cuts the buckets.
        find_unused_parameters: Ignored: ranks may use different parameters in each
            step without it.
        check_reduction: Ignored, as by DDP.
        gradient_as_bucket_view: Ignored: gradients are views of buckets anyway.
        static_graph: Ignored; for reentrant checkpoints there is "sequential".
        delay_all_reduce_named_params: Ignored: these are averaged with the others.
        param_to_hook_all_reduce: Ignored, as above.
        mixed_precision: Refused if not None: use torch.autocast.
        device_mesh: A mesh of one dimension, in the place of `process_group`.
        skip_all_reduce_unused_params: Ignored: all ranks agree on what was used.
        bucket_cap_mb_list: Ignored, as `bucket_cap_mb`.
        batched_grad_copy: Ignored: gradients are copied a bucket at a time.
        forward_sync_buffers: As `broadcast_buffers`, but buffers start as rank 0's.
        scheme: What travels, in which buckets, and when; as for `replicate`. None, the
            default, stands for what `install` was given, or "wfbp": what DDP does.
        optimizer: The optimizer, if it exists. The scheme then begins with the first
            step.
        buffers: With "mean" ranks go on from the mean of all ranks' buffers, as for
            `replicate`, and forwards begin with nobody's. None, the default, leaves it
            to `broadcast_buffers`.

    Attributes:
        module: The module that was passed.
        require_backward_grad_sync: Whether the next forward's backward exchanges.

    Raises:
        RuntimeError: torch.distributed is not initialised.
        ValueError: The module, the optimizer or the scheme cannot be used, or differs
            between ranks. It is raised on every rank.
    """

    default_scheme: Recipe = "wfbp"  # what `install` changes

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[Any] | None = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Any = None,
        param_to_hook_all_reduce: Any = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        *,
        scheme: Recipe | None = None,
        optimizer: Optimizer | None = None,
        buffers: Literal["mean"] | None = None,
    ) -> None:
        leave_out(DistributedDataParallel.forward)
        # torch's own constructor is passed over: it would make a Reducer.
        super(Torchs, self).__init__()
        Joinable.__init__(self)
        check_kinds(module, optimizer)
        if not averaged(module):
            raise RuntimeError(  # as DDP: frameworks count on it
                "DistributedDataParallel is not needed when a module doesn't have any "
                "parameter that requires a gradient: use the module as it is"
            )
        if mixed_precision is not None:
            raise ValueError(
                "mixed_precision is DDP's own: use torch.autocast, and "
                "scheme=\"wfbp(wire='bf16')\" for 16 bits on the wire"
            )
        given = sends_buffers(forward_sync_buffers, broadcast_buffers)
        self.module = module
        self.device_mesh = device_mesh
        self.process_group: Any = own_group(process_group, device_mesh)
        self.device = next((p.device for p in module.parameters()), torch.device("cpu"))
        self.device_type, self.dim = self.device.type, dim
        self.device_ids = only_device(device_ids, self.device_type)
        self.output_device = output_device
        self.scheme = self.default_scheme if scheme is None else scheme
        self._buffering: Buffers = buffers or "local"  # this class sends when DDP does
        given = given and buffers is None
        self.broadcast_buffers = given  # a property of torch's, since 2.13
        self.require_backward_grad_sync = self.require_forward_param_sync = True
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.static_graph = static_graph
        self.mixed_precision, self.logger = None, Log()
        self.bucket_bytes_cap = int((bucket_cap_mb or 25) * 2**20)
        self.bucket_bytes_cap_list = [int(n * 2**20) for n in bucket_cap_mb_list or ()]
        self.broadcast_bucket_size = 250 * 2**20  # what torch's own functions ask for
        self.use_side_stream_for_tensor_copies = True
        self.parameters_to_ignore = set(ignored_by_ddp(module))
        alike: list[Tensor] = []
        if init_sync:
            alike += [p for _, p in shared_parameters(module)]
        averaging = buffers is not None
        if init_sync and (given or averaging or forward_sync_buffers is not None):
            alike += [buffer for _, buffer in shared_buffers(module)]
        self._hook_name: str | None = None
        self._replica: Replica | None = None
        self._link(optimizer, alike)

    # - The link to the other ranks ----------------------------------------------------

    @property
    def replica(self) -> Replica:
        """The `Replica` behind this face: metrics, clipping, residuals.

        A copy, or what was loaded from a pickle, has none until it is first trained.
        """
        if self._replica is None:
            raise RuntimeError(
                "this is a copy that was not trained yet, and has no replica: run one "
                "training forward on every rank"
            )
        return self._replica

    def attach(self, optimizer: Optimizer) -> None:
        """Tell of the optimizer before its first step. A collective call.

        It is needed before `replica.load_state_dict()`, and for a scheme that is to
        begin with the first step.

        Args:
            optimizer: The optimizer of the module's parameters.
        """
        self.replica.attach(optimizer)

    def _link(self, optimizer: Optimizer | None, alike: Sequence[Tensor]) -> None:
        """Join the other ranks."""
        ours = set(self.module.parameters())
        for former in {r for p in ours for r in owners(p)}:
            _take_over(former, ours)
        group = self.process_group
        self._replica = Replica(
            self.module, optimizer, self.scheme, group, self._buffering, None, alike
        )
        self._replica.wrapper = weakref.ref(self)
        self._replica.shares_buffers |= self.broadcast_buffers
        self._pending = -1  # the number of exchanges at a forward that is to be one
        self._end = weakref.finalize(self, _release, self._replica)
        self._end.atexit = False

    def __getstate__(self) -> dict[str, Any]:
        check_default_group(self)
        if self._replica is not None:
            self._replica.flush()
        left_out = ("_replica", "_end", "process_group")
        return {k: v for k, v in self.__dict__.items() if k not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        nn.Module.__setstate__(self, state)  # type: ignore[no-untyped-call]
        self.process_group = dist.group.WORLD
        self._replica = None

    # - Forward ------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module, on inputs that are moved to its GPU if it has one.

        Args:
            inputs: The module's own.
            kwargs: The module's own.

        Returns:
            What the module returns.
        """
        with torch.autograd.profiler.record_function("DistributedDataParallel.forward"):
            inputs, kwargs, exchanging = self._before_forward(inputs, kwargs)
            output = self.module(*inputs, **kwargs)
            if exchanging:
                self._after_forward()
            return output

    # See [Note: compiled]: torch.compile begins at the module, and not here.
    @disable_dynamo
    def _before_forward(self, inputs: Any, kwargs: Any) -> tuple[Any, Any, bool]:
        """Returns a forward's inputs, and whether its gradients may be exchanged."""
        if self.device_ids:
            device = torch.device(self.device_type, self.device_ids[0])
            moved = self.to_kwargs(inputs, kwargs, device.index)  # type: ignore[no-untyped-call]
            (inputs,), (kwargs,) = moved
        training = torch.is_grad_enabled()
        if self._replica is None and training and averaged(self.module):
            self._link(None, [])
        if self._replica is None:
            return inputs, kwargs, False
        if self._replica.wrapper is None:
            raise RuntimeError(
                "the module, or one that shares a parameter with it, was wrapped anew, "
                "or replica.remove() was called: use the new wrapper; "
                f"for two models that share a parameter, {HELD}"
            )
        self._exchange_buffers(BufferCommHookLocation.PRE_FORWARD)
        if training:
            self._sync(self.require_backward_grad_sync)
        return inputs, kwargs, True

    @disable_dynamo
    def _after_forward(self) -> None:
        training = torch.is_grad_enabled()
        if training:  # a module may have changed its mind, as Lightning's does
            self._sync(self.require_backward_grad_sync)
        self._exchange_buffers(BufferCommHookLocation.POST_FORWARD)
        self.require_forward_param_sync = training and self.require_backward_grad_sync

    def _exchange_buffers(self, place: BufferCommHookLocation) -> None:
        """Have rank 0's buffers before a forward, or do what a hook does instead."""
        hook = getattr(self, "buffer_hook", None)
        if not self.will_sync_module_buffers():  # type: ignore[no-untyped-call]
            return
        if hook is None:
            if place is BufferCommHookLocation.PRE_FORWARD:
                self.replica.send_buffers()
        elif hook.buffer_comm_hook_location is place:
            buffers = dict(shared_buffers(self.module))
            futures = hook.buffer_comm_hook(hook.buffer_comm_hook_state, buffers)
            for future in futures or ():
                future.wait()

    def _sync(self, exchange: bool) -> None:
        """Have the next backward exchange, or not; as DDP, the forward decides.

        A forward inside `no_sync` leaves one before it, whose backward has not come
        yet, what it is.
        """
        replica = self.replica
        if exchange:
            self._pending = replica.num_exchanges
        replica.be_quiet(self._pending != replica.num_exchanges)
        if replica.waiting and replica.num_exchanges == PATIENCE:
            warnings.warn(
                f"after {PATIENCE} backward passes no torch.optim.Optimizer that holds "
                "the model's parameters has stepped, and gradients are averaged as by "
                f"'wfbp': {replica.scheme!r} has to know it. Pass optimizer=, or call "
                "attach(optimizer)",
                stacklevel=3,
            )

    @property
    def reducer(self) -> Any:  # type: ignore[override]
        """What answers those who talk to DDP's Reducer, as Lightning and torch do."""
        return reducer(lambda: self._sync(True))

    @property
    def modules_buffers(self) -> list[Tensor]:  # type: ignore[override]
        """What is exchanged before a forward, if `will_sync_module_buffers()`."""
        return [buffer for _, buffer in shared_buffers(self.module)]

    def _assign_modules_buffers(self) -> None: ...  # nothing to set

    # - What else DDP has --------------------------------------------------------------

    def exchange(self) -> None:
        """Exchange the gradients that are in `.grad` now, as `Replica.exchange`.

        This is a collective call, for gradients that no backward has exchanged:
        written by hand, or accumulated inside `no_sync`.
        """
        self.replica.exchange()

    def refresh(self, optimizer: Optimizer | None = None) -> None:
        """Go on with the parameters that are trained now, as `Replica.refresh`.

        This is a collective call, behind whatever has changed these.

        Args:
            optimizer: One that takes the place of the present one, if it was made anew.
        """
        self.replica.refresh(optimizer)

    def describe(self) -> str:
        """Return a table of which bucket travels how, as `Replica.describe`. Local.

        Returns:
            Lines for people, whose form may change.
        """
        return self.replica.describe()

    def weight(self, weight: float) -> None:
        """Say how much this rank counts in the step to come, as `Replica.weight`.

        Args:
            weight: The number of tokens, or of samples, that the loss is a mean over.
        """
        self.replica.weight(weight)

    def skip(self) -> None:
        """Give nothing in this step, in the place of a backward: `Replica.skip`."""
        exchanges = self.require_backward_grad_sync
        self._sync(exchanges)
        if exchanges and not self.replica.forwarded:
            self._exchange_buffers(BufferCommHookLocation.PRE_FORWARD)
            self._exchange_buffers(BufferCommHookLocation.POST_FORWARD)
        self.replica.skip()

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Let a communication hook exchange the gradients, as in DDP.

        Torch's hooks that cast to 16 bits are taken for the scheme's `wire`. Any other
        hook takes the scheme's place (`Replica.use_comm_hook`), with a warning if that
        was another one than "wfbp".

        Args:
            state: What the hook is given first.
            hook: The hook. The buckets that it is given are gradtide's.

        Raises:
            ValueError: The scheme cannot be replaced: it has K-FAC or exchanges steps.
            TypeError: It is no hook.
        """
        if not callable(hook):  # as DDP
            log_and_throw(self, TypeError, "Communication hook must be callable.")
        name = getattr(hook, "__qualname__", repr(hook))
        known = wires_of_hooks()
        if hook in known and state in (None, self.process_group):
            self._cast(known[hook])
        else:
            before = self.replica.scheme
            self.replica.use_comm_hook(state, hook)
            if before.schedule != WFBP or before.collective != Dense():
                warnings.warn(
                    f"{name} takes the place of {before!r}: gradients "
                    "are exchanged by the hook, during backward",
                    stacklevel=2,
                )
        self._hook_name = name

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        self._cast("fp16" if str(comm_hook_type).endswith("FP16_COMPRESS") else None)
        self._hook_name = str(comm_hook_type)

    def _cast(self, wire: Any) -> None:
        if wire is None:
            return
        scheme = self.replica.scheme
        own: Any = scheme.collective
        if not traits(own).dense:
            raise ValueError(f"{scheme!r} has a `wire` of its own: set it, not a hook")
        self.replica.adopt(replace(scheme, collective=replace(own, wire=wire)))

    @contextmanager
    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
        also: Sequence[DistributedDataParallel] = (),
    ) -> Iterator[None]:
        """Train with uneven numbers of batches, as `Replica.join`.

        Args:
            divide_by_initial_world_size: Whether sums are divided by the number of all
                ranks, or of those that still have batches.
            enable: Whether to do anything.
            throw_on_early_termination: Whether all ranks raise when the first is out
                of batches.
            also: Other wrapped modules that are trained inside, as a GAN's other one.

        Returns:
            A context manager, around the training loop.
        """
        how = divide_by_initial_world_size, enable, throw_on_early_termination
        with self.replica.join(*how, [other.replica for other in also]):
            yield
        if enable:  # the last forward of some ranks may have been in `no_sync`
            for one in (self, *also):
                one.require_forward_param_sync = True

    def join_hook(self, **kwargs: Any) -> Any:
        """Refuse torch's `Join`, for which DDP mirrors its own messages."""
        raise ValueError(
            "Join([...]) mirrors DDP's messages: use ddp.join(), with also=[...] for "
            "other wrapped modules"
        )

    def _register_fused_optim(self, *_: Any, **__: Any) -> None:
        raise ValueError(
            "an optimizer in backward steps before the mean is there: use "
            "scheme='dear', which steps in the next forward"
        )

    def _update_process_group(self, new_process_group: Any) -> None:
        raise ValueError("the group stays: wrap the module anew, with process_group=")

    def _set_static_graph(self) -> None:
        if self.replica.num_exchanges:
            message = "_set_static_graph() should be called before training loop starts"
            log_and_throw(self, RuntimeError, message)
        self.static_graph = True

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """What DDP logs and there is here, under DDP's keys; and `metrics()`."""
        return logging_data(self, self.replica, self._hook_name)


def _release(replica: Replica) -> None:
    """Detach what a wrapper had linked, if it has not been done.

    A collective call if gradients are held until `step()`. Also called by the garbage
    collector, perhaps on the communication queue's thread, which cannot end itself.
    """
    on_main_thread = threading.current_thread() is threading.main_thread()
    if replica.wrapper is not None and on_main_thread:
        replica.wrapper = None
        replica.remove(end_round=False)


def _take_over(former: Replica, ours: Set[nn.Parameter]) -> None:
    """Release a replica whose parameters another one takes: those that are `ours`.

    The rest has nobody who averages its gradients, and says so if it gets some.
    """
    wrapper, left = former.wrapper, averaged(former.model)
    _release(former)
    if wrapper is None or former.wrapper is not None:
        return  # it is not released: the next one to ask for these is refused
    for name, p in left:
        if p not in ours:
            hook = _forsaken(name, wrapper)
            p.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


def _forsaken(name: str, wrapper: Callable[[], object]) -> Callable[[Tensor], None]:
    """What refuses a gradient that nobody averages, as long as the wrapper is there."""

    def refuse(p: Tensor) -> None:
        if wrapper() is not None and not any(owners(p)):
            raise RuntimeError(
                f"{name} is no longer averaged: its model shares a parameter with "
                f"one that was wrapped later; {HELD}"
            )

    leave_out(refuse)
    return refuse


@cache
def joined_class(kind: Any) -> Any:
    """A class of torch's, or a program's own that derives from it, on top of ours.

    The program's own class stays as it is, for models that it has made already.
    """
    if kind is Torchs:
        return DistributedDataParallel
    return new_class(
        kind.__name__,
        (kind, DistributedDataParallel),
        exec_body=lambda names: names.update(
            __module__=kind.__module__,
            __qualname__=kind.__qualname__,
            __doc__=kind.__doc__,
            __reduce_ex__=lambda self, _: (_blank, (kind,), self.__getstate__()),
        ),
    )


def _blank(kind: Any) -> Any:
    """An object of such a class, whose state is yet to come: for pickles."""
    joined = joined_class(kind)
    return joined.__new__(joined)
