"""Which web pages may use a port: its own and configured ones. Pure.

A browser sends what any page asks it to, with this machine's access to the network. It marks such a request, by
``Origin`` or ``Sec-Fetch-Site``, and a reading without these by its ``User-Agent``. Programs mark nothing and need
nothing configured. (Node.js sends ``Sec-Fetch-Mode`` alone.) With DNS rebinding the page's own name leads here, so that
its requests look like those of this port's own pages: a browser's ``Host`` must be a loopback name, an address, or a
configured name.
"""

import re
from collections.abc import Mapping
from ipaddress import ip_address

from kybernate.config_errors import ConfigError

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:\d{1,5})?", re.ASCII)
_NAMES = re.compile(r"[\w!#$%&'*+.^`|~-]+(?:[ \t]*,[ \t]*[\w!#$%&'*+.^`|~-]+)*", re.ASCII)
SETTING = "KYB_CORS_ORIGINS"


class WebOrigins:
    """The pages of one port. ``configured``: origins such as ``https://chat.example``, separated by commas.

    Header names of the arguments are in lower case, or their mapping ignores case. Raises ConfigError.
    """

    def __init__(self, configured: str = "") -> None:
        self._origins: set[str] = set()
        self._names = {"localhost"}
        for origin in filter(None, (origin.strip() for origin in configured.split(","))):
            found = _ORIGIN.fullmatch(origin.lower())
            if found is None:
                text = f"{SETTING}={configured!r}: {origin!r}: write the scheme and host of a page"
                raise ConfigError(f"{text}, such as https://chat.example")
            self._origins.add(origin.lower())
            self._names.add(found[1])

    def refusal(self, method: str, headers: Mapping[str, str], *, page: bool = False) -> tuple[str, str] | None:
        """Return code and text of the 403 for a request that its browser must not send; None: it is served.

        ``page``: the path is one of a page, to which pages elsewhere may link.

        (1) A request without a browser's marks is served. (2) The Host must be one of this port. (3) An Origin must be
        this port's own or configured. (4) Without one, a page elsewhere may only link to a page here.
        """
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        reads = method in ("GET", "HEAD")
        browser = origin is not None or site is not None
        if not browser and not (reads and headers.get("user-agent", "").startswith("Mozilla/")):
            return None  # (1)
        host = headers.get("host", "").lower()
        if not self._ours(host):
            text = f"a browser may not use this port as {host[:200]!r}: use its IP address, or add the origin of this"
            return "wrong_host", f"{text} name, such as http://{host[:200]}, to {SETTING}"  # (2)
        if origin is not None:
            asked = origin.lower()
            if asked in self._origins or asked.partition("://")[2] == host:
                return None
            return "wrong_origin", f"a page of {origin[:200]!r} may not send this; allow it with {SETTING}"  # (3)
        links = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
        if site in (None, "none", "same-origin") or (page and reads and links):
            return None
        return "wrong_origin", f"a page elsewhere ({site}) may not send this; allow its origin with {SETTING}"  # (4)

    def answer_headers(self, headers: Mapping[str, str]) -> dict[str, str]:
        """Return the headers by which a page of a configured origin may read an answer; none for others."""
        origin = headers.get("origin")
        if origin is None or origin.lower() not in self._origins:
            return {}
        return {
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Expose-Headers": "*",
            "Vary": "Origin",
        }

    def preflight(self, method: str, headers: Mapping[str, str]) -> dict[str, str] | None:
        """Return the headers of the 204 for a browser's question whether a configured page may send a request."""
        asked = headers.get("access-control-request-headers", "")
        if method != "OPTIONS" or "access-control-request-method" not in headers or not self.answer_headers(headers):
            return None
        return {
            "Access-Control-Allow-Origin": headers["origin"],
            "Access-Control-Allow-Methods": "GET, POST, DELETE",
            **({"Access-Control-Allow-Headers": asked} if _NAMES.fullmatch(asked) else {}),
            "Access-Control-Max-Age": "600",
            "Vary": "Origin",
        }

    def _ours(self, host: str) -> bool:
        name = host[: host.find("]") + 1] if host.startswith("[") else host.partition(":")[0]
        if name in self._names or name.endswith(".localhost"):
            return True
        try:
            ip_address(name.strip("[]"))
        except ValueError:
            return False
        return True
