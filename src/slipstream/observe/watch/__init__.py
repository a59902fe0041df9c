"""`slipstream watch`: a live page of a run, and its replay, from the run's files alone."""

from slipstream.observe.watch.server import Watch, watch

__all__ = ["Watch", "watch"]
