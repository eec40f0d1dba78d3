"""One rank, each in turn, chooses the entries that all average."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from gradtide.collectives._entries import Selecting, Steps, kept
from gradtide.collectives.contrib.gtopk import at_most
from gradtide.collectives.dense import Dense, averaged
from gradtide.core.ops import AllReduce, Broadcast, Flow, Group
from gradtide.core.payload import Payload, Traits, next_step
from gradtide.selectors.indices import index_dtype
from gradtide.wire import Codec, codec_of

SMALL = 1 << 14  # bytes up to which an all-reduce in one hop beats two halves


@dataclass(frozen=True)
class CLTk(Selecting):
    """Average the entries at the indices of one rank's k largest.

    In each step the next rank chooses. This is CLT-k, of ScaleCom (Chen et al., NeurIPS
    2020).

    Cost, with P ranks: a broadcast of k indices, and the two halves of a dense exchange
    of k values, three rounds. For float32 that is 4 k bytes, and 8 k (P - 1) / P. Where
    values take 16 KB or less, they are exchanged in one round of P - 1 direct messages,
    without a cast. A rank selects in one of P steps only.

    Residual: on every rank, all but the chosen entries. What the other ranks have
    elsewhere waits for their turn.

    Args:
        density: The share of a bucket's entries that are chosen, see `Selecting`.
        select: The selector that finds the entries, see `Selecting`.
        wire: In what values travel, see `Selecting`. What it takes off goes to the
            residual, that of the mean to the part's owner's.

    Raises:
        ValueError: A field is outside its range.
    """

    @property
    def traits(self) -> Traits:
        return replace(super().traits, small=SMALL)

    def reduce(self, payload: Payload, group: Group) -> Flow:
        n, k = len(payload.flat), kept(self.density, len(payload.flat))
        codec = codec_of(self.wire, payload.flat.dtype)
        if not pays(n, k, group.size, codec):
            return (yield from Dense(self.wire).reduce(payload, group))
        small = k * payload.flat.itemsize <= SMALL
        dtype = payload.flat.dtype if small else codec.dtype
        where = yield from self._chosen(payload, k, dtype, group)
        values = payload.pop_entries(where, dtype)
        if small:
            mean = (yield AllReduce(values)).div_(group.size)
        else:
            mean = yield from averaged(values, payload, codec, group, where)
        return payload.sparse_mean(where, mean)

    def _chosen(
        self, payload: Payload, k: int, sent_as: torch.dtype, group: Group
    ) -> Steps:
        """Indices that the leader of this step chose; at most k."""
        leader = next_step(payload.state) % group.size
        dtype = index_dtype(len(payload.flat))
        where = torch.empty(k, dtype=dtype, device=payload.flat.device)
        if group.rank == leader:
            x = payload.selection_scores
            found = at_most(k, self.select(x, k, payload.state), x)
            where[: len(found)] = found
            where[len(found) :] = found[-1]
            payload.check_finite(payload.flat.index_select(0, found).to(sent_as))
        else:
            # What the leader will choose is not known yet.
            payload.check_all_finite(sent_as)
        return torch.unique_consecutive((yield Broadcast(where, leader)))


def pays(n: int, k: int, size: int, codec: Codec) -> bool:
    """Whether indices and values of k entries are fewer bytes than n values."""
    twice = 2 * (size - 1) * codec.width
    return size > 1 and 4 * k * size + twice * k < twice * n
