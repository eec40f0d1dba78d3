"""What ranks save beside a framework's checkpoint, and what costs are told per step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks
from torch import Tensor, nn

import gradtide
from gradtide.integrations import states
from gradtide.integrations.metrics import Meter, line
from gradtide.integrations.wrapping import scheme_or_default

SPARSE = "exdyna(0.1)"


def replica(scheme: str = SPARSE) -> gradtide.Replica:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return gradtide.replicate(model, optimizer, scheme)


def train(sync: gradtide.Replica, steps: int = 3) -> None:
    rng = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        sync.model(torch.randn(8, 16, generator=rng)).square().mean().backward()
        sync.optimizer.step()
        sync.optimizer.zero_grad()


def residuals(sync: gradtide.Replica) -> Tensor:
    own = sync.state_dict()[f"rank{dist.get_rank()}"]["remainders"]
    return torch.cat([part.flatten() for part in own.values()])


def saved(folder: Path) -> list[float]:
    """Train and save; the sum of all ranks' residuals."""
    sync = replica()
    train(sync)
    assert states.save_all([sync], str(folder)) == [3]
    total = residuals(sync)
    dist.all_reduce(total)
    return total.tolist()


@pytest.mark.product
@pytest.mark.parametrize(("before", "after"), [(2, 2), (3, 1), (2, 3), (3, 2)])
def test_the_sum_is_kept_by_any_number_of_ranks(
    before: int, after: int, tmp_path: Path
) -> None:
    def loaded() -> list[float]:
        sync = replica()
        states.load_all([sync], str(tmp_path), [3])
        total = residuals(sync)
        dist.all_reduce(total)
        return total.tolist()

    expected = run_ranks(before, saved, tmp_path)[0]
    assert any(expected)
    found = run_ranks(after, loaded)[0]
    assert found == pytest.approx(expected, abs=1e-7)


def truncate(folder: Path) -> None:
    file = folder / "rank1.pt"
    file.write_bytes(file.read_bytes()[:-100])


def remove(folder: Path) -> None:
    states.remove(1, str(folder))


def exchange(folder: Path) -> None:
    (folder / "rank1.pt").write_bytes((folder / "rank0.pt").read_bytes())


@pytest.mark.product
@pytest.mark.parametrize(
    ("harm", "step", "message"),
    [
        (truncate, 3, "rank1.pt cannot be read"),
        (remove, 3, "no 'rank1'"),
        (exchange, 3, "no 'rank1'"),
        (lambda _: None, 4, "of step 4, but .* of step 3"),
    ],
)
def test_refused_on_every_rank(
    harm: Any, step: int, message: str, tmp_path: Path
) -> None:
    def loaded() -> None:
        sync = replica()
        with pytest.raises(ValueError, match=message):
            states.load(sync, str(tmp_path), step)
        train(sync)  # as before

    run_ranks(2, saved, tmp_path)
    harm(tmp_path)
    run_ranks(2, loaded)


@pytest.mark.parametrize("scheme", [SPARSE, "wfbp"])
def test_without_the_folder_residuals_begin_at_zero(
    scheme: str, tmp_path: Path
) -> None:
    def loaded() -> None:
        sync, folder = replica(scheme), str(tmp_path / "nowhere")
        if dist.get_rank() == 0 and scheme == SPARSE:
            with pytest.warns(UserWarning, match="residuals begin at zero"):
                states.load(sync, folder)
        else:
            states.load(sync, folder)
        train(sync)

    run_ranks(2, loaded)


def test_the_folder_goes_with_its_last_file_and_may_be_an_address() -> None:
    folder = "memory://checkpoints/x.gradtide"
    for rank in range(2):
        states.save({"step": rank}, rank, folder)
    files = fsspec.filesystem("memory")
    path = "/checkpoints/x.gradtide/rank0.pt"
    assert sorted(entry["name"] for entry in files.ls(files._parent(path))) == [
        "/checkpoints/x.gradtide/rank0.pt",
        "/checkpoints/x.gradtide/rank1.pt",
    ]
    for rank in range(2):
        assert files.exists(path)
        states.remove(1 - rank, folder)
    assert not files.exists("/checkpoints/x.gradtide")


def test_a_file_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    torch.save({"step": 3}, tmp_path / "rank0.pt")
    assert states._file(str(tmp_path), 0) == {"step": 3}


def test_ranks_that_remove_their_files_at_once_do_not_disturb_each_other(
    tmp_path: Path,
) -> None:
    def work() -> None:
        for turn in range(50):
            folder = str(tmp_path / str(turn))
            states.save({"step": turn}, dist.get_rank(), folder)
            dist.barrier()
            states.remove(dist.get_rank(), folder)
            states.remove(dist.get_rank(), folder)  # which is gone

    run_ranks(3, work)
    assert not list(tmp_path.iterdir())


def test_a_file_stays_whole_until_the_next_one_is(tmp_path: Path) -> None:
    states.save({"step": 1}, 0, str(tmp_path))

    class Full:
        def __reduce__(self) -> Any:
            raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space"):
        states.save({"step": Full()}, 0, str(tmp_path))
    assert states._file(str(tmp_path), 0) == {"step": 1}


# - Costs and defaults -----------------------------------------------------------------


def test_costs_are_told_per_step() -> None:
    def work() -> Any:
        sync, meter = replica("wfbp"), Meter()
        train(sync, steps=1)
        one = meter.read(sync)
        train(sync, steps=4)
        return one, meter.read(sync), meter.read(sync)

    one, four, none = run_ranks(2, work)[0]
    assert four["gradtide/sent_bytes"] == pytest.approx(
        one["gradtide/sent_bytes"], rel=0.1
    )
    assert none["gradtide/sent_bytes"] == 0
    assert set(one) == {
        "gradtide/exposed_seconds",
        "gradtide/exchange_seconds",
        "gradtide/sent_bytes",
        "gradtide/density",
        "gradtide/compressed_share",
        "gradtide/skipped_steps",
    }


def test_a_line_of_costs() -> None:
    costs = {
        "loss": 1.0,
        "gradtide/exposed_seconds": 0.0123,
        "gradtide/sent_bytes": 1.24e6,
        "gradtide/density": 0.01,
    }
    assert line(costs) == "12.3 ms exposed, 1.24 MB sent, density 0.01"


def test_the_environment_names_the_scheme(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRADTIDE_SCHEME", raising=False)
    assert scheme_or_default(None) == "wfbp"
    monkeypatch.setenv("GRADTIDE_SCHEME", "dear")
    assert scheme_or_default(None) == "dear"
    assert scheme_or_default("oktopk") == "oktopk"
