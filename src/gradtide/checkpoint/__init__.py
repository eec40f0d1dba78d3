"""Saving a run while it goes on, resuming it, and ending it in order.

`checkpointer` is what a training loop has. It copies what there is (`contents`,
`loading`), a thread writes it (`writer`) into files that are whole or not there
(`files`), and ranks agree on which of these to read (`generations`), and send each
other what is on another host (`sending`). `signals` begin the orderly end.
"""

from gradtide.checkpoint.checkpointer import Checkpointer, SaveError

__all__ = ["Checkpointer", "SaveError"]
