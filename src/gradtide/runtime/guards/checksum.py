"""Whether all ranks hold the same parameters: a checksum every so many steps.

Data parallelism rests on parameters that are alike on all ranks, bit for bit. What one
rank alone does to them (an edit in place, an optimizer that moves them outside of its
step) no exchange of gradients ever mends. So the small all-reduce that ends a backward
pass carries, now and then, a number of each rank's parameters. By then every deferred
update of the step before has been applied, and the next one has not begun.

That costs one reading pass, and no message. Nobody waits for it: what came of it is
looked at when the next backward begins, which is at the same point of every rank's
program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice

import torch
from torch import Tensor, nn

from gradtide.core.engine import Engine
from gradtide.core.ops import AllReduce, Group
from gradtide.runtime.layout.broadcast import digest, held
from gradtide.runtime.layout.parameters import shared_parameters
from gradtide.transport import Transport
from gradtide.transport.shards import Shards, local

WORD = 31  # bits of a checksum that one entry of the all-reduce carries
COLUMNS = 64  # sums of each tensor; more: slower for small ones
FACTOR = 2 * 0x9E3779B9  # spreads the sums over all bits
ABSTAINS = -1  # in the place of a word: this rank has no opinion

CAUSES = (
    "something changed it on one rank alone: an edit in place, an optimizer that moves "
    "parameters outside step(), a step() that one rank left out or made with other "
    "hyper-parameters, or ranks whose processors round otherwise. Make the change on "
    "every rank, with the same values; or pass check_every=0 to replicate() if ranks "
    "may differ"
)


class ParameterCheck:
    """Compares parameters after the first step, and then every `every` steps.

    A step is counted where a backward pass was exchanged, which all ranks have done
    equally often, whatever their optimizers did. With `every` 0 nothing is compared.
    """

    def __init__(
        self, model: nn.Module, transport: Transport, every: int, shards: Shards
    ) -> None:
        self._model, self._transport, self._every = model, transport, every
        self._shards = shards
        self._steps = 0
        self._asked = False  # the all-reduce under way carries checksums
        self._differ = False
        self._apart = 0  # times that a message of its own was asked for

    def words(self, abstain: bool = False) -> Callable[[], list[int]]:
        """This rank's part of the all-reduce, to be called when that is made.

        A rank abstains if its parameters are known to be behind the others'.
        """
        self._steps += 1
        due = self._every > 0 and self._transport.group.size > 1
        self._asked = due and self._steps % self._every == 2 % self._every
        if not self._asked:
            return list
        total = None if abstain else checksum(p for _, p in self._named())
        return lambda: words_of(total, self._transport.group)

    def update(self, words: Iterator[int]) -> None:
        """Take the sum of all ranks' parts from the answer."""
        if self._asked:
            row = list(islice(words, 2 * self._transport.group.size))
            self._differ = self._shards.anywhere(differ(row))
            self._asked = False

    def refuse(self) -> None:
        """Raise RuntimeError, on every rank, if the ranks turned out to differ."""
        if self._differ:
            self._differ = False
            own = {name: digest(p) for name, p in self._named()}
            compare(self._transport, own, "", CAUSES, self._shards)

    def compare_now(self, engine: Engine, causes: str) -> None:
        """RuntimeError, on every rank, if they differ: a message of its own.

        It is for what happens to all ranks at the same point. After `every` times that
        all were alike, each `every`-th is for comparing.
        """
        if self._every == 0 or engine.group.size == 1:
            return
        self._apart += 1
        if self._apart > self._every and self._apart % self._every:
            return
        total = checksum(p for _, p in self._named())
        words = words_of(total, engine.group)
        row = torch.tensor(words, dtype=torch.int64, device="cpu")
        told = engine.ask("unexchanged", AllReduce(row))().tolist()
        if self._shards.anywhere(differ(told)):
            own = {name: digest(p) for name, p in self._named()}
            compare(self._transport, own, "", causes, self._shards)

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, local(p)) for name, p in shared_parameters(self._model))


def compare(
    transport: Transport,
    own: Mapping[str, bytes],
    moment: str,
    causes: str,
    shards: Shards,
) -> None:
    """Raise RuntimeError, on every rank, for the first digest in which ranks differ.

    All ranks call it at the same point, with the same names; those with other parts of
    the parameters, too, and they raise as well.
    """
    first, *others = transport.gather_objects(dict(own))
    where = ""
    for name in own:
        odd = [i for i, one in enumerate(others, 1) if one.get(name) != first.get(name)]
        if odd and not where:
            where = f"{name} differs between ranks 0 and {', '.join(map(str, odd))}"
    if shards.anywhere(bool(where)):
        where = where or "another part of a parameter differs between ranks"
        raise RuntimeError(f"{where}{moment}: {causes}")


def checksum(tensors: Iterable[Tensor]) -> Tensor:
    """A number (int64) that tells tensors from others, by their bits.

    It is computed on the first tensor's device, which nothing waits for. A change of
    one entry always changes it, whatever the entry is: a NaN is equal to itself.
    """
    sums = [_sums_of_bits(piece) for tensor in tensors for piece in held(tensor)]
    together = torch.cat([each.to(sums[0].device) for each in sums])
    # Odd factors, so that none of them loses a bit; no two of them are alike.
    factors = (
        torch.arange(len(together), device=together.device, dtype=torch.int64) * FACTOR
        + 1
    )
    return (together * factors).sum()


def _sums_of_bits(tensor: Tensor) -> Tensor:
    """Sums of every COLUMNS-th word, which also tell entries that changed places."""
    flat = tensor.detach().reshape(-1)
    size = flat.element_size()
    whole = flat.numel() * size % 4 == 0
    if whole and flat.storage_offset() * size % 4:
        flat = flat.clone()  # the sums of equal tensors are equal wherever they are
    words = flat.view(torch.int32 if whole else torch.uint8)
    rows = len(words) // COLUMNS * COLUMNS
    # In 64 bits: of sums in 32, an even number of changed signs would be gone.
    sums = words[:rows].view(-1, COLUMNS).sum(0, dtype=torch.int64)
    sums[: len(words) - rows] += words[rows:]
    return sums


def words_of(total: Tensor | None, group: Group) -> list[int]:
    """A rank's part of a sum that tells whether checksums differ; None: it abstains."""
    row = [0] * (2 * group.size)
    own = [ABSTAINS, ABSTAINS]
    if total is not None:
        bits = int(total) % (1 << 2 * WORD)
        own = [bits >> WORD, bits % (1 << WORD)]
    row[2 * group.rank : 2 * group.rank + 2] = own
    return row


def differ(row: Sequence[int]) -> bool:
    """Whether some ranks' checksums differ, by the sum of all their words."""
    told = set(zip(row[::2], row[1::2], strict=True))
    return len(told - {(ABSTAINS, ABSTAINS)}) > 1
