"""GRADTIDE_SCHEME=dear torchrun --nproc-per-node 2 examples/trainer_llama.py"""

import pydoc
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from gradtide.integrations.transformers import install


class Bytes(Dataset[dict[str, Any]]):
    def __init__(self, max_bytes: int, length: int = 128) -> None:
        text = torch.tensor(list(Path(pydoc.__file__).read_bytes()[:max_bytes]))
        self.rows = text[: len(text) // length * length].view(-1, length)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def main(max_bytes: int = 100_000, **options: Any) -> None:
    install()  # the new line: by the scheme that the environment names
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4}
    config = LlamaConfig(vocab_size=256, num_attention_heads=4, **sizes)
    model = LlamaForCausalLM(config)
    arguments = TrainingArguments(
        "out/trainer",
        use_cpu=True,
        **{"logging_steps": 10, "max_steps": 50, "report_to": "none"} | options,
    )
    Trainer(model, arguments, train_dataset=Bytes(max_bytes)).train()


if __name__ == "__main__":
    main()
