"""Refuses what a web site makes a browser ask of a server on loopback without an API key, as `observe/watch` does."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from slipstream.core.own_sites import refusal
from slipstream.environments.openai_replies import error_body


class OwnSitesOnly:
    """Answers 403 where `Host` is another name than this machine's own (DNS rebinding), or another site asks."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        headers = Headers(scope=scope)
        why = refusal(headers.get("host", ""), headers.get("sec-fetch-site", "none"))
        if why is None:
            await self._app(scope, receive, send)
        else:
            body = error_body(f"without an API key, {why}", 403, "forbidden")
            await JSONResponse(body, 403, {"connection": "close"})(scope, receive, send)
