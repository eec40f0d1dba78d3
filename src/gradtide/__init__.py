"""Data-parallel PyTorch training over networks that cannot keep up.

`replicate` averages the gradients of a model over all ranks. A scheme says how: it is a
name or a text, or is built by `recipe`, or from the parts that are exported here: these
have the names that the text has.
"""

import importlib
import typing

from gradtide import collectives
from gradtide.collectives import (
    Dense,
    Dynamic,
    Even,
    MomentumCorrection,
    PartitionedTopK,
    TopK,
    TopKA2A,
    Warmup,
)
from gradtide.core.outer import OuterSGD
from gradtide.core.schedule import DEAR, LOCAL, SEQUENTIAL, WFBP, Schedule
from gradtide.fusion import (
    Bayesian,
    BinarySearch,
    BySize,
    Cuts,
    MgWfbp,
    PerTensor,
)
from gradtide.kfac import KFAC
from gradtide.parallel import DistributedDataParallel
from gradtide.replica import Replica, replicate
from gradtide.scheme import Auto, Scheme, parse, recipe
from gradtide.selectors import Exact, Threshold
from gradtide.transport import CommunicationError

if typing.TYPE_CHECKING:
    from gradtide import checkpoint as checkpoint
    from gradtide.collectives import (
        ACPSGD,
        COVAP,
        ARCTopK,
        ByNorm,
        CLTk,
        DeMo,
        GTopK,
        OkTopk,
        PowerSGD,
        TiledTopK,
        TopkDSA,
    )
    from gradtide.installing import install

__version__ = "0.2.0"  # read by pyproject.toml, too

__all__ = [
    "ACPSGD",
    "COVAP",
    "DEAR",
    "KFAC",
    "LOCAL",
    "SEQUENTIAL",
    "WFBP",
    "ARCTopK",
    "Auto",
    "Bayesian",
    "BinarySearch",
    "ByNorm",
    "BySize",
    "CLTk",
    "CommunicationError",
    "Cuts",
    "DeMo",
    "Dense",
    "DistributedDataParallel",
    "Dynamic",
    "Even",
    "Exact",
    "GTopK",
    "MgWfbp",
    "MomentumCorrection",
    "OkTopk",
    "OuterSGD",
    "PartitionedTopK",
    "PerTensor",
    "PowerSGD",
    "Replica",
    "Schedule",
    "Scheme",
    "Threshold",
    "TiledTopK",
    "TopK",
    "TopKA2A",
    "TopkDSA",
    "Warmup",
    "__version__",
    "install",
    "parse",
    "recipe",
    "replicate",
]


def __getattr__(name: str) -> typing.Any:
    """What is loaded by who asks for it: a collective, `checkpoint` or `install`."""
    if name == "checkpoint":
        return importlib.import_module("gradtide.checkpoint")
    if name == "install":
        globals()[name] = importlib.import_module("gradtide.installing").install
    elif name in collectives.LATER:
        globals()[name] = getattr(collectives, name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals()[name]
