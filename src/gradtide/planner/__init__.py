"""What a step would cost elsewhere: traces, networks, and an engine on a virtual clock.

trace.py      a training step without any exchange: sizes, orders, times
network.py    a network and a device, as measured or as imagined
cost.py       seconds of a request on a network
rehearsal.py  what a collective asks for, found out by running it at a smaller size
sketch.py     requests without memory, continued to other sizes, and made-up answers
transport.py  a transport with a virtual clock
virtual.py    a step of training on it
"""
