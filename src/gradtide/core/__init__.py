"""What everything else stands on: requests, payloads, the engine, the order of a step.

Nothing here knows a collective, a model, a process group or a clock.
"""

import torch

from gradtide.core.torch_internals.versions import check_version

check_version(torch.__version__)  # here, before anything that an old one lacks
