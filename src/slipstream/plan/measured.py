"""Measured eta curves: seconds per sample against batch size, as one machine's trainer and engine really take.

`benchmarks/eta_curves.py` writes them, `slipstream plan --measured FILE` takes them in place of the hardware table.
LlamaRL (arXiv:2505.24034), definition 7.3: eta(b) = tau(b) / b, where tau(b) are the seconds of a batch of b samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import msgspec

from slipstream.core.disk import replace_file
from slipstream.core.errors import ConfigError

Side = Literal["trainer", "generator"]
FORMAT = 1


class Point(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """eta at `batch` samples: the median over turns, and its range. Seconds per sample."""

    batch: int
    seconds: float
    low: float
    high: float


class Curve(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One side on `devices` devices (cores of a CPU, GPUs): points by ascending batch.

    A batch is a microbatch of the trainer, whose optimizer update takes `update_s` besides, or the completions that an
    engine decodes at once.
    """

    side: Side
    devices: int
    precision: str
    points: tuple[Point, ...]
    update_s: float = 0.0


class Together(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Both sides at the same time on one machine: seconds per sample over those that the side takes alone."""

    trainer_devices: int
    generator_devices: int
    trainer: float
    generator: float


class MeasuredModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The curves of one model; a sample is a prompt and a completion of these lengths, in tokens."""

    name: str
    shape: dict[str, Any]
    num_params: int
    prompt_tokens: int
    completion_tokens: int
    curves: tuple[Curve, ...]
    together: tuple[Together, ...] = ()

    def curve(self, side: Side, devices: int) -> Curve | None:
        """That of `side` on just so many devices, if it was measured."""
        return next((curve for curve in self.curves if (curve.side, curve.devices) == (side, devices)), None)


class Measured(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one machine measured: `hardware` are the lines that `slipstream doctor` shows of it."""

    format: int
    command: str
    commit: str
    device: Literal["cpu", "cuda"]
    num_devices: int
    hardware: dict[str, str]
    models: tuple[MeasuredModel, ...]


def write_measured(measured: Measured, path: Path) -> None:
    """Write the file, as a whole or not at all."""
    replace_file(path, msgspec.json.format(msgspec.json.encode(measured), indent=1) + b"\n")


def read_measured(path: Path) -> Measured:
    """The file that `write_measured` wrote. ConfigError for what is none."""
    hint = "in a checkout, `python benchmarks/eta_curves.py --json FILE` writes one"
    try:
        measured = msgspec.json.decode(path.read_bytes(), type=Measured)
    except OSError as error:
        raise ConfigError(
            f"'{path}' cannot be read", got=error.strerror, allowed="measured curves", hint=hint
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"'{path}' holds no measured curves", got=error, hint=hint) from error
    if measured.format != FORMAT:
        raise ConfigError(f"'{path}' is of another format", got=measured.format, allowed=FORMAT, hint=hint)
    for model in measured.models:
        for curve in model.curves:
            _check(curve, path, f"{model.name}, {curve.side} on {curve.devices}")
    return measured


def _check(curve: Curve, path: Path, of: str) -> None:
    batches = [point.batch for point in curve.points]
    if not batches or batches[0] < 1 or any(b >= c for b, c in pairwise(batches)):
        raise ConfigError(f"'{path}' has a curve without order ({of})", got=batches, allowed="ascending batches >= 1")
    if curve.devices < 1 or not all(0 < point.seconds < float("inf") for point in curve.points):
        raise ConfigError(f"'{path}' has a curve that cannot be ({of})", got=curve, allowed="positive numbers")


def rises(points: Sequence[Point]) -> list[tuple[Point, Point]]:
    """Neighbours at which eta does not fall (assumption 7.1 of LlamaRL says it does, everywhere).

    Only rises beyond the spread of the turns count: the later point's lowest turn is above the earlier one's highest.
    """
    return [(before, after) for before, after in pairwise(points) if after.low > before.high]
