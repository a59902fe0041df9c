"""Create an environment, and install packages into it with pip: `python scripts/install.py .venv -e '.[dev]'`.

The environment is made where there is none; without packages that is all. Only the standard library is needed. One
line of progress says what pip is at, and for how many seconds: rewritten in place on a terminal; elsewhere printed
where it has changed, a few seconds apart, or every half a minute.
Modules are compiled on all cores once they are there: pip does it on one. Those of which runs import few or none, more
than a quarter of the text, are left for their first import.
What pip calls a warning (a source that does not answer is asked again, many times) is not shown; every other line of
its error output is. Where pip fails, its last output follows, warnings too, and its exit code is that of this script.
"""

from __future__ import annotations

import argparse
import io
import os
import queue
import re
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, TextIO

LINE_EVERY_S = 2.5
UNCHANGED_EVERY_S = 29.5
REDRAW_EVERY_S = 0.5
TAIL_LINES = 20
PIP_OPTIONS = ("--disable-pip-version-check", "--no-input")
COMPILE = (
    "import compileall, re, sysconfig; compileall.compile_dir(sysconfig.get_path('purelib'), "
    "rx=re.compile('/site-packages/(.*/)?(tests|transformers/models)/'), quiet=2, workers=0)"
)

DOING = re.compile(
    r"\s*(Obtaining|Collecting|Downloading|Using cached|Building wheels? for|Preparing metadata|"
    r"Installing build dependencies|Installing collected packages)\b:?\s*(.*)"
)
HUSHED = re.compile(r"(WARNING|DEPRECATION|\[notice\])")
LOUD = re.compile(r"(ERROR|CRITICAL|error\b|Traceback)")


class Progress:
    """One line that says what is done, and since when, rewritten on a terminal.

    Elsewhere one at most every `LINE_EVERY_S`, and one that says the same again every `UNCHANGED_EVERY_S`.
    """

    def __init__(self, out: TextIO, what: str, *, now_s: Callable[[], float] = time.monotonic) -> None:
        self._out, self._now_s = out, now_s
        self._is_terminal = out.isatty()
        self._started_s = self._drawn_s = now_s()
        self.what, self._shown = what, ""

    @property
    def seconds(self) -> float:
        return self._now_s() - self._started_s

    def draw(self) -> None:
        """Show the line where it is time to."""
        now_s = self._now_s()
        elsewhere_s = LINE_EVERY_S if self.what != self._shown else UNCHANGED_EVERY_S
        if now_s - self._drawn_s < (REDRAW_EVERY_S if self._is_terminal else elsewhere_s):
            return
        self._drawn_s, self._shown = now_s, self.what
        line = f"{self.seconds:4.0f} s  {self.what}"
        if self._is_terminal:
            width = shutil.get_terminal_size().columns
            self._out.write(f"\r\x1b[K{line[: width - 1]}")
        else:
            self._out.write(line + "\n")
        self._out.flush()

    def clear(self) -> None:
        """Take the line from the terminal, so that another one can be printed."""
        if self._is_terminal:
            self._out.write("\r\x1b[K")
            self._out.flush()


class Listener:
    """Reads pip's lines: says what it is at, passes its errors on, and keeps the last lines that were not shown.

    The two streams are kept apart: which of them is read first is chance.
    """

    def __init__(self, progress: Progress, errors: TextIO) -> None:
        self._progress, self._errors = progress, errors
        self._is_hushed = False
        self.output: deque[str] = deque(maxlen=TAIL_LINES)
        self.warnings: deque[str] = deque(maxlen=TAIL_LINES)
        self.installed: list[str] = []

    def hear(self, line: str) -> None:
        """Take a line of pip's output."""
        self.output.append(line)
        if found := DOING.match(line):
            verb, rest = found[1].lower(), found[2].partition(" (from ")[0]
            if verb == "installing collected packages":
                rest = f"({rest.count(',') + 1})"
            self._progress.what = f"{verb} {rest}".strip()
        elif line.startswith("Successfully installed "):
            self.installed = line.split()[2:]

    def hear_error(self, line: str) -> None:
        """Take a line of pip's error output: that of a warning, or the next line of one, is kept; others are shown."""
        if HUSHED.match(line):
            self._is_hushed = True
        elif LOUD.match(line):
            self._is_hushed = False
        if self._is_hushed:
            if line not in self.warnings:  # the same one comes for every try
                self.warnings.append(line)
            return
        self._progress.clear()
        self._errors.write(line + "\n")
        self._errors.flush()


def watched(command: Sequence[str], progress: Progress, listener: Listener) -> int:
    """Run `command` to its end, drawing progress meanwhile; return its exit code."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    assert process.stderr is not None
    heard: queue.Queue[tuple[Callable[[str], None], str] | None] = queue.Queue()

    def read(stream: IO[str], hear: Callable[[str], None]) -> None:
        for line in stream:
            heard.put((hear, line.rstrip("\n")))
        heard.put(None)

    streams = ((process.stdout, listener.hear), (process.stderr, listener.hear_error))
    for stream, hear in streams:
        threading.Thread(target=read, args=(stream, hear), daemon=True).start()
    num_open = len(streams)
    while num_open:
        try:
            said = heard.get(timeout=REDRAW_EVERY_S)
        except queue.Empty:
            said = ()
        if said is None:
            num_open -= 1
        elif said:
            hear, line = said
            hear(line)
        progress.draw()
    code = process.wait()
    progress.clear()
    return code


def run(command: Sequence[str], what: str, done: Callable[[Listener], str], *, then: Sequence[str] = ()) -> int:
    """Run `command` under a line of progress; then say what was `done`, or show its last output where it failed.

    `then` follows where something was installed; whether it succeeds does not matter.
    """
    progress = Progress(sys.stdout, what)
    listener = Listener(progress, sys.stderr)
    code = watched(command, progress, listener)
    if then and not code and listener.installed:
        progress.what = "compiling"
        watched(then, progress, Listener(progress, io.StringIO()))
    if code:
        sys.stdout.flush()
        last = (*listener.output, *listener.warnings, f"failed: {what}, exit code {code}")
        sys.stderr.write("".join(f"{line}\n" for line in last))
    else:
        print(f"{done(listener)} in {progress.seconds:.0f} s", flush=True)
    return code if code >= 0 else 128 - code


def in_words(installed: Sequence[str]) -> str:
    """Return how many packages were installed."""
    return f"{len(installed)} package{'' if len(installed) == 1 else 's'}" if installed else "no package"


def lacking() -> str:
    """Return what pip lacks here to build a package from its source, in words; nothing where it is all there."""
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    found = {f"C compiler ({compiler})": shutil.which(compiler)}
    found["Python.h"] = Path(sysconfig.get_path("include"), "Python.h").exists()
    return " and no ".join(what for what, is_there in found.items() if not is_there)


def main() -> int:
    """Create the environment and install into it. The exit code is that of the first command that fails, or 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("environment", help="its folder")
    parser.add_argument("packages", nargs=argparse.REMAINDER, help="arguments of `pip install`; none: install nothing")
    options = parser.parse_args()
    environment, packages = options.environment, options.packages
    if not Path(environment, "bin", "pip").exists():  # the last that is made: one that was interrupted is made again
        command = [sys.executable, "-m", "venv", environment]
        if code := run(command, f"creating {environment}", lambda _: f"created {environment}"):
            return code
    if not packages:
        return 0
    print(f"installing {' '.join(packages)} into {environment}", flush=True)
    python = str(Path(environment) / "bin" / "python")
    code = run(
        [python, "-m", "pip", "install", "--no-compile", *PIP_OPTIONS, *packages],
        f"installing {' '.join(packages)}",
        lambda heard: f"installed {in_words(heard.installed)}",
        then=[python, "-c", COMPILE],
    )
    if code and (what := lacking()):
        sys.stderr.write(
            f"hint: there is no {what} here, so packages that come as source alone cannot be built, such as pycosat, "
            "which reasoning-gym requires. On Debian: apt-get install gcc python3-dev\n"
        )
    return code


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # pip has had the signal, too
        sys.exit(130)
