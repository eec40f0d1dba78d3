"""Train a small byte-level GPT with Accelerate, by exact means that hide in forwards.

torchrun --nproc-per-node 2 examples/accelerate_gpt.py; a line of yours is new."""

from typing import Any

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from gradtide.integrations.accelerate import install
from gradtide.integrations.metrics import Meter, line
from gradtide.lab.workloads import gpt
from gradtide.lab.workloads.workload import classification_loss


def main(max_bytes: int = 500_000) -> None:
    install(scheme="dear")  # the new line
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model: Any = gpt.GPT(gpt.SIZES["gpt-small"])
    rows: Any = gpt.corpus(max_bytes)[0].long().unfold(0, 129, 129)
    loader = DataLoader(rows, batch_size=6, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, gpt.adamw(model), loader)
    meter = Meter()
    for batch in loader:
        with accelerator.accumulate(model):
            loss = classification_loss(model, (batch[:, :-1], batch[:, 1:]))
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            costs = line(meter.read(model.replica))
            accelerator.print(f"loss {loss.item():.3f}, {costs}")


if __name__ == "__main__":
    main()
