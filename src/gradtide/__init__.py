"""Data-parallel PyTorch training over networks that cannot keep up."""

from gradtide.replicate import Replica as Replica
from gradtide.replicate import replicate as replicate
from gradtide.schedule import DEAR as DEAR
from gradtide.schedule import LOCAL as LOCAL
from gradtide.schedule import SEQUENTIAL as SEQUENTIAL
from gradtide.schedule import WFBP as WFBP
from gradtide.scheme import Scheme as Scheme
from gradtide.transport import CommunicationError as CommunicationError

__version__ = "0.1.0"
