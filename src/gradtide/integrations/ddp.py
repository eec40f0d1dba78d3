"""gradtide's averaging behind DistributedDataParallel's communication hook.

For those who keep DDP: its buckets, its `no_sync` and its `join`. What a hook cannot
have is a second half in the next forward, because backward waits for every hook. The
numbers are `replicate`'s for the same buckets, and the same bits where a collective
does not look at the order of the tensors in them, which DDP chooses otherwise.

This module does without the future import: DDP compares the hook's annotations with
classes, not with strings.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

from gradtide.core.engine import Engine
from gradtide.core.fields import refuse
from gradtide.core.torch_internals import foreach_copy_
from gradtide.core.torch_internals.distributed import GradBucket
from gradtide.fusion import BySize
from gradtide.runtime import ahead
from gradtide.runtime.guards.validation import check_ranks_agree
from gradtide.runtime.layout.buckets import GradientBucket, Place
from gradtide.runtime.layout.placement import lay_out
from gradtide.scheme import (
    Scheme,
    as_scheme,
    takes_momentum_over,
    undecided,
    with_levels,
)
from gradtide.transport import ProcessGroup, connect

_WHOLE = BySize(1e12, ends=1e12)  # DDP has cut already


class State:
    """What the hook remembers, by parameter: DDP cuts its buckets anew as it learns."""

    def __init__(self, scheme: Scheme, engine: Engine) -> None:
        self.scheme, self.engine = scheme, engine
        self._key = f"rank{engine.group.rank}"
        self.waiting: list[tuple[GradientBucket, GradBucket, Future[Tensor]]] = []
        self._places: dict[nn.Parameter, Place] = {}

    def own_bucket(self, bucket: GradBucket) -> GradientBucket:
        """The bucket of gradtide's own for one of DDP's.

        It is laid out anew, with its residuals, if DDP cut anew. Its slots keep their
        order if DDP has changed that alone.
        """
        params = cast(list[nn.Parameter], bucket.parameters())
        before = [self._places.get(p) or self._lay_out([p])[0] for p in params]
        own_bucket = before[0].bucket
        together = all(place.bucket is own_bucket for place in before)
        if not together or len(own_bucket.slots) > len(params):
            own_bucket = self._lay_out(params)[0].bucket
            own_bucket.carry(before, same=True)
        own_bucket.name = f"ddp{bucket.index()}"  # the same on every rank
        return own_bucket

    def remainders(self) -> dict[nn.Parameter, Tensor]:
        """Views of the residuals, in the parameters' shapes."""
        return {
            p: place.slot.of(place.bucket.payload.flat)
            for p, place in self._places.items()
            if not place.bucket.residual_empty
        }

    def state_dict(self, module: nn.Module) -> dict[str, Any]:
        """This rank's residuals by parameter name, under a key of its own."""
        names = {p: name for name, p in module.named_parameters()}
        return {self._key: {names[p]: r.clone() for p, r in self.remainders().items()}}

    def load_state_dict(self, module: nn.Module, state: dict[str, Any]) -> None:
        """Go on with saved residuals; algorithms find their thresholds anew.

        Raises ValueError if the state has nothing of this rank.
        """
        key = self._key
        if key not in state:
            raise ValueError(f"the state has no {key!r}: every rank saves its own")
        params = dict(module.named_parameters())
        self._places.clear()
        for name, residual in state[key].items():
            own_bucket = self._lay_out([params[name]])[0].bucket
            own_bucket.restart([residual])

    def _lay_out(self, params: Sequence[nn.Parameter]) -> list[Place]:
        """The places of parameters, in a bucket that has just these."""
        named = [(str(i), p) for i, p in enumerate(params)]
        size, collective = self.engine.group.size, self.scheme.exchange
        (own_bucket,) = lay_out(named, _WHOLE, collective, size)
        places = [Place(own_bucket, slot) for slot in own_bucket.slots]
        self._places.update(zip(params, places, strict=True))
        return places


def exchange(state: State, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The hook: `DistributedDataParallel.register_comm_hook(state, exchange)`."""
    own_bucket, future = state.own_bucket(bucket), Future[Tensor]()
    own_bucket.put(own_bucket.views, _gradients(own_bucket, bucket))
    own_bucket.launch(state.engine)
    state.waiting.append((own_bucket, bucket, future))
    if bucket.is_last():
        # Nothing is left to overlap with. On this thread a lost peer raises; a future
        # that was completed elsewhere could not say what happened.
        waiting, state.waiting = state.waiting, []
        for each, its, done in waiting:
            each.finish(state.engine)
            foreach_copy_(_gradients(each, its), list(each.gradients))
            done.set_result(its.buffer())
    return future


def _gradients(own_bucket: GradientBucket, bucket: GradBucket) -> list[Tensor]:
    """DDP's gradients in the order of the slots."""
    own = dict(zip(bucket.parameters(), bucket.gradients(), strict=True))
    return [own[slot.param] for slot in own_bucket.slots]


def comm_hook(
    scheme: str | Scheme, *, process_group: ProcessGroup | None = None
) -> tuple[State, Any]:
    """The two arguments of `DistributedDataParallel.register_comm_hook`.

        model = DistributedDataParallel(model)
        model.register_comm_hook(*gradtide.integrations.ddp.comm_hook("oktopk"))

    This is a collective call, after `init_process_group`, with the group that DDP uses.
    Buckets are DDP's (`bucket_cap_mb`), not the scheme's. Raises ValueError on every
    rank for a scheme that is not known, differs between ranks, or needs more than
    gradients.
    """
    parent = process_group or dist.group.WORLD
    cuda = dist.is_initialized() and "nccl" in str(dist.get_backend_config(parent))
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else "cpu"
    transport = connect(process_group, torch.device(device))

    def prepare() -> tuple[Scheme, dict[str, str]]:
        chosen = with_levels(as_scheme(scheme), transport.hosts)
        schedule, momentum = chosen.schedule, takes_momentum_over(chosen)
        kfac = chosen.preconditioner is not None
        local, deferred = schedule.launch == "step", schedule.update == "forward"
        reasons = {
            "auto": ("cannot change schemes", undecided(chosen) is not None),
            "momentum correction": ("does not see the optimizer's momentum", momentum),
            "K-FAC": ("sees gradients, but not the inputs of layers", kfac),
            "'local'": ("does not see the optimizer and its steps", local),
            "'dear'": ("ends with backward, not in the next forward", deferred),
        }
        wrong = {
            f"a communication hook {why}: use gradtide.replicate, or a scheme "
            f"without {name}": true
            for name, (why, true) in reasons.items()
        }
        refuse(wrong)
        ahead.prepare([torch.empty(0, dtype=torch.float32, device=device)], chosen)
        return chosen, {"scheme": repr(chosen)}

    try:
        chosen = check_ranks_agree(transport, prepare)
    except Exception:
        transport.close()
        raise
    return State(chosen, Engine(transport)), exchange
