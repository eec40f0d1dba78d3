"""Processors by name, as their data sheets have them, until a profile measures one.

[Note: Copies] What an exchange does on a GPU takes as long as its bytes take through
the GPU's memory. So all of it is said in copies of a float32: eight bytes, read and
written at REACHED of the data sheet's rate. How many copies each kind of work takes was
measured on one H200 (benchmarks/records/gpu_h200_202611.json: `copy`, `selection`), and
what was not measured there is marked.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from gradtide.kfac.costs import InverseTime
from gradtide.planner.data.device import TYPICAL, Device, Line

REACHED = 0.88  # of the memory's nominal rate, by a copy
LAUNCH = 1e-5  # seconds: of a kernel, and what its host does for it
# Least squares over published K-FAC on RTX 2080 Ti (benchmarks/published_curvature.py);
# inversions are bound by their start, and hardly faster on a larger GPU.
INVERSE = InverseTime(1.18e-3, 3.1e-13, 3.0)
# By these factors a GPU computes slower while an all-reduce runs, and that takes longer
# inside a host while GPUs compute: what sends and adds is a kernel, which waits for
# room beside the model's. From published rows of V100s (benchmarks/README.md, 11).
SLOWED, STARVED = 1.15, 1.55


@dataclass(frozen=True)
class Preset:
    """A processor, and by which factors it and an exchange make each other slower."""

    device: Device
    slowed: float = 1.0
    starved: float = 1.0


def gpu(name: str, memory: float, operations: float) -> Preset:
    """A GPU by its data sheet: bytes/s of its memory, operations/s of matrices.

    Operations are those of float32, as torch multiplies matrices unless it is told to
    do so in TF32.
    """
    copy = 8 / (REACHED * memory)
    device = Device(
        name=f"{name}, by its data sheet",
        take_in=Line(LAUNCH, copy),
        # Both wait for a number; so much longer than a kernel is their start.
        select={"Threshold": Line(2e-4, 1.3 * copy), "Exact": Line(1.5e-4, 11 * copy)},
        scatter=Line(LAUNCH, 8 * copy),  # not measured: sectors of 32 bytes, twice
        nearby=Line(LAUNCH, 3 * copy),  # not measured
        sort=Line(1e-4, 150 * copy),  # not measured: entries, with where they came from
        optimizer=Line(1e-4, 3.5 * copy),  # Adam's: four tensors read, three written
        request=5e-5,
        inverse=INVERSE,
        product=Line(LAUNCH, 2 / (0.6 * operations)),  # not measured: the share
        beside=False,
    )
    return Preset(device, SLOWED, STARVED)


PRESETS = {
    "cpu": Preset(TYPICAL),
    "t4": gpu("T4", 320e9, 8.1e12),
    "l4": gpu("L4", 300e9, 30.3e12),
    "v100": gpu("V100", 900e9, 14e12),
    "a100": gpu("A100", 2.04e12, 19.5e12),
    "h100": gpu("H100", 3.35e12, 67e12),
    "h200": gpu("H200", 4.8e12, 67e12),
    "3090": gpu("RTX 3090", 936e9, 35.6e12),
    "4090": gpu("RTX 4090", 1.01e12, 82.6e12),
}
OTHER = "a100"  # what stands for a GPU that is not among them


def preset(name: str) -> Preset:
    """Of what is called so, as `--device` has it. Raises ValueError for others."""
    found = PRESETS.get(name.lower())
    if found is None:
        known = ", ".join(PRESETS)
        raise ValueError(f"--device {name}: choose one of {known}, or measure yours")
    return found


def like(name: str) -> Preset:
    """What is nearest to a device that calls itself so; empty: not known, a CPU."""
    if name in ("", "cpu"):
        return PRESETS["cpu"]
    # A letter behind the number is another board of the same: V100S; a digit is not.
    words = re.split(r"[\s-]+", name.lower())
    found = (k for k in PRESETS if any(re.fullmatch(k + "[a-z]?", w) for w in words))
    return PRESETS[next(found, OTHER)]
