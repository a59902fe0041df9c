"""Run the `slipstream plan` commands of a document again, and put what they print under them.

    python scripts/plan_examples.py docs/planning.md [--check]

An example is a fenced block whose first line is `$ slipstream plan ...`. With --check nothing is written: the exit code
says whether the document shows what is printed now.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

EXAMPLE = re.compile(r"(?<=^```text\n)\$ (slipstream plan [^\n]*)\n.*?(?=^```$)", flags=re.DOTALL | re.MULTILINE)
WIDTH = 80


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
    return EXAMPLE.sub(lambda example: f"$ {example[1]}\n{printed(example[1])}", text)


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
    return 0


if __name__ == "__main__":
    sys.exit(main())
