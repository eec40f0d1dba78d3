"""torch's own tests of DistributedDataParallel (DDP), through gradtide's class.

    python benchmarks/ddp_suite.py --out benchmarks/records/ddp_suite_202611.json

The tests are those of the installed torch (`torch.testing._internal.distributed`) that
use DDP. Most ask for GPUs: what asks for one is replaced by the CPU (`on_cpu`), and
torch's own class shows which tests make sense like that: those that it passes on Gloo
are the yardstick. They are run again with `gradtide.install(scheme)`. Needs expecttest.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import multiprocessing as mp
import os
import re
import sys
import tempfile
import time
import traceback
import types
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

NAME = "torch.testing._internal.distributed.distributed_test"
UTILITIES = "torch.testing._internal.common_utils"
HERE = "ddp_suite_on_cpu"  # what the tests' module is called here
LIMIT = 60.0  # seconds for a test; all but one (torch.compile) take less than 10
# What of the tests asks for a GPU, and what is put in its place.
ON_CPU = (
    (r"^ *@(skip_if_no_gpu|skip_if_lt_x_gpu\(.*\)|require_n_gpus\S*\(.*\))\n", ""),
    (r"device_ids=(\[[^\]]*\]|gpus|gpu_subset|device_ids)", "device_ids=None"),
    (r"output_device=\w+", "output_device=None"),
    (r"device=torch\.device\([^()]*\)", 'device="cpu"'),
    (
        r"device=(self\.rank|rank|my_rank|device_id|next_rank|0|[\"']cuda[\"'])\b",
        'device="cpu"',
    ),
    (r"torch\.device\([\"']cuda[\"'][^()]*\)", 'torch.device("cpu")'),
    (r"init_multigpu_helper\([^\n]*\)", "{i: [0] for i in range(8)}"),
)
USES = re.compile(r"DistributedDataParallel|DDP\(|\.join\(|Join\(")


def on_cpu() -> types.ModuleType:
    """The tests' module, with the CPU wherever it names a GPU."""
    found = importlib.util.find_spec(NAME)
    assert found is not None
    assert found.origin is not None
    text = Path(found.origin).read_text()
    for pattern, instead in ON_CPU:
        text = re.sub(pattern, instead, text, flags=re.MULTILINE)
    module = types.ModuleType(HERE)
    module.__file__ = found.origin
    module.__dict__["common_utils"] = importlib.import_module(UTILITIES)
    sys.modules[HERE] = module
    exec(compile(text, found.origin, "exec", dont_inherit=True), vars(module))
    return module


def tests(module: types.ModuleType) -> list[str]:
    """The names of the tests that use DDP, themselves or through a helper."""
    assert module.__file__ is not None
    tree = ast.parse(Path(module.__file__).read_text())
    (base,) = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.name == "_DistTestBase"
    )
    bodies = {
        f.name: ast.unparse(f) for f in base.body if isinstance(f, ast.FunctionDef)
    }
    using = {name for name, body in bodies.items() if USES.search(body)}
    while True:
        calls = re.compile(rf"self\.({'|'.join(using)})\b")
        more = {name for name, body in bodies.items() if calls.search(body)} - using
        if not more:
            return sorted(name for name in using if name.startswith("test_"))
        using |= more


def pretend() -> None:
    """Have what moves to a GPU stay where it is."""

    def stay(self: Any, *_: Any, **__: Any) -> Any:
        return self

    def nothing() -> Any:
        return lambda *_, **__: 0

    def moved(to: Any) -> Any:
        def move(self: Any, *args: Any, **kwargs: Any) -> Any:
            args = tuple("cpu" if type(arg) is int else arg for arg in args)
            return to(self, *args, **kwargs)

        return move

    for kind in (torch.Tensor, torch.nn.Module):
        kind.cuda = stay  # type: ignore[method-assign]
        kind.to = moved(kind.to)  # type: ignore[method-assign]
    for name in ("set_device", "synchronize", "manual_seed", "current_device"):
        setattr(torch.cuda, name, nothing())


def _rank(
    module: types.ModuleType, test: str, rank: int, store: str, scheme: str, pipe: Any
) -> None:
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    kind = type(
        "Suite", (module.TestDistBackend, module.DistributedTest._DistTestBase), {}
    )
    try:
        pretend()
        if scheme:
            import gradtide

            gradtide.install(scheme)
        suite = kind(test)
        suite.rank, suite.file_name = rank, store
        torch.distributed.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            world_size=int(os.environ["WORLD_SIZE"]),
            rank=rank,
            timeout=module.timedelta(seconds=20),
        )
        suite._barrier()
        module.common_utils.set_rng_seed()
        getattr(suite, test)()
        pipe.send(("passed", ""))
    except module.unittest.SkipTest as skipped:
        pipe.send(("skipped", str(skipped)))
    except SystemExit as left:
        pipe.send(("skipped" if left.code else "passed", f"exit {left.code}"))
    except BaseException as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}:{last.lineno}"
        said = re.split(r"\n+To execute this test", str(error))[0][:300]
        pipe.send(("failed", f"{type(error).__name__} ({where}): {said}"))
    pipe.close()
    time.sleep(0.2)  # for the others to read what is on its way
    os._exit(0)


def run(module: types.ModuleType, test: str, size: int, scheme: str) -> tuple[str, str]:
    """What came of a test on so many ranks: the worst that a rank says, and why."""
    fork = mp.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(TEMP_DIR=folder, WORLD_SIZE=str(size))
        for name in ("barrier", "test_dir", "init_dir"):
            Path(folder, name).mkdir()
        module.Barrier.init()
        pipes = [fork.Pipe(duplex=False) for _ in range(size)]
        store = str(Path(folder, "store"))
        ranks = [
            fork.Process(
                target=_rank, args=(module, test, r, store, scheme, pipes[r][1])
            )
            for r in range(size)
        ]
        for process in ranks:
            process.start()
        deadline, said = time.monotonic() + LIMIT, list[tuple[str, str]]()
        for _, sending in pipes:
            sending.close()
        for receiving, _ in pipes:
            try:
                there = receiving.poll(max(0.0, deadline - time.monotonic()))
                said.append(receiving.recv() if there else ("hung", ""))
            except EOFError:
                said.append(("died", ""))
        for process in ranks:
            process.kill()
            process.join()
    order = ["died", "hung", "failed", "skipped", "passed"]
    return min(said, key=lambda outcome: order.index(outcome[0]))


def suite(
    module: types.ModuleType, names: Sequence[str], size: int, scheme: str
) -> dict[str, tuple[str, str]]:
    """What came of all tests."""
    found = {}
    for name in names:
        found[name] = run(module, name, size, scheme)
        print(f"{size} ranks, {scheme or 'torch'}: {name}: {found[name]}", flush=True)
    return found


def main(
    ranks: Annotated[str, typer.Option(help="Numbers of ranks.")] = "2,3",
    schemes: Annotated[str, typer.Option(help="Schemes to install.")] = "wfbp,dear",
    only: Annotated[str, typer.Option(help="A pattern of names of tests.")] = "",
    out: Annotated[Path | None, typer.Option(help="Where to write the record.")] = None,
) -> None:
    os.environ.update(BACKEND="gloo", WORLD_SIZE="2", TEMP_DIR=tempfile.gettempdir())
    os.environ.update(MASTER_ADDR="127.0.0.1", INIT_METHOD="")
    module = on_cpu()
    names = [name for name in tests(module) if re.search(only, name)]
    results: dict[str, Any] = {}
    for size in map(int, ranks.split(",")):
        torchs = suite(module, names, size, "")
        yardstick = [name for name in names if torchs[name][0] == "passed"]
        own: dict[str, Any] = {
            "torch": dict(Counter(outcome for outcome, _ in torchs.values()))
        }
        for scheme in schemes.split(","):
            ours = suite(module, yardstick, size, scheme)
            failed = {n: ": ".join(o) for n, o in ours.items() if o[0] != "passed"}
            counts = dict(Counter(outcome for outcome, _ in ours.values()))
            own[scheme] = counts | {"of": len(yardstick), "not passed": failed}
        results[f"{size} ranks"] = own
        if out is not None:  # what is there so far: all of it takes half an hour
            record = about(ranks, out) | {"results": results}
            out.write_text(json.dumps(record, indent=2))
    print(json.dumps(results, indent=2))


def about(ranks: str, out: Path) -> dict[str, Any]:
    """What the record says of itself."""
    from gradtide.lab.record import commit, machine, versions

    where = f"--ranks {ranks} --out benchmarks/records/{out.name}"
    command = f"python benchmarks/ddp_suite.py {where}"
    found: dict[str, Any] = {"command": command, "commit": commit()}
    return found | {"versions": versions(), "machine": machine()}


if __name__ == "__main__":
    typer.run(main)
