"""Requests to a server that dflow started: by no proxy, which would see its key and prompts, and no redirect."""

from __future__ import annotations

import urllib.request
from typing import Any


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_arguments: Any) -> None:
        """None: the redirect is an HTTPError."""


open_directly = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect()).open
