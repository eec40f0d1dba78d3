"""Training under way: buckets, hooks, deferred updates, clipping, checkpoints.

What happens when is said by `gradtide.core.step`; here it is done.
"""
