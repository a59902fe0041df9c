"""Run the `slipstream plan` commands of a document again, and put what they print under them.

    python scripts/plan_examples.py docs/planning.md [--check]

An example is a fenced block whose first line is `$ slipstream plan ...`. One with lines of `...` is cut short: of what
is printed it has the lines that are nearest to those it had. With --check nothing is written: the exit code says
whether the document shows what is printed now.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

EXAMPLE = re.compile(r"(?<=^```text\n)\$ (slipstream plan [^\n]*)\n(.*?)(?=^```$)", flags=re.DOTALL | re.MULTILINE)
WIDTH = 80
CUT = "..."


def printed(command: str) -> str:
    """What `command` prints on a terminal of WIDTH columns, without the spaces that nobody sees."""
    arguments = shlex.split(command)[1:]
    environment = os.environ | {"COLUMNS": str(WIDTH), "NO_COLOR": "1", "TERM": "dumb"}
    found = subprocess.run(
        [sys.executable, "-m", "slipstream.cli", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    lines = [line.rstrip() for line in found.stdout.splitlines()]
    return "\n".join(lines).strip() + "\n"


def renewed(text: str) -> str:
    """The document with the output of today."""
    return EXAMPLE.sub(lambda example: f"$ {example[1]}\n{shown(printed(example[1]), example[2])}", text)


def shown(now: str, before: str) -> str:
    """All of what is printed `now`, or what there was of it `before`."""
    kept = before.splitlines()
    if CUT not in kept:
        return now
    lines = now.splitlines()
    nearest = [line if line == CUT else difflib.get_close_matches(line, lines, n=1, cutoff=0)[0] for line in kept]
    return "\n".join(nearest) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("documents", type=Path, nargs="+")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    stale = []
    for document in arguments.documents:
        text = document.read_text(encoding="utf-8")
        now = renewed(text)
        if now != text:
            stale.append(str(document))
            if not arguments.check:
                document.write_text(now, encoding="utf-8")
    if arguments.check and stale:
        sys.stderr.write(f"stale: {', '.join(stale)}; run without --check\n")
        return 1
    sys.stdout.write(f"renewed: {', '.join(stale)}\n" if stale else "every example prints what is shown\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
