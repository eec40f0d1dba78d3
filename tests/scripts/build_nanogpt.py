"""As build-nanogpt: the optimizer comes after DDP, and the loss is shared."""

import torch
import torch.distributed as dist
from common import GPT, begin, tokens, values
from torch.nn.parallel import DistributedDataParallel as DDP

MICRO = 2


def main() -> dict[str, object]:
    begin()
    model = DDP(GPT())
    raw = model.module
    optimizer = torch.optim.AdamW(raw.parameters(), lr=1e-2, betas=(0.9, 0.95))
    losses, norms = [], []
    for step in range(12):
        model.train()
        optimizer.zero_grad()
        total = torch.zeros(())
        for micro in range(MICRO):
            model.require_backward_grad_sync = micro == MICRO - 1
            _, loss = model(*tokens(MICRO * step + micro))
            loss = loss / MICRO
            total += loss.detach()
            loss.backward()
        dist.all_reduce(total, op=dist.ReduceOp.SUM)
        total /= dist.get_world_size()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9).item())
        optimizer.step()
        losses.append(total.item())
    return {"losses": losses, "near": norms, "weights": values(raw)}


if __name__ == "__main__":
    main()
