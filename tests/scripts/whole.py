"""The whole wrapped model is saved, copied, and kept in an object that is pickled."""

import copy
from pathlib import Path

import torch
import torch.distributed as dist
from common import Net, batch, begin, values
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main() -> dict[str, object]:
    args = begin()
    args.model = model = DDP(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses: list[float] = []
    for step in range(12):
        x, y = batch(step)
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step == 5:
            best = copy.deepcopy(model)
    path = Path(args.out, f"whole{args.rank}.pt")
    torch.save(model, path)
    torch.save(args, Path(args.out, f"args{args.rank}.pt"))
    loaded = torch.load(path, weights_only=False)
    again = torch.load(Path(args.out, f"args{args.rank}.pt"), weights_only=False).model
    before = values(best, loaded, again)
    dist.barrier()
    optimizer = torch.optim.AdamW(loaded.parameters(), lr=1e-2)
    for step in range(12, 16):  # what was loaded is trained on
        x, y = batch(step)
        loss = nn.functional.cross_entropy(loaded(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "seen": before, "weights": values(loaded)}


if __name__ == "__main__":
    main()
