"""Train a small byte-level GPT with Lightning, which starts both ranks by itself.

python examples/lightning_gpt.py; in a program of your own, two lines are new."""

from typing import Any

import lightning
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from gradtide.integrations.lightning import GradtideMetrics, GradtideStrategy
from gradtide.lab.workloads import gpt
from gradtide.lab.workloads.workload import classification_loss


class Bytes(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.gpt = gpt.GPT(gpt.SIZES["gpt-small"])

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss = classification_loss(self.gpt, (batch[:, :-1], batch[:, 1:]))
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Optimizer:
        return gpt.adamw(self)


def main(**options: Any) -> None:
    rows: Any = gpt.corpus(max_bytes=1_000_000)[0].long().unfold(0, 129, 129)
    data = DataLoader(rows, batch_size=6, shuffle=True)
    strategy = GradtideStrategy("topka2a(0.02, warmup=40, schedule='dear')")
    options |= {"strategy": strategy, "callbacks": [GradtideMetrics()]}
    lightning.Trainer(accelerator="cpu", devices=2, **options).fit(Bytes(), data)


if __name__ == "__main__":
    main(gradient_clip_val=1.0, max_steps=200)
