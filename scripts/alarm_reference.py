"""Print the table of alarms in docs/reliability.md, from the rules themselves.

    python scripts/alarm_reference.py

`tests/observe/test_health.py` fails when the committed table differs from what this prints.
"""

from __future__ import annotations

import sys

from slipstream.observe.health import RULES

HEAD = "| alarm | watches | threshold, and why | means | try |\n|---|---|---|---|---|\n"


def table() -> str:
    """One row per alarm, in the order in which they are looked at."""
    rows = (
        (
            f"`{name}`" + (" (notice)" if rule.severity == "notice" else ""),
            rule.watches,
            f"{'below' if rule.is_low else 'from'} {rule.threshold:g}: {rule.reason}",
            rule.meaning,
            rule.advice,
        )
        for name, rule in RULES.items()
    )
    return HEAD + "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |\n" for row in rows)


if __name__ == "__main__":
    sys.stdout.write(table())
