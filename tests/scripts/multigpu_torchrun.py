"""As the tutorial's multigpu_torchrun: a trainer, which resumes from a snapshot."""

from pathlib import Path

import torch
import torch.distributed as dist
from common import batch, begin, mlp, values
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Trainer:
    def __init__(self, model: nn.Module, path: Path, rank: int) -> None:
        self.path, self.rank, self.begun = path, rank, 0
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if path.exists():
            snapshot = torch.load(path)
            model.load_state_dict(snapshot["model"])
            self.begun = snapshot["epochs"]
        self.model = DDP(model)
        self.losses: list[float] = []

    def train(self, epochs: int) -> None:
        for epoch in range(self.begun, epochs):
            for step in range(5):
                x, y = batch(10 * epoch + step)
                self.optimizer.zero_grad()
                loss = nn.functional.cross_entropy(self.model(x), y)
                loss.backward()
                self.optimizer.step()
                self.losses.append(loss.item())
            if self.rank == 0:
                state = {"model": self.model.module.state_dict(), "epochs": epoch + 1}
                torch.save(state, self.path)


def main() -> dict[str, object]:
    args = begin()
    path = Path(args.out, "snapshot.pt")
    first = Trainer(mlp(), path, args.rank)
    first.train(2)
    dist.barrier()
    second = Trainer(mlp(), path, args.rank)
    second.train(5)
    return {"losses": first.losses + second.losses, "weights": values(second.model)}


if __name__ == "__main__":
    main()
