"""Before torch is loaded: waiting threads sleep, as in the processes of a run (`controller/placement.py`)."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
