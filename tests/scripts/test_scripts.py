"""Programs as people write them for DistributedDataParallel, with another import.

Every program is one that runs under torchrun. Only its import is changed, so that what
it says under torch's class and under ours can be compared: `losses`, what it has `seen`
and its `weights` by their bits; what is `near`, such as a norm that the owners add up
in another order, within rounding.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import gradtide
from tests.ranks import run_ranks

HERE = Path(__file__).parent
SCRIPTS = sorted(
    path.stem
    for path in HERE.glob("*.py")
    if "def main()" in path.read_text() and not path.stem.startswith("test_")
)
# Steps instead of gradients, of which a part travels; dense for two steps.
SPARSE = gradtide.Scheme(
    gradtide.Warmup(gradtide.PartitionedTopK(0.2, partition=gradtide.Dynamic()), 2),
    fusion=gradtide.BySize(25.0, ends=25.0, pieces=1),
    schedule=gradtide.LOCAL,
)
# Under dear the owners of gradients add up norms, in another order than one rank does:
# what is clipped by them is equal within rounding.
CLIPPED = {"dino", "mingpt", "nanogpt"}
# What a scheme that has to know the optimizer refuses: each holds a part.
REFUSED = {"muon": "requires a gradient but is not in the optimizer"}
IMPORT = re.compile(r"^from torch.nn.parallel import DistributedDataParallel", re.M)
OURS = "from gradtide import DistributedDataParallel"


def run(name: str, scheme: Any, folder: str) -> Any:
    """What a program's main() returns; under torch's class without a scheme."""
    text = (HERE / f"{name}.py").read_text()
    if scheme is not None:
        text, count = IMPORT.subn(OURS, text)
        assert count == 1
    sys.path.insert(0, str(HERE))
    sys.argv = [f"{name}.py", "--out", folder]
    Path(folder).mkdir(exist_ok=True)
    for path in Path(folder).iterdir():
        path.unlink(missing_ok=True)
    dist.barrier()
    # The rank has joined the others already.
    dist.init_process_group = lambda *_, **__: None  # type: ignore[assignment]
    space: dict[str, Any] = {"__name__": "program"}
    with gradtide.install("wfbp" if scheme is None else scheme) as installed:
        if scheme is None:
            installed.close()
        exec(compile(text, f"{name}.py", "exec", dont_inherit=True), space)
        found = space["main"]()
    dist.barrier()
    return found


pytestmark = [
    pytest.mark.filterwarnings("ignore:.broadcast_buffers. is deprecated"),
    # What costs time under dear is said, once.
    pytest.mark.filterwarnings("ignore:.*(hide|hides) in the next forward"),
]


@pytest.mark.product(each=6)
@pytest.mark.parametrize("name", SCRIPTS)
def test_equals_ddp(name: str, tmp_path: Path) -> None:
    schemes = ["wfbp", *["dear"] * (name not in REFUSED)]

    def work() -> list[Any]:
        own = str(tmp_path / "out")
        return [run(name, scheme, own) for scheme in (None, *schemes)]

    for ddps, *others in run_ranks(2, work):
        expected = ddps.pop("near", [])
        for scheme, ours in zip(schemes, others, strict=True):
            assert ours.pop("near", []) == pytest.approx(expected, rel=1e-5)
            if scheme == "dear" and name in CLIPPED:
                assert flat(ours) == pytest.approx(flat(ddps), rel=1e-4, abs=1e-5)
            else:
                assert ours == ddps, scheme


def flat(said: Any) -> list[float]:
    """All numbers that a program says."""
    if isinstance(said, dict | list):
        inside = said.values() if isinstance(said, dict) else said
        return [number for part in inside for number in flat(part)]
    return [said]


@pytest.mark.product(each=12)
@pytest.mark.parametrize("name", [name for name in SCRIPTS if name not in REFUSED])
def test_learns_with_sparse_steps(name: str, tmp_path: Path) -> None:
    ranks = run_ranks(2, lambda: run(name, SPARSE, str(tmp_path)))
    for rank in ranks:
        assert all(loss < 1e3 for loss in rank["losses"])
    if "gan" not in name:
        begin, end = (
            sum(sum(rank["losses"][part]) for rank in ranks)
            for part in (slice(None, 3), slice(-3, None))
        )
        assert end < 0.9 * begin


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("scheme", ["dear", SPARSE], ids=["dear", "sparse"])
def test_is_refused_by_name(name: str, scheme: Any, tmp_path: Path) -> None:
    def work() -> str:
        with pytest.raises(ValueError, match=REFUSED[name]) as raised:
            run(name, scheme, str(tmp_path))
        return str(raised.value)

    for message in run_ranks(2, work):
        assert "use 'wfbp'" in message
