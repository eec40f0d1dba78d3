"""The rivals of the league, each as its users run it.

DDP and its hooks are torch's own. What is no package for CPUs is written here by its
public description: DiLoCo (Douillard et al., 2023), DeMo (Peng et al., 2024) and 1-bit
Adam (Tang et al., ICML 2021). They run blocking, after backward, as their reference
code does.

This module does without the future import: DDP compares the annotations of hooks with
classes.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as post_local
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power
from torch.distributed.algorithms.model_averaging import averagers
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import gradtide
from gradtide.collectives import Warmup
from gradtide.lab.contestants import casting
from gradtide.optim import DistributedMuon, Several
from gradtide.scheme import parse


@dataclass(frozen=True)
class Entrant:
    """A model under training: `module` is called, then `step()` after each backward."""

    module: nn.Module
    step: Callable[[], None]
    settle: Callable[[], None] = lambda: None  # afterwards evaluation sees what counts
    leave: Callable[[], None] = lambda: None


Make = Callable[[nn.Module, Optimizer, int, float], Entrant]


def _ddp(model: nn.Module, **named: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model, gradient_as_bucket_view=True, **named)


def clipped(model: nn.Module, optimizer: Any, max_norm: float) -> Callable[[], None]:
    def step() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()

    return step


def ddp(wire: torch.dtype | None) -> Make:
    """DistributedDataParallel, with gradients cast by a hook if `wire` is given."""

    def make(
        model: nn.Module, optimizer: Optimizer, steps: int, max_norm: float
    ) -> Entrant:
        module = _ddp(model, static_graph=True)
        if wire is not None:
            module.register_comm_hook(None, casting(wire))
        return Entrant(module, clipped(model, optimizer, max_norm))

    return make


def power_sgd(rank: int) -> Make:
    """torch's PowerSGD hook, dense for a tenth, as its documentation advises.

    All travels in one bucket: with several, the hook's callbacks send in the order in
    which messages arrive, which over Gloo ends in mismatched messages.
    """

    def make(
        model: nn.Module, optimizer: Optimizer, steps: int, max_norm: float
    ) -> Entrant:
        state = power.PowerSGDState(
            None,
            matrix_approximation_rank=rank,
            start_powerSGD_iter=max(2, steps // 10),
        )
        module = _ddp(model, bucket_cap_mb_list=[1000])
        module.register_comm_hook(state, power.powerSGD_hook)
        return Entrant(module, clipped(model, optimizer, max_norm))

    return make


def post_local_sgd(period: int) -> Make:
    """torch's post-local SGD: dense for a tenth, then a mean every `period` steps."""

    def make(
        model: nn.Module, optimizer: Optimizer, steps: int, max_norm: float
    ) -> Entrant:
        begin = max(2, steps // 10)
        alone, _ = dist.new_subgroups(1)  # type: ignore[no-untyped-call]
        state = post_local.PostLocalSGDState(  # type: ignore[no-untyped-call]
            process_group=None, subgroup=alone, start_localSGD_iter=begin
        )
        module = _ddp(model)
        module.register_comm_hook(state, post_local.post_localSGD_hook)
        averager = averagers.PeriodicModelAverager(period=period, warmup_steps=begin)
        outer = PostLocalSGDOptimizer(optimizer, averager)

        def settle() -> None:
            for p in model.parameters():
                _average(p.data)

        return Entrant(module, clipped(model, outer, max_norm), settle)

    return make


def diloco(every: int, rate: float = 0.7, momentum: float = 0.9) -> Make:
    """Steps alone; every so many, their mean goes through Nesterov's momentum."""

    def make(
        model: nn.Module, optimizer: Optimizer, steps: int, max_norm: float
    ) -> Entrant:
        params = list(model.parameters())
        shared = [p.detach().clone() for p in params]
        memory = [torch.zeros_like(p) for p in params]
        alone, count = clipped(model, optimizer, max_norm), 0

        @torch.no_grad()
        def settle() -> None:
            whole = _flat(s - p for s, p in zip(shared, params, strict=True))
            _average(whole)
            deltas = _cut(whole, params)
            for p, s, m, d in zip(params, shared, memory, deltas, strict=True):
                m.mul_(momentum).add_(d)
                s.sub_(d + momentum * m, alpha=rate)
                p.copy_(s)

        def step() -> None:
            nonlocal count
            alone()
            count += 1
            if count % every == 0:
                settle()

        return Entrant(model, step, leave=lambda: None)

    return make


def demo(kept: int = 32, tile: int = 64, decay: float = 0.999) -> Make:
    """DeMo: the largest coefficients of momentum's cosine transform, and signs."""

    def make(
        model: nn.Module, optimizer: Optimizer, steps: int, max_norm: float
    ) -> Entrant:
        params = list(model.parameters())
        owed = [torch.zeros_like(p) for p in params]

        @torch.no_grad()
        def step() -> None:
            nn.utils.clip_grad_norm_(params, max_norm)
            sent = []
            for p, e in zip(params, owed, strict=True):
                rate = _rate(optimizer, p)
                e.mul_(decay).add_(p.grad, alpha=rate)  # type: ignore[arg-type]
                tiles = _tiles(e, tile)
                sent.append(_largest(_transformed(tiles), kept))
                back = _transformed(_dense(*sent[-1], tiles.shape), inverse=True)
                e.sub_(_untiled(back, e))
            for p, (where, values) in zip(params, sent, strict=True):
                everywhere, all_values = _gathered(where), _gathered(values)
                e = _tiles(p, tile)
                total = torch.zeros_like(e)
                number = torch.zeros_like(e)
                for w, v in zip(everywhere, all_values, strict=True):
                    total += _dense(w, v, e.shape)
                    number += _dense(w, torch.ones_like(v), e.shape)
                mean = _transformed(total / number.clamp(min=1), inverse=True)
                rate = _rate(optimizer, p)
                p.sub_(_untiled(mean, p).sign_(), alpha=rate)
            optimizer.zero_grad()

        return Entrant(model, step)

    return make


def one_bit_adam(dense: float = 0.2) -> Make:
    """1-bit Adam: Adam at first; then its squares are kept, and momentum travels in
    signs with a scale, from ranks to owners and back, with both errors fed back."""

    def make(
        model: nn.Module, optimizer: Optimizer, steps: int, max_norm: float
    ) -> Entrant:
        params, size = list(model.parameters()), dist.get_world_size()
        frozen_from, count = max(2, int(steps * dense)), 0
        n = sum(p.numel() for p in params)
        padded = -(-n // (8 * size)) * 8 * size
        first, second = torch.zeros(padded), torch.zeros(n)
        error, owner_error = torch.zeros(padded), torch.zeros(padded // size)

        @torch.no_grad()
        def step() -> None:
            nonlocal count
            count += 1
            group = optimizer.param_groups[0]
            b1, b2 = group["betas"]
            gradient = _flat(p.grad for p in params)
            if count <= frozen_from:
                _average(gradient)
                norm = gradient.norm()
                gradient.mul_(min(1.0, max_norm / (float(norm) + 1e-6)))
                first[:n].lerp_(gradient, 1 - b1)
                second.mul_(b2).addcmul_(gradient, gradient, value=1 - b2)
            else:
                norm = gradient.norm()
                gradient.mul_(min(1.0, max_norm / (float(norm) + 1e-6)))
                first[:n].lerp_(gradient, 1 - b1)
                _one_bit(first, error, owner_error)
            warm = 1 - b1**count, 1 - b2 ** min(count, frozen_from)
            move = first[:n] / warm[0] / ((second / warm[1]).sqrt_() + group["eps"])
            for p, d in zip(params, _cut(move, params), strict=True):
                rate = _rate(optimizer, p)
                p.mul_(1 - rate * _decay(optimizer, p)).sub_(d, alpha=rate)
            optimizer.zero_grad()

        return Entrant(model, step)

    return make


def shortened(text: str, share: float) -> gradtide.Scheme:
    """A scheme whose warm-up is cut down to a share of its steps."""
    whole = parse(text)
    if not isinstance(warmup := whole.collective, Warmup):
        return whole
    fewer = max(1, round(warmup.steps * share))
    return replace(whole, collective=replace(warmup, steps=fewer))


def last_dense(name: str, share: float) -> int | None:
    """The last dense step of a scheme's shortened warm-up: it rounds nothing."""
    if name in RIVALS:
        return None
    warmup = shortened(name, share).collective
    if not isinstance(warmup, Warmup) or 1.0 not in warmup.densities:
        return None
    return warmup.steps * warmup.densities.count(1.0) - 1


def scheme(text: str, share: float = 1.0) -> Make:
    """A scheme of gradtide, its warm-up cut down to a share of its steps."""
    whole = shortened(text, share)

    def make(
        model: nn.Module, optimizer: Optimizer, steps: int, max_norm: float
    ) -> Entrant:
        sync = gradtide.replicate(model, optimizer, whole)

        def step() -> None:
            sync.clip_grad_norm_(max_norm)
            optimizer.step()
            optimizer.zero_grad()

        return Entrant(model, step, sync.flush, sync.remove)

    return make


def muon(how: Make, kind: type[torch.optim.Muon]) -> Make:
    """Muon for the matrices and AdamW for the rest, exchanged by what `how` makes.

    Muon's steps are as long as AdamW's are, so that the workload's
    learning rate is for both.
    """

    def make(
        model: nn.Module, optimizer: Optimizer, steps: int, max_norm: float
    ) -> Entrant:
        embeddings = (m for m in model.modules() if isinstance(m, nn.Embedding))
        left = {p for m in embeddings for p in m.parameters()}
        two = [p for p in model.parameters() if p.dim() == 2 and p not in left]
        rest = [p for p in model.parameters() if p not in {*two}]
        group = optimizer.param_groups[0]
        named = {"lr": group["lr"], "weight_decay": group["weight_decay"]}
        own = Several(
            kind(two, **named, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(rest, **named, betas=group["betas"]),
        )
        entrant = how(model, own, steps, max_norm)

        def step() -> None:
            for each in own.param_groups:
                each["lr"] = group["lr"]
            entrant.step()

        return replace(entrant, step=step)

    return make


RIVALS: dict[str, Make] = {
    "ddp": ddp(None),
    "ddp bf16": ddp(torch.bfloat16),
    "powersgd hook, rank 4": power_sgd(4),
    "powersgd hook, rank 32": power_sgd(32),
    "post-local sgd, every 4": post_local_sgd(4),
    "diloco, every 10": diloco(10),
    "demo": demo(),
    "1-bit adam": one_bit_adam(),
    "ddp bf16, muon": muon(ddp(torch.bfloat16), torch.optim.Muon),
    # No rivals: gradtide's, with another optimizer.
    "muon by owners, dear(wire='bf16')": muon(
        scheme("dear(wire='bf16')"), DistributedMuon
    ),
    "muon, wfbp(wire='e3m0')": muon(scheme("wfbp(wire='e3m0')"), torch.optim.Muon),
}


# - What they are made of ----------------------------------------------------------


def _average(x: Tensor) -> None:
    dist.all_reduce(x)
    x.div_(dist.get_world_size())


def _gathered(x: Tensor) -> list[Tensor]:
    found = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(found, x)
    return found


def _flat(tensors: Iterable[Any]) -> Tensor:
    return torch.cat([t.reshape(-1) for t in tensors])


def _cut(whole: Tensor, like: list[Any]) -> list[Tensor]:
    parts = torch.split(whole, [p.numel() for p in like])
    return [part.view(p.shape) for part, p in zip(parts, like, strict=True)]


def _of(optimizer: Optimizer, p: Tensor, name: str) -> float:
    groups = optimizer.param_groups
    group = next(g for g in groups if any(q is p for q in g["params"]))
    return float(group.get(name, 0.0))


def _rate(optimizer: Optimizer, p: Tensor) -> float:
    return _of(optimizer, p, "lr")


def _decay(optimizer: Optimizer, p: Tensor) -> float:
    return _of(optimizer, p, "weight_decay")


def _divisor(number: int, most: int) -> int:
    return max(d for d in range(1, most + 1) if number % d == 0)


def _tiles(x: Tensor, tile: int) -> Tensor:
    """(tiles, height, width): those of a matrix, or stretches of anything else."""
    if x.dim() != 2:
        length = _divisor(x.numel(), tile)
        return x.reshape(-1, 1, length)
    rows, columns = (_divisor(s, tile) for s in x.shape)
    cut = x.reshape(x.shape[0] // rows, rows, x.shape[1] // columns, columns)
    return cut.transpose(1, 2).reshape(-1, rows, columns)


def _untiled(tiles: Tensor, like: Tensor) -> Tensor:
    if like.dim() != 2:
        return tiles.reshape(like.shape)
    _, rows, columns = tiles.shape
    across = like.shape[1] // columns
    return tiles.view(-1, across, rows, columns).transpose(1, 2).reshape(like.shape)


def _cosines(size: int) -> Tensor:
    """The orthonormal matrix of the cosine transform (DCT-II)."""
    k, n = torch.arange(size).double()[:, None], torch.arange(size).double()
    matrix = torch.cos(math.pi / size * (n + 0.5) * k) * math.sqrt(2 / size)
    matrix[0] /= math.sqrt(2)
    return matrix.float()


def _transformed(tiles: Tensor, inverse: bool = False) -> Tensor:
    left, right = _cosines(tiles.shape[1]), _cosines(tiles.shape[2])
    return left.T @ tiles @ right if inverse else left @ tiles @ right.T


def _largest(tiles: Tensor, kept: int) -> tuple[Tensor, Tensor]:
    rows = tiles.flatten(1)
    where = rows.abs().topk(min(kept, rows.shape[1])).indices
    return where.to(torch.int32), rows.gather(1, where)


def _dense(where: Tensor, values: Tensor, shape: torch.Size) -> Tensor:
    rows = values.new_zeros(shape).flatten(1)
    return rows.scatter_(1, where.long(), values).view(shape)


def _signs(x: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
    """Packed signs of x and its error, and their scale; the error is what is lost."""
    x = x + error
    scale = x.norm() / math.sqrt(x.numel())
    positive = x >= 0
    error.copy_(x - torch.where(positive, scale, -scale))
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8)
    packed = (positive.view(-1, 8) * weights).sum(1, dtype=torch.uint8)
    return packed, scale.view(1)


def _unsigned(packed: Tensor, scale: Tensor) -> Tensor:
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8)
    positive = (packed[:, None] & weights).ne(0).flatten()
    return torch.where(positive, scale, -scale)


def _one_bit(x: Tensor, error: Tensor, owner_error: Tensor) -> None:
    """The mean of x over the ranks, written to x, by signs alone."""
    size, rank = dist.get_world_size(), dist.get_rank()
    packed, scale = _signs(x, error)
    parts = torch.empty_like(packed)
    dist.all_to_all_single(parts, packed)
    rows = zip(parts.view(size, -1), _gathered(scale), strict=True)
    own = torch.stack([_unsigned(row, s) for row, s in rows]).mean(0)
    packed, scale = _signs(own, owner_error)
    means = zip(_gathered(packed), _gathered(scale), strict=True)
    x.copy_(torch.cat([_unsigned(row, s) for row, s in means]))
    assert 0 <= rank < size
