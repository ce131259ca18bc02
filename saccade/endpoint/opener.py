"""Opens addresses without following redirects, which would carry a key to another one, and without
a proxy on the way to this very machine. A refusal is an answer with its status, not an exception.
"""

from __future__ import annotations

import urllib.request
from urllib.parse import urlsplit

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def opener_for(url: str) -> urllib.request.OpenerDirector:
    opener = urllib.request.OpenerDirector()
    proxies: dict[str, str] | None = {} if urlsplit(url).hostname in LOOPBACK else None
    opener.add_handler(urllib.request.ProxyHandler(proxies))
    opener.add_handler(urllib.request.HTTPHandler())
    opener.add_handler(urllib.request.HTTPSHandler())
    return opener
