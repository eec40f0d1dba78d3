"""Train a small byte-level transformer data-parallel, over a network that is slow.

On a laptop:    torchrun --nproc-per-node 2 examples/train_gpt.py --scheme dear
On many hosts:  the same script, with torchrun's --nnodes and --rdzv-endpoint.
On GPUs:        --device cuda; where ranks share one, --backend gloo as well.

The text is Python's own standard library, so that nothing has to be downloaded.
"""

from __future__ import annotations

import argparse
import math
import os
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import gradtide

WIDTH, HEADS, LAYERS, BLOCK = 192, 6, 6, 128
WARM_UP = 20  # steps of the learning rate


class GPT(nn.Module):
    """Bytes (batch, at most BLOCK) to logits (batch, length, 256)."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(256, WIDTH)
        self.position = nn.Embedding(BLOCK, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        where = torch.arange(length, device=tokens.device)
        mask = nn.Transformer.generate_square_subsequent_mask(length, tokens.device)
        x = self.token(tokens) + self.position(where)
        logits: Tensor = self.head(self.layers(x, mask=mask, is_causal=True))
        return logits


def text() -> Tensor:
    """The standard library's modules, one after the other, as bytes."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    content = bytearray(b"".join(file.read_bytes() for file in files))
    return torch.frombuffer(content, dtype=torch.uint8)


def batch(data: Tensor, size: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random pieces of the text, and the byte that follows each of theirs."""
    starts = torch.randint(len(data) - BLOCK, (size, 1), generator=rng)
    pieces = data[starts + torch.arange(BLOCK + 1)].long()
    return pieces[:, :-1], pieces[:, 1:]


def loss_of(model: nn.Module, pieces: tuple[Tensor, Tensor]) -> Tensor:
    device = next(model.parameters()).device
    x, y = (part.to(device) for part in pieces)
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def own_device(kind: str) -> torch.device:
    """This rank's device of a kind, from now on the current one."""
    if kind == "cpu":
        return torch.device(kind)
    index = int(os.environ["LOCAL_RANK"]) % torch.accelerator.device_count()
    torch.accelerator.set_device_index(index)
    return torch.device(kind, index)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scheme", default="dear", help="how gradients are averaged")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=6)
    parser.add_argument("--checkpoint", default="gpt.pt")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--backend", help="of torch.distributed, if not torch's choice")
    args = parser.parse_args()

    device = own_device(args.device)
    dist.init_process_group(args.backend or ("gloo" if args.device == "cpu" else None))
    rank = dist.get_rank()
    torch.manual_seed(0)
    data = text()
    train, held_out = data[: -len(data) // 20], data[-len(data) // 20 :]
    own = torch.Generator().manual_seed(1 + rank)  # this rank's pieces of the text
    model = GPT().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / WARM_UP, 1.0, WARM_UP)

    sync = gradtide.replicate(model, optimizer, args.scheme)  # the one line for many

    for step in range(args.steps):
        loss = loss_of(model, batch(train, args.batch_size, own))
        loss.backward()  # type: ignore[no-untyped-call]
        sync.clip_grad_norm_(1.0)  # the norm of the average, over all ranks
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if rank == 0 and step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}")

    model.eval()
    with torch.no_grad():  # on all ranks: none leaves early
        nats = loss_of(model, batch(held_out, 32, torch.Generator().manual_seed(0)))
    state = model.state_dict()
    if rank == 0:
        print(f"held out: {nats.item() / math.log(2):.3f} bits a byte")
        torch.save(state, args.checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
