"""The only room of the library that knows process groups, threads and streams."""

from gradtide.core.transport import CommunicationError as CommunicationError
from gradtide.core.transport import Transport as Transport
from gradtide.transport.connect import Mesh as Mesh
from gradtide.transport.connect import ProcessGroup as ProcessGroup
from gradtide.transport.connect import connect as connect
from gradtide.transport.connect import members as members
from gradtide.transport.connect import seconds_of as seconds_of
