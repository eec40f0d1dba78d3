"""Shared set-up: one thread a process, so that ranks may be forked."""

from __future__ import annotations

import torch

torch.set_num_threads(1)  # forking a process that has an OpenMP pool may hang the child
