"""The rule of servers on loopback by which no web site can make a browser ask them."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit


def refusal(host: str, fetch_site: str) -> str | None:
    """Return why a request with these headers, `Host` and `Sec-Fetch-Site`, is not answered; None where it is.

    Another name than this machine's own means DNS rebinding; a literal address cannot be rebound.
    """
    try:
        name = urlsplit(f"//{host}").hostname or ""
        is_own = name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        is_own = False
    if not is_own:
        return "this server answers under the names 127.0.0.1 and localhost alone"
    return None if fetch_site in ("none", "same-origin") else "other sites may not ask here"
