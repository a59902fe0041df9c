"""What holds for the test process and for all that it starts."""

import os
import signal

# Before torch is loaded: waiting threads sleep, as in the processes of a run (`controller/placement.py`).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# What a shell runs in the background ignores Ctrl-C, and so would every run that a test starts and interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)
