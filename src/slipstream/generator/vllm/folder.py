"""The weights on their way to vLLM: Hugging Face checkpoints in a folder of shared memory, one per push."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from slipstream.core.errors import WeightSyncError
from slipstream.models.hf import save_model
from slipstream.models.transformer import Transformer

SHARED_MEMORY = Path("/dev/shm")


class WeightFolder:
    """A private folder that holds the newest checkpoint, and while one is being written the one before it."""

    def __init__(self, num_bytes: int) -> None:
        """`num_bytes` of one set of weights decide where it lies: memory with room for two of them, or the disk."""
        places = [SHARED_MEMORY] if SHARED_MEMORY.is_dir() else []
        for place in [*places, Path(tempfile.gettempdir())]:
            if shutil.disk_usage(place).free > 2 * num_bytes:
                self.path = Path(tempfile.mkdtemp(prefix="slipstream-vllm-", dir=place))
                return
        raise WeightSyncError(
            "no room for the weights on their way to vLLM",
            got=f"{2 * num_bytes} bytes needed",
            allowed=f"{SHARED_MEMORY} or {tempfile.gettempdir()}",
        )

    def write(self, model: Transformer, push: int) -> Path:
        """A whole checkpoint under its own name, by a rename: nobody sees half of one. Raises WeightSyncError."""
        final, unfinished = self.path / f"push-{push}", self.path / "unfinished"
        try:
            shutil.rmtree(unfinished, ignore_errors=True)
            save_model(model, unfinished)
            unfinished.rename(final)
        except OSError as error:
            raise WeightSyncError("the weights cannot be written for vLLM", got=error) from error
        return final

    def keep_only(self, path: Path) -> None:
        """Remove every checkpoint but this one."""
        for other in self.path.glob("push-*"):
            if other != path:
                shutil.rmtree(other, ignore_errors=True)

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
