"""Log what a training costs to MLflow: torchrun --nproc-per-node 2.

MLFLOW_TRACKING_URI says where to; see it with mlflow ui."""

import mlflow
import torch
import torch.distributed as dist

import gradtide


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())  # for data of its own
    model = torch.nn.Linear(256, 256)
    optimizer = torch.optim.AdamW(model.parameters())
    sync = gradtide.replicate(model, optimizer, "topka2a(0.02, warmup=10)")
    logging = dist.get_rank() == 0  # a run of all ranks is logged by one of them
    if logging:
        mlflow.start_run()
        mlflow.log_params({"scheme": "topka2a", "ranks": dist.get_world_size()})
    for x in torch.randn(20, 32, 256):  # 20 batches of 32
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if logging:
            numbers = {"loss": loss.item(), **sync.metrics()}
            mlflow.log_metrics(numbers, step=int(numbers["step"]))
    if logging:
        mlflow.end_run()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
