"""The only room of the library that knows process groups, threads and streams.

lane.py    work in order, beside the training thread (a thread) or a stream
ring.py    reduce-scatter and all-gather from point-to-point messages
gloo.py    CPU tensors, and GPU tensors staged through pinned memory
nccl.py    GPU tensors on a side stream
"""

from gradtide.transport.base import CommunicationError as CommunicationError
from gradtide.transport.base import Ticket as Ticket
from gradtide.transport.base import Transport as Transport
from gradtide.transport.connect import ProcessGroup as ProcessGroup
from gradtide.transport.connect import connect as connect
