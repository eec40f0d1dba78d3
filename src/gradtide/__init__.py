"""Data-parallel PyTorch training over networks that cannot keep up.

`replicate` averages the gradients of a model over all ranks. A scheme says how: it is a
name or a text, or is built by `recipe`, or from the parts that are exported here: these
have the names that the text has.
"""

from gradtide.collectives import (
    ACPSGD,
    Auto,
    ByNorm,
    CLTk,
    Dense,
    Dynamic,
    Even,
    GTopK,
    MomentumCorrection,
    OkTopk,
    PartitionedTopK,
    PowerSGD,
    TopK,
    TopKA2A,
    TopkDSA,
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
from gradtide.parallel import DistributedDataParallel, install
from gradtide.replica import Replica, replicate
from gradtide.scheme import Scheme, parse, recipe
from gradtide.selectors import Exact, Threshold
from gradtide.transport import CommunicationError

__version__ = "0.2.0"  # read by pyproject.toml, too

# Nothing is gained by importing parts later: the parser knows, and loads, all of them.
__all__ = [
    "ACPSGD",
    "DEAR",
    "KFAC",
    "LOCAL",
    "SEQUENTIAL",
    "WFBP",
    "Auto",
    "Bayesian",
    "BinarySearch",
    "ByNorm",
    "BySize",
    "CLTk",
    "CommunicationError",
    "Cuts",
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
