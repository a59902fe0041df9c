"""The files with which SLURM, Kubernetes or SkyPilot starts a run on many machines: from a configuration to texts.

All start the same commands (`slipstream launch`): one job for the controller, one for the trainer, one for each
generator replica, so that the loss of one is healed without touching the others, and one for each group that scores
completions on machines of its own (`machines.lay_out`). No file contains the run's key: the scripts make it where the
jobs are submitted.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

from slipstream.core.config import RunConfig
from slipstream.core.errors import ConfigError
from slipstream.jobs.kubernetes import VOLUME_DIR, kubernetes_files
from slipstream.jobs.skypilot import skypilot_files
from slipstream.jobs.slurm import slurm_files

_OPTIONS = {
    "slurm": ("partition", "account", "time"),
    "kubernetes": ("image", "namespace"),
    "skypilot": ("image", "accelerator", "infra"),
}
"""The options of the command that files of a kind take, beside --remote and --gpus-per-node."""


def write_job_files(config: RunConfig, options: Any, kind: str) -> str:
    """Write the files that `slipstream launch --slurm DIR`, or another kind, asks for; say how to start them.

    `kind` is 'slurm', 'kubernetes' or 'skypilot', `options` are the command's. ConfigError for a folder that has
    something in it.
    """
    folder: Path = vars(options)[kind].absolute()
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ConfigError(
            "job files need a folder of their own", got=folder, allowed="a new or empty one", hint="move the old one"
        )
    given = {name: vars(options)[name] for name in ("remote", "gpus_per_node", *_OPTIONS[kind])}
    if kind == "slurm":
        out, program = options.resume or options.out, (sys.executable, "-m", "slipstream")
        files = slurm_files(config, folder, working_dir=Path.cwd(), out=out, program=program, **given)
    elif kind == "kubernetes":
        _check_place("Kubernetes", options, folder)
        files = kubernetes_files(config, folder.name, **given)
    else:
        _check_place("SkyPilot", options, folder)
        files = skypilot_files(config, folder.name, **given)
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in files.items():
        (folder / file).write_text(text, encoding="utf-8")
        if file.endswith(".sh"):
            (folder / file).chmod(0o755)
    submit = shlex.quote(str(folder / "submit.sh"))
    return f"written: {', '.join(files)}\nlook through them, then start the run with {submit}"


def _check_place(where: str, options: Any, folder: Path) -> None:
    if (given := options.resume or options.out) is not None:
        what = f"on {where} a run has its place on the volume claim"
        allowed = f"{VOLUME_DIR}/runs/{folder.name}, which is gone on with where it is a run"
        raise ConfigError(what, got=f"{given}", allowed=allowed, hint="leave --out and --resume away")
