"""Whether what runs on the device has the CPU's bits; and all tests marked `gpu`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from gpu.results import Book, right
from gpu.setting import Setting
from gradtide.runtime.guards.checksum import checksum
from gradtide.selectors import kernels
from gradtide.wire import CASTS, NARROW, WIRES, Codec, Wire, codec_of, tools

ROOT = Path(__file__).resolve().parents[2]
TESTS = "pytest -m gpu"
AFTER = 5  # seconds of a section that are left for what comes after these
PLUGINS = (("pytest_timeout", "--timeout=60"), ("xdist.plugin", "-n", "4"))
LENGTHS = (1, 31, 255, 256, 257, 4095, 4097, 100_003)
# Bounds and limits of a selection: usual ones, everything, and what is cut short.
BOUNDS = ((1.0, 1 << 30), (2.5, 100), (0.0, 1 << 30), (-1.0, 1 << 30))
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def named(setting: Setting) -> Iterator[tuple[str, Callable[[], Any]]]:
    dtypes = DTYPES[:2] if setting.tiny else DTYPES
    for dtype in dtypes:
        yield f"entries, {dtype}", partial(entries, setting, dtype)
    wires: Any = NARROW[:2] if setting.tiny else WIRES
    for wire in wires:
        for dtype in dtypes[:1] if setting.tiny else (*dtypes[:2], dtypes[-1]):
            yield f"{wire}, {dtype}", partial(codec, setting, wire, dtype)
    yield "checksum", partial(checksums, setting)


def measure(book: Book, setting: Setting) -> None:
    start = time.monotonic()
    book.measure(dict(named(setting)))
    if setting.cuda:
        left = setting.seconds - (time.monotonic() - start) - AFTER
        book.measure({TESTS: partial(tests, max(left, AFTER))})
    else:
        book.skip([TESTS], "needs a CUDA device")


def entries(setting: Setting, dtype: torch.dtype) -> dict[str, bool]:
    """The indices above a bound, with NaN and infinity among the values."""
    alike = True
    for n in LENGTHS:
        x = drawn(n, dtype)
        x[n // 2], x[n // 3] = torch.nan, torch.inf
        for bound, limit in BOUNDS:
            there = kernels.above(x.to(setting.device), bound, limit)
            large = (~(x.abs() <= bound)).nonzero()[:limit, 0]
            alike &= torch.equal(there.cpu().long(), large)
    return {"alike": alike}


def codec(setting: Setting, wire: Wire, dtype: torch.dtype) -> dict[str, bool]:
    """Messages, what they do not hold, and what is decoded and added up.

    The CPU's bits are those of the definition in torch, and of what is compiled there.
    """
    found = codec_of(wire, dtype)
    alike = dict.fromkeys(("message", "rest", "decoded", "added"), True)
    for n in LENGTHS:
        x = drawn(n, dtype) * 1e-3
        if n > 4000:
            x[5], x[700], x[900:1300] = torch.inf, torch.nan, 0
            x[2000:2300] = 1e-41  # subnormal, in single precision
            x[3000:3100] = torch.finfo(dtype).max
        with patch.dict(tools.TOOLS, clear=True):
            here = everything(found, x)
        there = everything(found, x.to(setting.device))
        for name, one, other in zip(alike, here, there, strict=True):
            kind = CASTS.get(wire or "") if name == "message" else None
            alike[name] &= same(one.view(kind or one.dtype), other.cpu())
    return {"alike": all(alike.values()), **alike}


def everything(codec: Codec, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rest, value, total = x.clone(), torch.zeros_like(x), x.clone()
    message = x.new_zeros(codec.nbytes(len(x)), dtype=torch.uint8)
    codec.encode(rest, message)
    codec.decode(message, value)
    codec.add(torch.stack([message, message]), total)
    return message, rest, value, total


def checksums(setting: Setting) -> dict[str, bool]:
    tensors = [drawn(n, torch.float32) for n in (7, 64, 100_003)]
    there = checksum([x.to(setting.device) for x in tensors])
    return {"alike": int(there) == int(checksum(tensors))}


def tests(seconds: float) -> dict[str, Any]:
    """What pytest says of the files in which something is marked."""
    tests = sorted(ROOT.glob("tests/**/test_*.py"))
    files = [str(path) for path in tests if "mark.gpu" in path.read_text()]
    command = [sys.executable, "-m", "pytest", "-v", "-m", "gpu", *files]
    command += ["-p", "no:cacheprovider", "--continue-on-collection-errors"]
    # Of plugins, those that are needed: our tests take others' warnings for errors.
    for plugin, *options in PLUGINS:
        if find_spec(plugin.partition(".")[0]):
            command += ["-p", plugin, *options]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    with tempfile.TemporaryFile("w+") as said:
        code = None
        with suppress(subprocess.TimeoutExpired):
            code = subprocess.run(
                command,
                cwd=ROOT,
                env=environment,
                stdout=said,
                stderr=said,
                timeout=seconds,
            ).returncode
        said.seek(0)
        lines = said.read().splitlines() or ["nothing"]
    counts = {word: int(n) for n, word in re.findall(r"(\d+) (\w+)", lines[-1])}
    if code is None:
        counts = {"passed before it was cut off": sum("PASSED" in x for x in lines)}
    wrong = [line for line in lines if re.search(r"\b(FAILED|ERROR) ", line)]
    passed = code == 0 and counts.get("passed", 0) > 0
    told = wrong[-30:] or ([] if passed else lines[-10:])
    return {"passed": passed, "counts": counts, "wrong": told}


def drawn(n: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(n)).to(dtype)


def same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, but for what a NaN looks like."""
    b = b.view(a.dtype)
    if a.is_floating_point():
        a, b = (torch.where(x.isnan(), 0, x) for x in (a, b))
        a, b = (x.view(torch.uint8) for x in (a, b))
    return torch.equal(a, b)


BARS = (
    *(right(name, name, "alike") for name, _ in named(Setting())),
    right(TESTS, TESTS, "passed"),
)
