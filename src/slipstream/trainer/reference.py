"""Which model the reference policy is."""

from __future__ import annotations

from pathlib import Path

from slipstream.core.config import RunConfig


def follows_warm_start(config: RunConfig) -> bool:
    """Whether the reference is what the warm start makes: no checkpoint has it before the trainer has written one."""
    return config.kl.reference is None and config.warm_start.steps > 0


def reference_path(config: RunConfig, run_dir: Path) -> str | None:
    """Folder of the reference's checkpoint; None: the model that the policy starts from."""
    return str(run_dir / "reference") if follows_warm_start(config) else config.kl.reference
