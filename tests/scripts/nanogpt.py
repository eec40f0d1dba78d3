"""As nanoGPT: micro-steps by `require_backward_grad_sync`, a GradScaler, evaluation."""

import math

import torch
from common import GPT, begin, tokens, values
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

MICRO, WARM, STEPS = 3, 3, 12


@torch.no_grad()
def estimate_loss(model: nn.Module) -> float:
    model.eval()
    found = torch.stack([model(*tokens(step))[1] for step in range(800, 803)]).mean()
    model.train()
    return found.item()


def rate(step: int) -> float:
    if step < WARM:
        return 1e-2 * (step + 1) / WARM
    return 5e-3 * (1 + math.cos(math.pi * (step - WARM) / (STEPS - WARM)))


def main() -> dict[str, object]:
    begin()
    model = GPT()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30, growth_interval=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model = DDP(model)
    losses, seen = [], []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        if step % 5 == 0:
            seen.append(estimate_loss(model))
        for micro in range(MICRO):
            model.require_backward_grad_sync = micro == MICRO - 1
            with torch.autocast("cpu", torch.bfloat16):
                _, loss = model(*tokens(MICRO * step + micro))
            scaler.scale(loss / MICRO).backward()
        losses.append(loss.item())
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
    return {"losses": losses, "seen": seen, "weights": values(model.module)}


if __name__ == "__main__":
    main()
