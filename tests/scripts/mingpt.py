"""As minGPT-ddp: groups with and without decay, clipping by torch, a snapshot."""

from pathlib import Path

import torch
from common import GPT, begin, tokens, values
from torch.nn.parallel import DistributedDataParallel as DDP


def main() -> dict[str, object]:
    args = begin()
    model = GPT()
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    model = DDP(model)
    losses, seen = [], []
    for step in range(16):
        _, loss = model(*tokens(step))
        losses.append(loss.item())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        seen.append(float(norm))
        optimizer.step()
    if args.rank == 0:
        snapshot = {"model": model.module.state_dict(), "epoch": 1}
        torch.save(snapshot, Path(args.out, "snapshot.pt"))
    return {"losses": losses, "near": seen, "weights": values(model)}


if __name__ == "__main__":
    main()
