"""The Trainer of transformers trains under gradtide as under DDP."""

from __future__ import annotations

import os
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integrations.frameworks import on_ranks, run_example
from torch.utils.data import Dataset

pytest.importorskip("transformers", reason="needs the extra `transformers`")

from accelerate.state import AcceleratorState, GradientState, PartialState
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)
from transformers.utils import logging

from gradtide.integrations.transformers import install

# transformers has warnings to give.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
logging.set_verbosity_error()
logging.disable_progress_bar()

OPTIONS: dict[str, dict[str, Any]] = {
    "clipping": {"max_grad_norm": 0.5},
    "no clipping, evaluation": {
        "max_grad_norm": 0.0,
        "eval_strategy": "steps",
        "eval_steps": 3,
    },
    "accumulation": {"gradient_accumulation_steps": 3},
    "bf16": {"bf16": True},
}
STEPS = 6  # an epoch


class Tokens(Dataset[dict[str, Any]]):
    def __init__(self) -> None:
        rng = torch.Generator().manual_seed(1)
        self.rows = torch.randint(32, (8 * STEPS, 8), generator=rng)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def train(
    scheme: str | None, folder: Path, resume: str | None = None, **options: Any
) -> list[dict[str, float]]:
    """What the Trainer has logged of two epochs; DDP if `scheme` is None."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    with ExitStack() if scheme is None else install(scheme):
        torch.manual_seed(0)
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=32, **heads, **sizes))
        options = {"save_strategy": "no", **options}
        arguments = TrainingArguments(
            str(folder),
            per_device_train_batch_size=4,
            num_train_epochs=2,
            learning_rate=0.01,
            logging_steps=1,
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            **options,
        )
        data = {"train_dataset": Tokens(), "eval_dataset": Tokens()}
        trainer = Trainer(model, arguments, **data)
        trainer.train(resume_from_checkpoint=resume)
    return trainer.state.log_history


def numbers(logged: list[dict[str, float]], *names: str) -> list[float]:
    return [row[name] for row in logged for name in names if name in row]


@pytest.mark.parametrize("scheme", ["wfbp", "dear"])
def test_losses_equal_ddp(scheme: str, tmp_path: Path) -> None:
    def work() -> Any:
        found = {}
        for name, options in OPTIONS.items():
            logs = [train(each, tmp_path, **options) for each in (None, scheme)]
            found[name] = [
                (numbers(log, "loss", "eval_loss"), numbers(log, "grad_norm"))
                for log in logs
            ]
        return found

    for pairs in on_ranks(work):
        for name, (expected, found) in pairs.items():
            if scheme == "dear":  # the norm is summed in another order
                exact = not name.startswith("clipping")
                assert found[1] == pytest.approx(expected[1], rel=1e-5), name
                assert found[0] == pytest.approx(
                    expected[0], rel=0 if exact else 1e-5, abs=0
                ), name
            else:
                assert found == expected, name


@pytest.mark.parametrize(
    "scheme",
    ["dear", "exdyna(0.1)", "exdyna(0.1, schedule='dear')"],
)
def test_resumed_as_if_not_stopped(scheme: str, tmp_path: Path) -> None:
    middle = tmp_path / f"checkpoint-{STEPS // 2}"
    options = {"save_strategy": "epoch", "gradient_accumulation_steps": 2, "bf16": True}

    def work() -> Any:
        whole = train(scheme, tmp_path, **options)
        resumed = train(scheme, tmp_path, str(middle), **options)
        names = "loss", "grad_norm", "learning_rate"
        return numbers(whole, *names), numbers(resumed, *names)

    for whole, resumed in on_ranks(work):
        assert resumed == whole
        assert whole[-3] < whole[0]
    found = sorted(path.name for path in (middle / "gradtide").iterdir())
    assert found == ["rank0.pt", "rank1.pt"]


def test_what_is_logged_has_what_the_exchange_costs(tmp_path: Path) -> None:
    def work() -> Any:
        return train("topka2a(0.1)", tmp_path)

    for log in on_ranks(work):
        steps = [row for row in log if "loss" in row]
        assert len(steps) == 2 * STEPS
        assert all(row["gradtide/sent_bytes"] > 0 for row in steps)
        assert all(0 < row["gradtide/density"] < 0.2 for row in steps)


def test_undone_when_it_is_closed() -> None:
    methods = ("log", "_save_optimizer_and_scheduler", "_load_optimizer_and_scheduler")
    before = [getattr(Trainer, name) for name in methods]
    install("dear").close()
    assert [getattr(Trainer, name) for name in methods] == before


def test_the_example_runs(tmp_path: Path) -> None:
    def work() -> None:
        os.environ["GRADTIDE_SCHEME"] = "dear"
        options = {"max_bytes": 8_000, "max_steps": 2}
        run_example("trainer_llama.py", tmp_path, options)

    on_ranks(work)


class Weighed(Trainer):
    """Has means weighed by tokens, as docs/howto/transformers.md says."""

    def get_batch_samples(self, *args: Any) -> Any:
        samples, count = super().get_batch_samples(*args)
        self.model_wrapped.weight(count)
        return samples, count


class Ragged(Tokens):
    """Sequences of which some labels count: few in one, many in the other half."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = super().__getitem__(index)
        labels = row["labels"].clone()
        labels[2 + index % 6 :] = -100
        return {**row, "labels": labels}


def by_tokens(kind: Any, scheme: str | None, across: bool, folder: Path) -> list[Any]:
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    with ExitStack() if scheme is None else install(scheme):
        torch.manual_seed(0)
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=32, **heads, **sizes)).double()
        arguments = TrainingArguments(
            str(folder),
            per_device_train_batch_size=1,
            gradient_accumulation_steps=2,
            max_steps=4,
            learning_rate=0.01,
            average_tokens_across_devices=across,
            report_to="none",
            save_strategy="no",
            use_cpu=True,
        )
        kind(model, arguments, train_dataset=Ragged()).train()
    return [p.flatten().tolist() for p in model.parameters()]


def test_means_are_over_the_tokens_of_all_ranks(tmp_path: Path) -> None:
    """The Trainer's own way under DDP and here, weights, and neither."""

    def work() -> list[Any]:
        ways: list[Any] = [
            (Trainer, None, True),
            (Trainer, "wfbp", True),
            (Weighed, "wfbp", False),
            (Trainer, "wfbp", False),
        ]
        return [by_tokens(*way, tmp_path) for way in ways]

    for ddp, own, weighed, neither in on_ranks(work):
        kinds = ddp, own, weighed, neither
        flat = [[*chain.from_iterable(each)] for each in kinds]
        assert flat[1] == flat[0]
        assert flat[2] == pytest.approx(flat[0], rel=0, abs=1e-5)
        assert flat[3] != pytest.approx(flat[0], rel=0, abs=1e-4)
