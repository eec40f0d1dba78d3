"""As timm: rates by layer, an AveragedModel that is evaluated, a scaler."""

import torch
from common import Net, batch, begin, values
from torch import nn
from torch.nn.parallel import DistributedDataParallel as NativeDDP
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


def main() -> dict[str, object]:
    begin()
    model = Net()
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8), use_buffers=True)
    layers = [model.stem, model.norm, model.body, model.fc]
    groups = [
        {"params": list(layer.parameters()), "lr": 0.02 * 0.7 ** (3 - depth)}
        for depth, layer in enumerate(layers)
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.02)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    model = NativeDDP(model, broadcast_buffers=True)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    losses, seen = [], []
    for step in range(14):
        model.train()
        x, y = batch(step)
        loss = criterion(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.05)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        ema.update_parameters(model.module)
        losses.append(loss.item())
        if step % 4 == 3:
            ema.eval()
            with torch.no_grad():
                seen.append(criterion(ema(x), y).item())
    return {"losses": losses, "seen": seen, "weights": values(model, ema)}


if __name__ == "__main__":
    main()
