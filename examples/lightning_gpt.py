"""Bytes, by Lightning, which starts both ranks: python examples/lightning_gpt.py"""

import pydoc
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from gradtide.integrations.lightning import GradtideMetrics, GradtideStrategy


class Bytes(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(16 * 32, 512), nn.GELU(), nn.Linear(512, 256)]
        self.model = nn.Sequential(nn.Embedding(256, 32), nn.Flatten(), *layers)

    def training_step(self, rows: Tensor, index: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.model(rows[:, :-1]), rows[:, -1])
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(**options: Any) -> None:
    text = torch.tensor(list(Path(pydoc.__file__).read_bytes()))
    data: Any = DataLoader(text.unfold(0, 17, 17), batch_size=64, shuffle=True)  # type: ignore[arg-type]
    strategy = GradtideStrategy("topka2a(0.02, warmup=40, schedule='dear')")
    options |= {"strategy": strategy, "callbacks": [GradtideMetrics()]}
    lightning.Trainer(accelerator="cpu", devices=2, **options).fit(Bytes(), data)


if __name__ == "__main__":
    main(gradient_clip_val=1.0, max_steps=100)
