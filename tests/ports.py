"""Ports for servers that a test starts later."""

from __future__ import annotations

import random
import socket

PORTS = range(20_000, 30_000)  # below those that connections of other tests are given


def free_port() -> int:
    """One of this host's that nobody listens on, nor is given by chance."""
    while True:
        port = random.SystemRandom().choice(PORTS)
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue
