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
    files = {"slurm": _for_slurm, "kubernetes": _for_kubernetes, "skypilot": _for_skypilot}[kind](
        config, options, folder
    )
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in files.items():
        (folder / file).write_text(text, encoding="utf-8")
        if file.endswith(".sh"):
            (folder / file).chmod(0o755)
    submit = shlex.quote(str(folder / "submit.sh"))
    return f"written: {', '.join(files)}\nlook through them, then start the run with {submit}"


def _for_slurm(config: RunConfig, options: Any, folder: Path) -> dict[str, str]:
    return slurm_files(
        config,
        folder,
        working_dir=Path.cwd(),
        out=options.out if options.resume is None else options.resume,
        remote=options.remote,
        gpus_per_node=options.gpus_per_node,
        partition=options.partition,
        account=options.account,
        time=options.time,
        program=(sys.executable, "-m", "slipstream"),
    )


def _for_kubernetes(config: RunConfig, options: Any, folder: Path) -> dict[str, str]:
    _check_place("Kubernetes", options, folder)
    return kubernetes_files(
        config,
        folder.name,
        image=options.image,
        namespace=options.namespace,
        remote=options.remote,
        gpus_per_node=options.gpus_per_node,
    )


def _for_skypilot(config: RunConfig, options: Any, folder: Path) -> dict[str, str]:
    _check_place("SkyPilot", options, folder)
    return skypilot_files(
        config,
        folder.name,
        image=options.image,
        accelerator=options.accelerator,
        infra=options.infra,
        remote=options.remote,
        gpus_per_node=options.gpus_per_node,
    )


def _check_place(where: str, options: Any, folder: Path) -> None:
    if (given := options.resume or options.out) is not None:
        what = f"on {where} a run has its place on the volume claim"
        allowed = f"{VOLUME_DIR}/runs/{folder.name}, which is gone on with where it is a run"
        raise ConfigError(what, got=f"{given}", allowed=allowed, hint="leave --out and --resume away")
