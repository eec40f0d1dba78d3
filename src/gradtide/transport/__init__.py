"""The only room of the library that knows process groups, threads and streams.

base.py     what the engine needs of a transport
connect.py  from the user's process group and device to one of those below
gloo.py     CPU tensors: messages over Gloo, and Gloo's own collectives
staged.py   GPU tensors over Gloo, through pinned memory
nccl.py     GPU tensors over NCCL, on a side stream
lane.py     a thread that runs work in the order of submission
ring.py     reduce-scatter and all-gather from point-to-point messages
rotation.py all-to-all from point-to-point messages
fault.py    which ranks are missing after a failure
"""

from gradtide.transport.base import CommunicationError as CommunicationError
from gradtide.transport.base import Ticket as Ticket
from gradtide.transport.base import Transport as Transport
from gradtide.transport.connect import ProcessGroup as ProcessGroup
from gradtide.transport.connect import connect as connect
