"""Layers that are skipped by chance, on every rank its own; and an auxiliary head."""

import torch
from common import batch, begin, values
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Skipping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.head, self.auxiliary = nn.Linear(32, 4), nn.Linear(32, 4)

    def forward(self, x: Tensor, used: list[int]) -> tuple[Tensor, Tensor]:
        x = self.first(x)
        for i in used:
            x = x + torch.tanh(self.layers[i](x))
        return self.head(x), self.auxiliary(x)


def main() -> dict[str, object]:
    args = begin()
    model = DDP(Skipping(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step in range(14):
        x, y = batch(step)
        used = [i for i in range(4) if (step + i + args.rank) % 3]
        if step % 4 == 0:
            used = [0]  # no rank uses the others
        output, _ = model(x, used)
        loss = nn.functional.cross_entropy(output, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "weights": values(model)}


if __name__ == "__main__":
    main()
