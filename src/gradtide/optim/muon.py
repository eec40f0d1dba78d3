"""Muon whose matrices have owners: each is orthogonalised by one rank, for all."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from gradtide.core.engine import Engine
from gradtide.core.levels import levels_of
from gradtide.core.torch_internals import disable_dynamo
from gradtide.runtime.guards.validation import Signature, check_ranks_agree
from gradtide.scheme import Scheme, with_levels
from gradtide.transport import Mesh, ProcessGroup, connect
from gradtide.wire import NARROW, Wire

try:
    from torch.optim import Muon

    from gradtide.core.torch_internals.muon import adjust_lr
    from gradtide.optim.matrices import Matrix, Message, orthogonalized, signature
    from gradtide.optim.owners import assign, together
except ImportError as error:
    raise ImportError(
        f"gradtide.optim stands on torch.optim.Muon, which torch {torch.__version__} "
        "has not, or not as expected: install torch 2.9 or later"
    ) from error

MESSAGE = 1 << 22  # elements: 8 MB of updates; less => more start-ups, more overlap
STATE = "momentum_buffer"


class DistributedMuon(Muon):
    """`torch.optim.Muon` whose orthogonalisation is divided among ranks.

    Under data parallelism all ranks have the same averaged gradients, and each would
    orthogonalise every matrix. Here each matrix has an owner, who alone computes and
    keeps its momentum and orthogonalises its update; updates are gathered. So time of
    orthogonalisation and memory of momentum fall as 1 / P with P ranks. Parameters are
    bit for bit those of `torch.optim.Muon`. Owners are chosen by the cost of
    Newton-Schulz, the most expensive matrix first, to the rank that has least.

    Cost of communication: n (P - 1) / P elements of 16 bits a rank, beside that of the
    gradients, for n elements of all matrices. While one message travels, the next is
    computed. Under a schedule that defers updates (`dear`), updates travel in the place
    of the gradients' averages, which only owners are sent.

    Source: Jordan et al., Muon: an optimizer for hidden layers in neural networks,
    2024; divided by whole matrices as in Liu et al., Muon is scalable for LLM training,
    2025, which gathers what ZeRO divides.

    The constructor, `step` and `consolidate_state_dict` are collective calls. Gradients
    have to be averaged before, by `gradtide.replicate` or DistributedDataParallel:
    those of the owner count. A matrix whose owner has no gradient is left alone, on
    every rank. Parameters that are no matrices need another optimizer, such as AdamW.

    Args:
        params: Parameters or groups of them, as for `torch.optim.Muon`; the same on
            every rank, matrices on one device.
        *args: Further arguments of `torch.optim.Muon`.
        process_group: The ranks that train together; None stands for all ranks. It
            takes what `gradtide.replicate` takes.
        wire: In how many bits updates travel: "int8" halves their bytes, and parameters
            are then no more bit for bit those of torch's Muon, though the same on all
            ranks. None, the default, rounds nothing.
        **kwargs: Further arguments of `torch.optim.Muon`.

    Raises:
        RuntimeError: torch.distributed is not initialised.
        ValueError: A parameter is no matrix, is sharded or complex, or matrices or
            hyper-parameters differ between ranks. It is raised on every rank.
    """

    exchanges = True  # inside its step: see `runtime.validation.is_joinable`
    answer_dtype = torch.bfloat16
    deferred = False  # its steps are made by others: see `Divides`

    def __init__(
        self,
        params: Any,
        *args: Any,
        process_group: ProcessGroup | Mesh | None = None,
        wire: Wire = None,
        **kwargs: Any,
    ) -> None:
        refused: Exception | None = None
        self.wire = wire
        device = torch.device("cpu")
        try:
            super().__init__(params, *args, **kwargs)
            device = next(self._params()).device
            if wire not in (None, *NARROW):
                names = ", ".join(map(repr, NARROW))
                raise ValueError(f"DistributedMuon(wire={wire!r}): {names} or None")
        except (ValueError, TypeError) as error:
            refused = error
        transport = connect(process_group, device)
        self._engine = Engine(transport)
        hosts = with_levels(Scheme(), transport.hosts).levels
        self._engine.levels = levels_of(transport.group, hosts)
        self._owners: dict[Tensor, int] = {}
        self._divided = False  # this rank has the momentum of its own matrices alone
        try:
            self._assign(refused)
        except Exception:
            transport.close()
            raise
        weakref.finalize(self, transport.close).atexit = False

    # - The step -----------------------------------------------------------------------

    @disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step: orthogonalise this rank's matrices, and update all.

        This is a collective call.

        Args:
            closure: It is called first, with gradients enabled, if it is given.

        Returns:
            What the closure returned, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.deferred:
            return loss
        self.owners()
        matrices = self._matrices()
        for matrix in matrices:  # before anything is sent, on every rank
            if matrix.param.grad is not None and matrix.param.grad.is_sparse:
                raise RuntimeError(
                    "Muon does not take sparse gradients: build the embedding with "
                    "sparse=False, or train it by another optimizer"
                )
        self._drop()
        travelling: deque[Message] = deque()
        trained = [m for m in matrices if m.param.requires_grad]
        for members in self._together(trained):
            how = torch.bfloat16, self._engine, self._update, self.wire
            travelling.append(Message(members, *how))
            if len(travelling) > 1:  # the next has been computed meanwhile
                _apply_all(travelling.popleft())
        for message in travelling:
            _apply_all(message)
        return loss

    def _update(self, matrix: Matrix) -> Tensor | None:
        """The update of a matrix that this rank owns, before its learning rate; None
        without a gradient."""
        p, group, _ = matrix
        grad = p.grad
        if grad is None:
            return None
        state = self.state[p]
        if STATE not in state:
            state[STATE] = torch.zeros_like(grad)
        buffer: Tensor = state[STATE]
        buffer.lerp_(grad, 1 - group["momentum"])
        update = grad.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer
        return orthogonalized(update, group)

    # - A step that is deferred, see `runtime.optimizer.deferred_step` -----------------

    @torch.no_grad()
    def answers(self, params: Iterable[Tensor]) -> dict[Tensor, Tensor]:
        """The updates of some matrices of this rank, by `.grad`, before learning rates.

        Those of parameters that are not here are left out. Local.

        Args:
            params: Parameters with gradients, of any optimizer.

        Returns:
            An update in bfloat16 of each that is a matrix of this optimizer.
        """
        self._drop()
        known = {matrix.param: matrix for matrix in self._matrices()}
        found = {p: self._update(known[p]) for p in params if p in known}
        return {p: update for p, update in found.items() if update is not None}

    @torch.no_grad()
    def take(self, answers: Mapping[Tensor, Tensor]) -> None:
        """Update matrices by what their owners have computed. Local.

        Args:
            answers: Updates, as `answers` returns them; of others nothing is changed.
        """
        for matrix in self._matrices():
            if matrix.param in answers:
                _apply(matrix, answers[matrix.param])

    def owners(self) -> Mapping[Tensor, int]:
        """The rank that owns each matrix; a collective call where some were added.

        Returns:
            Ranks by parameter.
        """
        if any(p not in self._owners for p in self._params()):  # added since
            self._assign()
        return self._owners

    def alone(self) -> Muon:
        """A `torch.optim.Muon` with the same groups and the same state. Local.

        Returns:
            One that orthogonalises every matrix itself.
        """
        plain: Muon = object.__new__(Muon)
        own = "_engine", "_owners", "_divided", "deferred", "wire"
        plain.__dict__ = {k: v for k, v in vars(self).items() if k not in own}
        return plain

    # - Owners -------------------------------------------------------------------------

    def _params(self) -> Iterator[Tensor]:
        return (p for group in self.param_groups for p in group["params"])

    def _assign(self, refused: Exception | None = None) -> None:
        """Give owners to matrices that have none, if ranks have the same ones.

        Raises on every rank what was `refused` on this one.
        """

        def prepare() -> tuple[list[Matrix], Signature]:
            if refused is not None:
                raise refused
            matrices = [m for m in self._matrices() if m.owner < 0]
            told = signature(self.param_groups)
            return matrices, {"wire": repr(self.wire), **told}

        remedy = "build the same optimizer of the same model on every rank"
        transport = self._engine.transport
        found = check_ranks_agree(transport, prepare, remedy)
        owners = assign([m.cost for m in found], transport.group.size)
        self._owners.update(zip((m.param for m in found), owners, strict=True))
        held = {*self._params()}  # others have been taken out, or replaced
        self._owners = {p: rank for p, rank in self._owners.items() if p in held}

    def _matrices(self) -> list[Matrix]:
        pairs = ((p, group) for group in self.param_groups for p in group["params"])
        return [Matrix(p, group, self._owners.get(p, -1)) for p, group in pairs]

    def _together(self, found: list[Matrix]) -> list[list[Matrix]]:
        """The matrices of each message."""
        owners, costs = [m.owner for m in found], [m.cost for m in found]
        numels = [m.param.numel() for m in found]
        return [[found[i] for i in m] for m in together(owners, costs, numels, MESSAGE)]

    # - State --------------------------------------------------------------------------

    def consolidate_state_dict(self) -> None:
        """Gather the momentum of all matrices on every rank, until the next step.

        This is a collective call, before `state_dict()`.
        """
        for matrices in self._together(self._matrices()):
            for dtype in dict.fromkeys(m.param.dtype for m in matrices):
                alike = [m for m in matrices if m.param.dtype == dtype]
                message = Message(
                    alike,
                    dtype,
                    self._engine,
                    lambda m: self.state.get(m.param, {}).get(STATE),
                )
                for matrix, value in message.arrived():
                    if matrix.owner != self._engine.group.rank:
                        own = torch.empty_like(matrix.param).copy_(value)
                        self.state[matrix.param][STATE] = own
        for p in self._params():  # in the same order on every rank
            if p in self.state:
                self.state[p] = self.state.pop(p)
        self._divided = False

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all matrices, as `torch.optim.Muon` does. Local.

        It can be loaded by `torch.optim.Muon`, and with any number of ranks.

        Returns:
            The state of every matrix and the groups.

        Raises:
            RuntimeError: Other ranks have a part of it.
        """
        if self._divided:
            raise RuntimeError(
                "each rank has the momentum of its own matrices: call "
                "optimizer.consolidate_state_dict() on every rank before state_dict()"
            )
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state of this class or of `torch.optim.Muon`. Local.

        Args:
            state_dict: The state of all matrices, the same on every rank. The next step
                lets go of what other ranks own.
        """
        super().load_state_dict(state_dict)
        self._divided = False

    def _drop(self) -> None:
        """Let go of momentum that other ranks have."""
        if not self._divided:
            for p, owner in self._owners.items():
                if owner != self._engine.group.rank:
                    self.state.pop(p, None)
        self._divided = self._engine.group.size > 1


def _apply_all(message: Message) -> None:
    """Update the parameters of a message."""
    for matrix, update in message.arrived():
        _apply(matrix, update)


def _apply(matrix: Matrix, update: Tensor) -> None:
    p, group, _ = matrix
    lr = float(group["lr"])
    p.mul_(1 - lr * group["weight_decay"])
    p.add_(update, alpha=-adjust_lr(lr, group["adjust_lr_fn"], p.shape))
