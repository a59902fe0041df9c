"""Ten minutes of quickstarts under the adversary: every admitted prompt trained once or told of, none too old."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from adversary import KINDS, VICTIMS
from chaos_config import lowest_accuracy
from storm import storm
from table import HEAD, row

SEED = int(os.environ.get("SLIPSTREAM_CHAOS_SEED", "0"))
MINUTES = float(os.environ.get("SLIPSTREAM_CHAOS_MINUTES", "10"))
KEEP = os.environ.get("SLIPSTREAM_CHAOS_KEEP")


@pytest.mark.chaos
@pytest.mark.timeout(60 * (MINUTES + 20))
def test_quickstarts_under_the_adversary():
    result = storm(SEED, MINUTES, say=sys.stderr.write, keep=Path(KEEP) if KEEP else None)
    assert not result.findings
    assert len(result.recoveries_s) == len(result.strikes)
    few = MINUTES < 10  # shorter ones are for trying it out
    assert len(result.strikes) >= MINUTES, "the adversary hit less than once a minute"
    sys.stderr.write(f"{HEAD}\n{row(result)}\n")
    assert few or set(result.injected) >= set(KINDS), f"not every kind of fault: {result.injected}"
    assert few or set(result.victims) >= set(VICTIMS) - {"keeper"}, f"not every kind of process: {result.victims}"
    for accuracy in result.accuracies:
        assert accuracy >= lowest_accuracy(), f"accuracies {result.accuracies}"
