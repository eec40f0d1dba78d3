"""What the comparison of parameters costs, as a share of a step of `gpt`.

    python benchmarks/checksum.py

Times are seconds of this process's processor, on one thread, so other programs do not
count. The checksum is computed once in so many steps as `replicate` has by default.
"""

from __future__ import annotations

import inspect
import time
from statistics import median

import torch

from gradtide import replicate
from gradtide.lab.workloads import gpt
from gradtide.runtime.guards.checksum import checksum

STEPS = 12


def main() -> None:
    """Print the medians and their quotient."""
    torch.set_num_threads(1)
    every = inspect.signature(replicate).parameters["check_every"].default
    workload = gpt.build("gpt", rank=0, seed=0, batch_size=None)
    model, steps, checks = workload.model, [], []
    for number in range(STEPS):
        begin = time.process_time()
        workload.optimizer.zero_grad()
        workload.loss(model, workload.batch(number)).backward()  # type: ignore[no-untyped-call]
        workload.optimizer.step()
        middle = time.process_time()
        int(checksum(model.parameters()))
        steps.append(middle - begin)
        checks.append(time.process_time() - middle)
    step, check = median(steps), median(checks)
    print(f"a step {1e3 * step:.1f} ms, a checksum {1e3 * check:.2f} ms")
    print(f"once in {every} steps: {check / step / every:.4%} of a step")


if __name__ == "__main__":
    main()
