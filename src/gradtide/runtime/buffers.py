"""The buffers that training forwards begin with, as one rank has them.

What travels has the names and shapes that all ranks have agreed on, whatever a rank has
come to have since: messages of unequal lengths would end the process over Gloo, or
leave it waiting. A rank whose buffers are others now (a quantiser's grow in the first
forward) says so in the message that ends the next backward. Then all compare before the
next forward: they agree anew, or all are told which buffer differs. Until then such a
buffer is left out.

[Note: versions] Buffers are overwritten as DistributedDataParallel does it: autograd
does not count that as a change. A network may be called twice before backward (a
discriminator, siamese ones), and graphs of the first forward may have saved a buffer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor, nn

from gradtide.core.engine import Engine
from gradtide.runtime.guards.validation import Signature, check_ranks_agree
from gradtide.runtime.layout.broadcast import (
    INTEGERS,
    broadcast,
    integers,
    synchronize,
)
from gradtide.runtime.layout.parameters import is_ignored, shared_buffers
from gradtide.runtime.members import Members
from gradtide.transport.shards import described, local

if TYPE_CHECKING:
    from gradtide.runtime.means import BufferMeans

Kind: TypeAlias = tuple[torch.Size, torch.dtype, torch.device]

REMEDY = (
    "give it the same shape and dtype on every rank; or name it in the module's "
    "_ddp_params_and_buffers_to_ignore, or use buffers='local', before replicate()"
)


class SharedBuffers:
    """A module's buffers, which all ranks have of one of them."""

    def __init__(self, model: nn.Module, engine: Engine) -> None:
        self._model, self._engine = model, engine
        self._look()
        self._agreed: Mapping[str, Kind] = self._kinds(self._own())
        self._doubtful = False  # some rank has others than were agreed on
        self._known_doubtful = False  # when the backward under way began
        self.means: BufferMeans | None = None
        self._loaded = False  # buffers were loaded, and nobody has looked at them since
        self._unsure = False  # others may have loaded other ones

    def __bool__(self) -> bool:
        """Whether there is anything to send, or to agree on; alike on all ranks."""
        return bool(self._agreed) or self._doubtful

    def changed(self) -> bool:
        """Whether this rank has others than were agreed on, or may have (hot path)."""
        unsure, self._unsure = self._unsure, False
        return unsure or self._kinds(self._own()) != self._agreed

    def note(self, doubtful: bool) -> None:
        """All ranks have heard whether some rank has others."""
        self._doubtful |= doubtful

    def send(self, source: int) -> None:
        """Overwrite all with rank `source`'s; a collective call.

        Raises ValueError, on every rank, if ranks have others than each other.
        """
        self.arrive()
        if self._doubtful:
            self._agree()
        broadcast(self._engine, self.tensors(), source)

    def tensors(self) -> list[Tensor]:
        """What is agreed on, to be overwritten; see [Note: versions].

        Zeros stand for what this rank has no more, or has in another shape.
        """
        own = self._own()
        kinds = self._kinds(own)
        return [
            integers(local(own[name]).detach()).data
            if kinds.get(name) == kind
            else _zeros(*kind)
            for name, kind in self._agreed.items()
        ]

    def held(self) -> dict[str, Tensor | None]:
        """What is agreed on; None of what this rank has no more as it was."""
        own = self._own()
        kinds = self._kinds(own)
        return {
            name: local(own[name]).detach() if kinds.get(name) == kind else None
            for name, kind in self._agreed.items()
        }

    def renew(self, broadcast: bool) -> None:
        """All ranks have other buffers, and alike: they begin as rank 0's; collective.

        Unless each rank has its own: with neither means nor `broadcast`.
        """
        self._look()
        self._agreed, self._doubtful = self._kinds(self._own()), False
        if self.means is not None:
            self.average()
        elif broadcast:
            synchronize(self._engine, self.tensors())

    # - Means of all ranks, see `means` ------------------------------------------------

    def average(self) -> None:
        """Have the means of all ranks from now on; collective."""
        from gradtide.runtime.means import BufferMeans

        self.rest()
        synchronize(self._engine, self.tensors())
        self.means = BufferMeans(self._model, self._engine, self.held)

    def rest(self) -> None:
        """Have no means any more."""
        if self.means is not None:
            self.means.remove()
        self.means = None

    def settle(self) -> None:
        """A backward has begun: all ranks know by now whether some rank has others."""
        self._known_doubtful = self._doubtful

    def leave(self, members: Members) -> None:
        """A backward is over: ask for the means; collective."""
        if self.means is None:
            return
        self.arrive()
        if self._known_doubtful:
            agreed = self._agreed
            self._agree()
            told = self._engine.transport.gather_objects(self.means.digests())
            if self._agreed != agreed or told != told[:1] * len(told):
                self.average()
        active = members.count()  # first: by then it is known who is the source
        self.means.leave(members.source, active, members.shadowing)

    def arrive(self) -> None:
        """Put in the means that are on their way; local."""
        if self.means is None:
            return
        with torch.no_grad():
            if self._loaded:
                self._loaded, self._unsure = False, True
                self.means.begin_anew()
            else:
                self.means.arrive()

    def loading(self) -> None:
        """Buffers are about to be loaded: they are no statistics of what was done."""
        if not self._loaded:
            self.arrive()
            self._loaded = True

    def _agree(self) -> None:
        check_ranks_agree(self._engine.transport, self._compare, REMEDY)
        self._agreed = self._kinds(self._own())
        self._doubtful = self._known_doubtful = self._unsure = False

    def _compare(self) -> tuple[None, Signature]:
        named = shared_buffers(self._model)
        return None, {f"buffer {name}": described(buffer) for name, buffer in named}

    def _look(self) -> None:
        """Find where buffers are; to look for them anew in every forward takes longer.

        Their tables and names, and not the buffers: modules may replace these.
        """
        self._tables = [module._buffers for module in self._model.modules()]
        self._places = [
            (f"{prefix}.{key}" if prefix else key, module._buffers, key)
            for prefix, module in self._model.named_modules()
            for key in module._buffers.keys()  # noqa: SIM118  # TorchScript has no more
        ]
        self._places = [
            place for place in self._places if not is_ignored(self._model, place[0])
        ]
        self._sizes = [*map(len, self._tables)]

    def _own(self) -> dict[str, Tensor]:
        """What this rank has now, by name; what has two names by the first."""
        if [*map(len, self._tables)] != self._sizes:
            self._look()
        first: dict[int, tuple[str, Tensor]] = {}
        for name, table, key in self._places:
            buffer = table[key] if key in table else None  # noqa: SIM401
            if buffer is not None:
                first.setdefault(id(buffer), (name, buffer))
        return dict(first.values())

    def _kinds(self, own: Mapping[str, Tensor]) -> dict[str, Kind]:
        held = ((name, local(buffer)) for name, buffer in own.items())
        return {name: (b.shape, b.dtype, b.device) for name, b in held}


def _zeros(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(shape, dtype=INTEGERS.get(dtype, dtype), device=device)
