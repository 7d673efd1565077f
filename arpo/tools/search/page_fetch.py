"""Fetch a web page from an untrusted address: within limits, and never from the local network.

The IP address of every socket is checked before the socket connects, also after a redirect. Proxies of the environment
are not used: a proxy would resolve the host name without this check.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import re
import socket
import urllib.parse
from collections.abc import Callable

from aiohttp.resolver import ThreadedResolver
from yarl import URL

from arpo.tools.http.client import OwnsSession, read_body, split_url

MAX_REDIRECTS = 3
MAX_PAGE_BYTES = 5_000_000
"""Largest accepted page, decompressed."""
KINDS = {"text/html": "html", "application/xhtml+xml": "html", "application/pdf": "pdf", "text/plain": "plain"}
_HEADERS = {"User-Agent": "Mozilla/5.0 (compatible; arpo-torch)", "Accept": ", ".join(KINDS)}
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_RESERVED = [  # reserved by IANA or an old RFC, but public in (older versions of) Python's ipaddress
    ipaddress.ip_network(block)
    for block in (
        *("192.0.0.0/24", "192.31.196.0/24", "192.52.193.0/24", "192.88.99.0/24", "192.175.48.0/24"),
        *("64:ff9b:1::/48", "100::/64", "100:0:0:1::/64", "2001::/23", "2002::/16", "2620:4f:8000::/48", "3fff::/20"),
        *("5f00::/16", "fec0::/10"),
    )
]
_ENCODED = re.compile(r"(?:[\w.~:/?#\[\]@!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*", re.ASCII)
"""Matches an address without characters to encode. aiohttp would decode some of its %XX."""
_CLOUD_SERVICES = ("168.63.129.16", "192.0.0.192")  # metadata of Azure and Oracle, at public-looking addresses


class PageRefused(OSError):
    """The page may not or cannot be read. The message is the reason."""


def is_public(address: str) -> bool:
    """Return False for private, loopback, link-local, multicast, reserved and metadata addresses, also inside IPv6.

    Also False for the addresses of this machine's interfaces: no firewall protects the machine from itself.

    >>> is_public("93.184.215.14"), is_public("169.254.169.254"), is_public("::ffff:127.0.0.1")
    (True, False, False)
    """
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = [ip.ipv4_mapped, ip.sixtofour, *(ip.teredo or ())]
        if ip in _NAT64:
            inner.append(ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF))
        if any(v4 is not None and not is_public(str(v4)) for v4 in inner):
            return False
        if ip.ipv4_mapped or ip in _NAT64:
            return True
    if any(ip in block for block in _RESERVED) or str(ip) in _CLOUD_SERVICES:
        return False
    return ip.is_global and not (ip.is_private or ip.is_multicast or ip.is_reserved or _is_own(ip))


def _is_own(ip: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Return True if an interface of this machine has the address. Raises OSError if the test fails."""
    try:
        with socket.socket(socket.AF_INET6 if ip.version == 6 else socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.bind((str(ip), 0))
            return True
    except OSError as error:
        if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
            raise
        return False  # an address of another machine, or of a protocol without support here


class PageFetcher(OwnsSession):
    """Fetches pages, at most `max_concurrent` at a time, on one event loop."""

    def __init__(self, *, max_concurrent: int, may_connect: Callable[[str], bool] = is_public):
        """`may_connect(ip)` returns True if pages may come from this IP address."""
        self._may_connect = may_connect
        self._slots = asyncio.Semaphore(max_concurrent)

    async def fetch(self, url: str, *, deadline_s: float) -> tuple[bytes, str, str]:
        """Return the page, its kind (html, pdf or plain) and the charset in its header ("" = no charset).

        Follows at most MAX_REDIRECTS redirects. `deadline_s` begins when the fetch gets its turn. Raises PageRefused,
        TimeoutError, or an error of the connection (aiohttp.ClientError, OSError).
        """
        async with self._slots:
            try:
                async with asyncio.timeout(deadline_s):
                    for _ in range(MAX_REDIRECTS + 1):
                        answer = await self._get(url)
                        if not isinstance(answer, str):
                            return answer
                        url = urllib.parse.urljoin(url, answer)
                    raise PageRefused(f"more than {MAX_REDIRECTS} redirects")
            except TimeoutError:
                raise TimeoutError(f"no page within {deadline_s:g} s") from None
            except ValueError as error:  # aiohttp or the resolver cannot encode the address
                raise PageRefused(f"unusable address: {type(error).__name__}") from None

    async def _get(self, url: str) -> tuple[bytes, str, str] | str:
        """Send one request. Return the result of `fetch`, or the target of a redirect."""
        parts = split_url(url)
        if parts is None:
            raise PageRefused("not an http or https address")
        if parts.username is not None or parts.password is not None:
            raise PageRefused("an address with a user or password")
        session = self._open_session(
            resolver=ThreadedResolver(),
            socket_factory=self._checked_socket,
            use_dns_cache=False,
            force_close=True,  # each page is on another server
        )
        address = URL(url, encoded=bool(_ENCODED.fullmatch(url)))
        async with session.get(address, headers=_HEADERS, allow_redirects=False) as response:
            if response.status in (301, 302, 303, 307, 308) and "Location" in response.headers:
                return response.headers["Location"]
            if response.status != 200:
                raise PageRefused(f"HTTP {response.status}")
            kind = KINDS.get(response.content_type)
            if kind is None:
                raise PageRefused(f"not a page but {response.content_type[:40]}")
            body = await read_body(response, MAX_PAGE_BYTES)
            if body is None:
                raise PageRefused(f"longer than {MAX_PAGE_BYTES} bytes")
            return body, kind, response.charset or ""

    def _checked_socket(self, addr_info: tuple) -> socket.socket:
        """Make a socket. Raises PermissionError if connections to its address are not allowed."""
        family, kind, protocol, _, address = addr_info
        if not self._may_connect(address[0]):
            raise PermissionError(errno.EACCES, f"{address[0]} is not a public address")
        return socket.socket(family, kind, protocol)
