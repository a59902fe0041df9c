"""`report.html`: one page about one run."""

from __future__ import annotations

from pathlib import Path

from slipstream.core.disk import replace_file
from slipstream.observe.hardware import Hardware
from slipstream.observe.report.gains import gains
from slipstream.observe.report.html import document
from slipstream.observe.report.learning import learning
from slipstream.observe.report.off_policy import off_policy
from slipstream.observe.report.overview import heading, overview
from slipstream.observe.report.run import Run, read_run
from slipstream.observe.report.setup import setup
from slipstream.observe.report.stages import stages
from slipstream.observe.report.timing import timing
from slipstream.observe.report.window import Window, read_window
from slipstream.observe.report.words import words

REPORT_FILE = "report.html"
MENU = {
    "overview": "In short",
    "before": "Before RL",
    "learning": "Learning",
    "evaluation": "Evaluation",
    "off-policy": "Off-policy",
    "time": "Time",
    "text": "Text",
    "setup": "Setup",
}


def write_report(run_dir: Path, hardware: Hardware | None = None, *, out: Path | None = None) -> Path:
    """Write `run_dir/report.html`, or `out`, from whatever is there; what is missing is left out of the page."""
    path = run_dir / REPORT_FILE if out is None else out
    replace_file(path, page(read_run(run_dir), read_window(run_dir), hardware).encode())
    return path


def page(run: Run, window: Window | None, hardware: Hardware | None) -> str:
    parts = {
        "overview": overview(run),
        "before": stages(run.path),
        "learning": learning(run),
        "evaluation": gains(run.evaluation),
        "off-policy": off_policy(run),
        "time": timing(run, window),
        "text": words(run),
        "setup": setup(run, hardware),
    }
    menu = {anchor: MENU[anchor] for anchor, content in parts.items() if content}
    return document(title=run.recipe, heading=heading(run), menu=menu, body=parts.values())
