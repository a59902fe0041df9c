"""How much of the contexts of later turns vLLM finds in its prefix cache, which takes the place of parked keys."""

from __future__ import annotations

from slipstream.generator.requests import Request, Session


class TurnContexts:
    """Counters of later turns, under the names of our own engine's (`stats.EngineStats`).

    For each open session it holds the length of what vLLM has computed. Bound: the sessions that are not released.
    """

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}  # empty where vLLM does not report what it finds
        self._num_computed: dict[Session, int] = {}

    def begin(self, request: Request) -> None:
        """An episode that begins has computed nothing yet, whatever an earlier one of its session has."""
        if request.num_before == 0:
            self._num_computed.pop(request.session, None)

    def found(self, request: Request, num_cached: int) -> int:
        """Count the first `num_cached` tokens of a turn's context as found; return how many were computed again.

        The context of a turn that another replica has begun was computed there (`is_again`).
        """
        num_known = self._num_computed.get(request.session, 0)
        if request.is_again and request.num_before:
            num_known = len(request.prompt_tokens)
        num_hit = min(num_cached, num_known)
        for name, count in (("parked_hit_tokens", num_hit), ("parked_missed_tokens", num_known - num_hit)):
            self.counts[name] = self.counts.get(name, 0) + count
        return num_known - num_hit

    def finished(self, request: Request, num_tokens: int) -> None:
        """A turn has sampled its last token, so vLLM has computed all tokens but that one."""
        if request.parks:
            self._num_computed[request.session] = len(request.prompt_tokens) + num_tokens - 1

    def release(self, session: Session) -> None:
        """Forget what is held of a session, if anything is."""
        self._num_computed.pop(session, None)
