"""The report: one self-contained page about a run, or about several beside each other, from the files they left.

Nothing in it is fetched or executed: plots are inline SVG, there is no script, and every piece of text that came from
a model or a data set is escaped. `data.py` reads the files, `charts.py` has what both pages draw with `observe/svg.py`,
`page.py` is the page of one run and `comparison.py` that of several.
"""

from __future__ import annotations

from pathlib import Path

from slipstream.core.errors import ConfigError, SlipstreamError
from slipstream.observe.report.comparison import write_comparison
from slipstream.observe.report.data import check_run
from slipstream.observe.report.page import write_report

__all__ = ["report", "write_comparison", "write_report"]


def report(*runs: str | Path, out: str | Path | None = None) -> Path:
    """Write the page about one run (its `report.html`), or about several beside each other; returns where it is.

    `out` is a file in an existing folder; without it several are compared in `comparison.html` in the working
    directory. ConfigError for what is no run or is damaged, and for an `out` that cannot be written.
    """
    if not runs:
        raise ConfigError("a run is needed", allowed="folder of a run, or folders of several to compare them")
    folders = [Path(run) for run in runs]
    for folder in folders:
        check_run(folder)
    path = None if out is None else Path(out)
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise ConfigError("the report cannot be written there", got=path, allowed="a file in an existing folder")
    try:
        return write_report(folders[0], out=path) if len(folders) == 1 else write_comparison(folders, out=path)
    except ConfigError:
        raise
    except SlipstreamError as error:  # what lies in the folders is input here
        raise ConfigError(error.what, got=error.got, allowed=error.allowed, hint=error.hint) from error
