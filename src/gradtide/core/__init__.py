"""What everything else stands on: requests, payloads, the engine, the order of a step.

Nothing here knows a collective, a model, a process group or a clock.
"""
