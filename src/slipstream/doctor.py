"""`slipstream doctor`: what this machine has, and for each feature whether it works here, and why."""

from __future__ import annotations

import errno
import importlib.metadata
import os
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from packaging.requirements import Requirement
from rich.console import Console
from rich.table import Table
from rich.text import Text

from slipstream.controller.placement import why_no_processes
from slipstream.jail.isolation import REQUIRED_FOR_UNSAFE, WITHOUT
from slipstream.models.linear import keeps_bits
from slipstream.observe.hardware import Hardware, describe
from slipstream.observe.summary import Versions, versions
from slipstream.rewards.checks import isolation_report

QUICKSTART_BYTES = 3 * 4 * 4_000_000  # three fp32 copies of 4 M parameters: what its weight segment takes at most
_NO_GPU = "no GPU that torch can use"
_OWN_ENVIRONMENT = {"vllm": "generator.vllm.python", "environments": "environment.verifiers_python"}
_MAX_MISSING = 3
"""Packages of an extra that are named; --json has all."""


class Feature(msgspec.Struct, frozen=True):
    """A line of the verdict."""

    name: str
    works: bool
    why: str


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    """`isolation` maps barriers around verifiers to whether they hold; `extras` maps extras to packages they lack."""

    versions: Versions
    hardware: Hardware
    isolation: dict[str, bool]
    extras: dict[str, list[str]]
    features: tuple[Feature, ...]

    def to_dict(self) -> dict[str, Any]:
        built: dict[str, Any] = msgspec.to_builtins(self)
        return built


def examine() -> Findings:
    """Look at this machine; tries the sandbox once, changes nothing."""
    hardware, isolation, extras = describe(), isolation_report(), missing_packages()
    return Findings(
        versions=versions(),
        hardware=hardware,
        isolation=isolation,
        extras=extras,
        features=features(
            hardware,
            isolation,
            extras,
            no_processes=why_no_processes(),
            has_equal_bits=keeps_bits(),
            mps=find_mps() if hardware.gpus else None,
        ),
    )


def features(
    hardware: Hardware,
    isolation: Mapping[str, bool],
    extras: Mapping[str, list[str]],
    *,
    no_processes: str = "",
    has_equal_bits: bool = True,
    mps: tuple[bool, str] | None = None,
) -> tuple[Feature, ...]:
    """Return what works here, judged by what was found.

    `no_processes` is why executors have no processes, `has_equal_bits` what `keeps_bits` found, `mps` what `find_mps`.
    """
    shm_bytes, gpus = hardware.shm_free_bytes or 0, ", ".join(hardware.gpus)
    open_barriers = sorted(name for name in REQUIRED_FOR_UNSAFE if not isolation[name])
    found = [
        Feature("training on the CPU", True, f"{hardware.num_cores} cores, {hardware.memory_bytes / 2**30:.1f} GiB"),
        Feature(
            "executors in processes of their own",
            not no_processes,
            f"{no_processes}; host = 'inline' works" if no_processes else "Linux, with pidfd_open",
        ),
        Feature(
            "overlap of generation and training",
            hardware.num_cores >= 2 and not no_processes,
            f"{hardware.num_cores} cores; each side needs one of its own, and a process",
        ),
        Feature(
            "synchronous runs with the bits of a plain loop",
            has_equal_bits,
            "the same product in all batches" if has_equal_bits else "this torch rounds a row by the batch it is in",
        ),
        Feature(
            "weight sync through shared memory",
            shm_bytes >= QUICKSTART_BYTES,
            f"{shm_bytes / 2**20:.0f} MiB free; three fp32 copies of the model must fit",
        ),
        *(
            Feature(f"{what} on a GPU", bool(gpus), f"{gpus}: {section}.device = 'cuda'" if gpus else _NO_GPU)
            for what, section in (("generation", "generator"), ("training", "trainer"))
        ),
        *([] if mps is None else [Feature("kernels of several processes at once on a GPU (MPS)", *mps)]),
        Feature(
            "verifiers that evaluate model text",
            not open_barriers,
            f"not isolated here: {', '.join(open_barriers)}; they need rewards.trust_verifier = true"
            if open_barriers
            else f"the sandbox holds: {', '.join(sorted(REQUIRED_FOR_UNSAFE))}",
        ),
    ]
    for extra, missing in extras.items():
        shown = ", ".join(missing[:_MAX_MISSING]) + (
            f" and {len(missing) - _MAX_MISSING} more" * (len(missing) > _MAX_MISSING)
        )
        why = f"missing: {shown}; `pip install 'slipstream-rl[{extra}]'`" if missing else "installed"
        if missing and extra in _OWN_ENVIRONMENT:
            why += f", or an environment of its own, named by {_OWN_ENVIRONMENT[extra]}"
        found.append(Feature(f"extra '{extra}'", not missing, why))
    return tuple(found)


def find_mps() -> tuple[bool, str]:
    """Return whether the daemon of CUDA's Multi-Process Service listens, and where, or what to do."""
    folder = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        try:
            link.connect(str(folder / "control"))
            listens = True
        except OSError as error:
            listens = error.errno == errno.EPROTOTYPE  # a socket of another type has somebody behind it, too
    if listens:
        return True, f"its daemon listens in {folder}"
    is_there = shutil.which("nvidia-cuda-mps-control") is not None
    how = "`nvidia-cuda-mps-control -d` starts it" if is_there else "nvidia-cuda-mps-control is not installed"
    return (
        False,
        f"no daemon listens in {folder} (CUDA_MPS_PIPE_DIRECTORY); {how}. Processes share a GPU in time slices",
    )


def missing_packages() -> dict[str, list[str]]:
    """Return each extra's packages that are not installed; nothing where Slipstream itself is not, in a bare folder."""
    try:
        about = importlib.metadata.metadata("slipstream-rl")
    except importlib.metadata.PackageNotFoundError:
        return {}
    missing: dict[str, list[str]] = {extra: [] for extra in about.get_all("Provides-Extra", [])}
    for requirement in map(Requirement, about.get_all("Requires-Dist", [])):
        marker = requirement.marker  # some are for one system only
        if marker is None or marker.evaluate({"extra": ""}) or _is_installed(requirement.name):
            continue
        for extra in [extra for extra in missing if marker.evaluate({"extra": extra})]:
            missing[extra].append(requirement.name)
    return missing


def render(findings: Findings, console: Console) -> None:
    """Print the findings as three tables."""
    facts = Table(box=None, show_header=False)
    for name, value in msgspec.to_builtins(findings.versions).items():
        facts.add_row(name, "none: this is no checkout" if name == "commit" and value is None else str(value))
    for name, value in findings.hardware.lines().items():
        facts.add_row(name, value)
    console.print(facts)
    walls = Table("barrier around workers", "holds here", "what that means", show_edge=False)
    for name, holds in findings.isolation.items():
        walls.add_row(name, _answer(holds), "" if holds else WITHOUT[name])
    console.print(walls)
    verdict = Table("feature", "works here", "why", show_edge=False)
    for feature in findings.features:
        verdict.add_row(feature.name, _answer(feature.works), Text(feature.why))  # Text: brackets in it are no markup
    console.print(verdict)


def _answer(holds: bool) -> Text:
    return Text("yes", "green") if holds else Text("no", "yellow")


def _is_installed(package: str) -> bool:
    try:
        importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
