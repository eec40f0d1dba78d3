"""Bytes, by Accelerate: torchrun --nproc-per-node 2 examples/accelerate_gpt.py"""

import pydoc
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

from gradtide.integrations.accelerate import install
from gradtide.integrations.metrics import Meter, line


def main(max_bytes: int = 100_000) -> None:
    install(scheme="dear")  # the new line
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    layers = [nn.Linear(16 * 32, 512), nn.GELU(), nn.Linear(512, 256)]
    model: Any = nn.Sequential(nn.Embedding(256, 32), nn.Flatten(), *layers)
    text = torch.tensor(list(Path(pydoc.__file__).read_bytes()[:max_bytes]))
    loader: Any = DataLoader(text.unfold(0, 17, 17), batch_size=64, shuffle=True)  # type: ignore[arg-type]
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    meter = Meter()
    for rows in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(rows[:, :-1]), rows[:, -1])
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            spent = line(meter.read(model.replica))
            accelerator.print(f"loss {loss.item():.3f}, {spent}")


if __name__ == "__main__":
    main()
