"""New versions of the policy: when a generator takes one, and what it holds back until then."""

from __future__ import annotations

from slipstream.core.config import RunConfig
from slipstream.core.executor import Context
from slipstream.core.types import Swapped
from slipstream.core.weights import WeightsSubscriber
from slipstream.generator.backend import Backend
from slipstream.generator.episodes import Episodes
from slipstream.generator.requests import Labelled, Request


class VersionSwaps:
    """Commits staged versions between two decode steps.

    `in_flight`: at once. `between_batches`: when all that has begun is over: completions and episodes, or with
    `weight_update_at = "turn"` the turns that are being sampled. Until then nothing new begins: the generator *drains*,
    and `spans.state` says so. After `generator.segment_tokens` steps of that, P times as many with P pipeline stages (a
    row has a token in P of them), completions are cut and go on under the new version. A backend that `keeps_versions`
    takes a new one beside those in use, and nothing is held back; a swap for which it has no room waits for the end of
    all that has the oldest. With `tells` each swap is announced on `events`; one rank of a replica does so.
    """

    def __init__(
        self,
        config: RunConfig,
        context: Context,
        weights: WeightsSubscriber,
        backend: Backend,
        episodes: Episodes | None,
        spans: Labelled,
        *,
        replica: int,
        tells: bool,
    ) -> None:
        self._config, self._context, self._weights, self._backend = config, context, weights, backend
        self._episodes, self._spans, self._replica, self._tells = episodes, spans, replica, tells
        self._drain_steps = 0
        self._at_turns = config.generator.weight_update_at == "turn"

    @property
    def is_draining(self) -> bool:
        return self._spans.state is not None

    def count_step(self) -> None:
        """A decode step begins."""
        self._drain_steps += self.is_draining

    def take(self, version: int | None) -> bool:
        """Commit `version`, the newest staged one (None: there is none), if that is allowed now; whether it was."""
        if version is None:
            if self.is_draining and not self._is_anything_begun:
                self._resume([])  # what was drained for gave way to a newer version, which may have failed to arrive
            return False
        if not self._backend.may_swap:
            self._resume([])  # an evaluation came while completions were being drained: it needs admission
            return False
        if self._backend.keeps_versions:
            return self._backend.has_room_for_version and self._commit(version)
        engine, resumed = self._backend.engine, list[Request]()
        if self._config.weight_update == "between_batches" and self._is_anything_begun:
            engine.pause_admission(True, holds_turns=self._at_turns)
            self._spans.state = "drain"
            generator = self._config.generator
            limit = generator.segment_tokens
            if limit is None or self._drain_steps < limit * generator.pipeline_parallel:
                return False
            resumed = engine.export_live()
        has_swapped = self._commit(version)
        self._resume(resumed)
        return has_swapped

    @property
    def _is_anything_begun(self) -> bool:
        if self._backend.engine.num_begun > 0:
            return True
        return self._episodes is not None and not self._at_turns and self._episodes.num_begun > 0

    def _commit(self, version: int) -> bool:
        """Replace the weights; False, changing nothing, where the version is gone.

        A version that fails its probe ends the run, the old one still in place.
        """
        with self._context.spans.span("swap", version=version):
            self._backend.settle()
            swap = self._weights.commit()
            if swap is None:
                return False
            self._backend.engine.set_version(
                swap.version,
                kv_on_update=self._config.generator.kv_on_update,
                max_kv_age=self._config.generator.max_kv_age,
            )
        self._spans.version = swap.version
        self._context.spans.instant("swapped", version=swap.version)
        if self._tells:
            self._context.outputs["events"].put(
                Swapped(
                    replica=self._replica,
                    version=swap.version,
                    transfer_s=swap.transfer_s,
                    pause_s=swap.pause_s,
                    probe_error=swap.probe_error,
                )
            )
        return True

    def _resume(self, requests: list[Request]) -> None:
        self._backend.engine.pause_admission(False)
        self._spans.state = None
        self._drain_steps = 0
        if requests:
            self._backend.engine.submit(requests)
