"""The proxies that the environment names (http_proxy, https_proxy, all_proxy), and which requests go through one: none
to a server that dflow started, which would see its key and prompts.
"""

from __future__ import annotations

import os
import urllib.request
from importlib.util import find_spec
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from attrs import frozen

SCHEMES = ("http", "https", "all")
OF_SOCKS = ("socks5", "socks5h")  # for which httpx needs the library socksio


@frozen
class Proxy:
    """A proxy that the environment sets. variable: the environment variable's name."""

    variable: str
    url: str

    def __str__(self) -> str:
        """The proxy's address without user name and password, and its variable."""
        return f"{urlsplit(self.url).netloc.rpartition('@')[2]} ({self.variable})"

    @property
    def mistake(self) -> str | None:
        """A text on why httpx cannot use the proxy; None if it can."""
        scheme = urlsplit(self.url).scheme
        if scheme in ("http", "https") or (scheme in OF_SOCKS and find_spec("socksio")):
            return None
        library = "needs the library socksio, which is not installed" if scheme in OF_SOCKS else "is not supported"
        return (
            f"the environment variable {self.variable} names a {scheme}:// proxy, which {library}; "
            "set it to an http:// proxy, or unset it"
        )


def proxies() -> dict[str, Proxy]:
    """The proxies of the environment by scheme of the request, or "all"; lower-case variables take precedence."""
    found = {}
    for scheme in SCHEMES:
        for variable in (f"{scheme}_proxy", f"{scheme}_proxy".upper()):
            url = os.environ.get(variable, "").strip()
            if url and scheme not in found:
                found[scheme] = Proxy(variable, url if "://" in url else f"http://{url}")
    return found


def proxy_of(address: str) -> Proxy | None:
    """The proxy for requests to a URL; None for this machine, and for hosts in no_proxy."""
    parts = urlsplit(address)
    host = parts.hostname or ""
    if is_local(host) or urllib.request.proxy_bypass(host):
        return None
    found = proxies()
    return found.get(parts.scheme) or found.get("all")


def is_local(host: str) -> bool:
    """Whether a host's name or address means this machine, without a look-up."""
    try:
        address = ip_address(host)
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
    return address.is_loopback or address.is_unspecified


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_arguments: Any) -> None:
        """Return None, so that a redirect is raised as HTTPError."""


# Requests to a server that dflow started: by no proxy, and no redirect.
open_directly = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect()).open
