"""Held-out results decide: when the run ends early, and which version's model is kept as the best.

An evaluation is of a version that the trainer may have left behind by the time of its result. So the trainer exports
every published version that may be the one evaluated, before its next step: to `.best_<version>`, a candidate. Which
one it is a replica says when it begins (`Evaluating`); candidates below go then, and no further ones come. At most the
best, and the candidates of the evaluations under way, are on the disk.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec

from slipstream.core.disk import disk_errors, replace_file, sync, sync_files
from slipstream.core.held_out import Measured
from slipstream.core.service_messages import Export
from slipstream.core.stage_sections import EvalConfig
from slipstream.core.types import StopCause
from slipstream.observe.summary import BEST, BEST_FILE, Best, read_best

CANDIDATE = ".best_"
REPLACED = ".best.replaced"


class EarlyStopping:
    """The rules `eval.stop_at` and `eval.patience`, over the greedy evaluations in the order in which they came.

    Pure: a run that goes on has the same state once it has taken the evaluations before.
    """

    def __init__(self, config: EvalConfig) -> None:
        self._config = config
        self._best, self._num_worse = -math.inf, 0
        self.cause: StopCause | None = None

    def take(self, found: Measured) -> None:
        value = found.value(self._config)
        if value is None:
            return
        self._num_worse = 0 if value > self._best else self._num_worse + 1
        self._best = max(value, self._best)
        if self._config.stop_at is not None and value >= self._config.stop_at:
            self.cause = self.cause or "stop_at"
        elif self._config.patience is not None and self._num_worse >= self._config.patience:
            self.cause = self.cause or "patience"

    def in_words(self) -> str:
        if self.cause == "stop_at":
            return f"held-out {self._config.goes_by} has reached eval.stop_at = {self._config.stop_at:g}"
        return f"held-out {self._config.goes_by} is no better than {self._best:.3f} for {self._num_worse} evaluations"


class BestModel:
    """The folder `best/` of a run, and its candidates. With `is_kept` false it does nothing."""

    def __init__(self, run_dir: Path, config: EvalConfig) -> None:
        self._run_dir, self._config = run_dir, config
        self._asked: dict[int, bool] = {}  # candidates -> whether they are on the disk
        self._found: dict[int, Best] = {}  # results whose candidate is not there
        if config.keep_best:
            with disk_errors(run_dir):
                self.clear()
        self.best = read_best(run_dir) if config.keep_best else None

    def candidate(self, version: int) -> Export | None:
        """Return the order to export `version`, which may be evaluated and is the trainer's."""
        if not self._config.keep_best or version in self._asked:
            return None
        self._asked[version] = False
        return Export(path=str(self._path(version)))

    def last(self, version: int) -> Export | None:
        """Return the order to export `version`, the trainer's, where its result is known and the best."""
        return self.candidate(version) if version in self._found else None

    def began(self, may_be_of: Callable[[int], bool]) -> None:
        """Drop the candidates that no evaluation is of."""
        for version in [one for one in self._asked if not may_be_of(one) and one not in self._found]:
            self._drop(version)

    def exported(self, path: str) -> None:
        """Take that the candidate at `path` is on the disk."""
        version = int(Path(path).name.removeprefix(CANDIDATE))
        if version not in self._asked:  # dropped meanwhile
            shutil.rmtree(path, ignore_errors=True)
            return
        self._asked[version] = True
        if (found := self._found.pop(version, None)) is not None:
            self._settle(found)

    def evaluated(self, version: int, found: Measured) -> None:
        """Take the result of an evaluation: the candidate takes the place of the best, or goes."""
        value = found.value(self._config)
        if not self._config.keep_best:
            return
        if value is None or not self._is_better(value):
            self._drop(version)
            return
        best = Best(version=version, metric=self._config.goes_by, value=value)
        if self._asked.get(version):
            self._settle(best)
        else:
            self._found[version] = best

    @property
    def missed(self) -> list[int]:
        """Return the versions that are better than the best, and have no candidate."""
        return [version for version, found in self._found.items() if self._is_better(found.value)]

    def clear(self) -> None:
        """Remove all candidates, and what was left of a replacement that was cut off between its two renames."""
        replaced, best = self._run_dir / REPLACED, self._run_dir / BEST
        if replaced.exists() and not best.exists():
            replaced.rename(best)
        for stale in (replaced, *self._run_dir.glob(f"{CANDIDATE}*")):
            shutil.rmtree(stale, ignore_errors=True)

    def _path(self, version: int) -> Path:
        return self._run_dir / f"{CANDIDATE}{version}"

    def _is_better(self, value: float) -> bool:
        return self.best is None or self.best.metric != self._config.goes_by or value > self.best.value

    def _drop(self, version: int) -> None:
        if self._asked.pop(version, False):
            shutil.rmtree(self._path(version), ignore_errors=True)

    def _settle(self, found: Best) -> None:
        """Put the candidate in the place of the best, unless a better one has come meanwhile."""
        if not self._is_better(found.value):
            self._drop(found.version)
            return
        candidate, best, replaced = self._path(found.version), self._run_dir / BEST, self._run_dir / REPLACED
        with disk_errors(best):
            replace_file(candidate / BEST_FILE, msgspec.json.format(msgspec.json.encode(found)) + b"\n")
            sync_files(candidate)
            if best.exists():
                best.rename(replaced)
            candidate.rename(best)
            sync(self._run_dir)
            shutil.rmtree(replaced, ignore_errors=True)
        del self._asked[found.version]
        self.best = found
