"""The sentence that says which side starves: of `summary.json` once a run is over, else from its files, now and then.
None where it cannot be told.

Accounting reads all timelines and events (`observe/accounting.py`), so it is done beside the page's answers, seldom,
and not at all for a run that is large while it goes on.
"""

from __future__ import annotations

import time
from pathlib import Path

from slipstream.core.errors import SlipstreamError
from slipstream.observe.accounting import read_accounting
from slipstream.observe.timeline import process_files
from slipstream.observe.watch.index import RunIndex

MIN_INTERVAL_S = 20.0
EARLY_INTERVAL_S = 5.0  # up to step 10: then the sentence changes most
MAX_SHARE = 0.02
"""Of one core, for accounting while a run goes on."""
MAX_BYTES = 128_000_000


class Verdict:
    """`sentence` is None before the first one, and where there is none."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.sentence: str | None = None
        self._due_s = 0.0
        self._is_final = False

    def update(self, index: RunIndex, *, now_s: float) -> bool:
        """Whether there is a new one; takes as long as accounting does."""
        before = self.sentence
        is_over = index.life()[0] in ("done", "failed", "interrupted")
        balance = index.summary.get("balance") if is_over else None
        if isinstance(balance, dict) and isinstance(balance.get("verdict"), str):
            self.sentence = balance["verdict"] or None
        elif not (is_over and self._is_final) and now_s >= self._due_s and self._size() <= MAX_BYTES:
            started_s = time.thread_time()
            try:
                self.sentence = read_accounting(self.run_dir).balance.verdict or None
            except (SlipstreamError, OSError):  # files that are being replaced, or are damaged
                self.sentence = before
            least_s = MIN_INTERVAL_S if index.events.loop.version > 10 else EARLY_INTERVAL_S
            self._due_s = now_s + max(least_s, (time.thread_time() - started_s) / MAX_SHARE)
            self._is_final = is_over
        return self.sentence != before

    def _size(self) -> int:
        files = [self.run_dir / "events.jsonl", *process_files(self.run_dir)]
        return sum(path.stat().st_size for path in files if path.exists())
