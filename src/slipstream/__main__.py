"""The process `slipstream`, or `python -m slipstream`: signals end it with a line before the commands are imported."""

from __future__ import annotations

import gc
import os

from slipstream.core.interrupts import end_at_any_signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn


def script() -> NoReturn:
    """Run the command line. Its import takes longer than Python's own start, and has nothing to undo."""
    end_at_any_signal()
    os.environ["OMP_PROC_BIND"] = "false"  # else torch binds this thread, and all that it starts, to the first core
    gc.set_threshold(50_000)  # imports leave hardly any garbage, and looking for it took a tenth of their time
    from slipstream.cli import script

    script()


if __name__ == "__main__":
    script()
