"""As DINO: a teacher follows the student; own clipping; dropped gradients."""

import torch
import torch.nn.functional as F
from common import batch, begin, mlp, values
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP


def clip_gradients(model: nn.Module, clip: float) -> list[float]:
    norms = []
    for p in model.parameters():
        if p.grad is not None:
            norm = p.grad.data.norm(2)
            norms.append(norm.item())
            coefficient = clip / (norm + 1e-6)
            if coefficient < 1:
                p.grad.data.mul_(coefficient)
    return norms


def distance(student: Tensor, teacher: Tensor) -> Tensor:
    target = F.softmax(teacher / 0.5, dim=-1)
    return torch.sum(-target * F.log_softmax(student, dim=-1), dim=-1).mean()


def main() -> dict[str, object]:
    begin()
    student, teacher = mlp(8), mlp(8)
    student = DDP(student)
    teacher.load_state_dict(student.module.state_dict())
    for p in teacher.parameters():
        p.requires_grad = False
    optimizer = torch.optim.AdamW(student.parameters())
    losses, norms = [], []
    for step in range(14):
        for group in optimizer.param_groups:
            group["lr"], group["weight_decay"] = 0.01 / (1 + step / 10), 0.01 * step
        x, y = batch(step)
        target = teacher(x) + 4 * F.one_hot(y, 8)
        loss = distance(student(x), target)
        optimizer.zero_grad()
        loss.backward()
        norms += clip_gradients(student, 0.3)
        if step < 3:
            student.module[2].weight.grad = None
        optimizer.step()
        with torch.no_grad():
            pairs = zip(student.module.parameters(), teacher.parameters(), strict=True)
            for own, average in pairs:
                average.data.mul_(0.9).add_(0.1 * own.detach().data)
        losses.append(loss.item())
    return {"losses": losses, "near": norms, "weights": values(student, teacher)}


if __name__ == "__main__":
    main()
