"""Refuses what a web site makes a browser ask of a server on loopback without an API key, as `observe/watch` does."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from slipstream.environments.openai_replies import error_body


class OwnSitesOnly:
    """Answers 403 where `Host` is another name than this machine's own (DNS rebinding), or another site asks."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        why = refusal(Headers(scope=scope))
        if why is None:
            await self._app(scope, receive, send)
        else:
            await JSONResponse(error_body(why, 403, "forbidden"), 403, {"connection": "close"})(scope, receive, send)


def refusal(headers: Headers) -> str | None:
    """Return why a request is not answered, or None."""
    try:
        name = urlsplit(f"//{headers.get('host', '')}").hostname or ""
        is_own = name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        is_own = False
    if not is_own:
        return "without an API key, this server answers under the names 127.0.0.1 and localhost alone"
    if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        return "without an API key, other sites may not ask here"
    return None
