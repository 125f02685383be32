"""Fetches images of http and https URLs, from hosts that the operator allows.

A client chooses the URLs. So the router connects to the address that it has checked, not to what a
second look-up of the name returns, and checks each redirect like a URL.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from ssl import SSLContext

import httpx

from baton.core.errors import InvalidRequest
from baton.router.fair_slots import FairSlots
from baton.router.pictures.image_hosts import PORTS, ImageHosts, usable_addresses
from baton.router.pictures.plan import ImageFile
from baton.rpc.errors import UnsupportedInput

NUM_REQUESTS = 16  # whose images are fetched at a time
MAX_WAITING = 64
SHOWN_CHARACTERS = 100  # of a host or a cause, in errors
SEND_BYTES = "send the image itself, in base64"
HEADERS = {"accept": "image/*", "accept-encoding": "identity", "user-agent": "baton"}


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """Limits of each image."""

    time_s: float = 5.0  # with all redirects
    max_bytes: int = 20 << 20
    max_redirects: int = 3
    num_at_a_time: int = 4  # of a request


DEFAULT_LIMITS = FetchLimits()


async def resolve_host(host: str, port: int) -> list[str]:
    """Return the addresses of a host, the preferred one first. Raises OSError and UnicodeError."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in found))


class ImageFetcher:
    """Implements `ImageSource`."""

    def __init__(
        self,
        hosts: ImageHosts,
        limits: FetchLimits = DEFAULT_LIMITS,
        tls: SSLContext | None = None,
        resolve: Callable[[str, int], Awaitable[list[str]]] = resolve_host,
    ) -> None:
        """`tls`: instead of one that trusts the usual authorities."""
        self.hosts = hosts
        self.limits = limits
        self.resolve = resolve
        self._tls = tls or httpx.create_ssl_context()
        self._slots = FairSlots(
            NUM_REQUESTS,
            MAX_WAITING,
            max_per_client=NUM_REQUESTS // 2,
            what="requests with URLs of images",
        )

    async def fetch(
        self, images: Sequence[ImageFile], client: str, hold: Callable[[int], None]
    ) -> list[ImageFile]:
        own = httpx.AsyncClient(
            verify=self._tls,
            # Proxies and passwords of the environment are for the router, not for clients' URLs.
            trust_env=False,
            timeout=None,  # one for all parts of an image
            # A connection is that of an address, and can be with another host's certificate.
            limits=httpx.Limits(max_keepalive_connections=0),
        )
        async with self._slots.slot(client), own as http:
            turns = asyncio.Semaphore(self.limits.num_at_a_time)
            tasks = [
                asyncio.ensure_future(_Fetch(image, self, http, hold).run(turns))
                for image in images
            ]
            try:
                return await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)


class _Fetch:
    """Fetches one image."""

    def __init__(
        self,
        image: ImageFile,
        fetcher: ImageFetcher,
        http: httpx.AsyncClient,
        hold: Callable[[int], None],
    ) -> None:
        self._image = image
        self._hosts, self._limits = fetcher.hosts, fetcher.limits
        self._resolve = fetcher.resolve
        self._http = http
        self._hold = hold

    async def run(self, turns: asyncio.Semaphore) -> ImageFile:
        async with turns:
            try:
                async with asyncio.timeout(self._limits.time_s):
                    return replace(self._image, data=await self._follow())
            except TimeoutError:
                raise self._invalid(f"did not arrive within {self._limits.time_s:g} s") from None
            except (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError) as error:
                cause = str(error)[:SHOWN_CHARACTERS] or type(error).__name__
                raise self._invalid(f"cannot be fetched: {cause}") from error

    async def _follow(self) -> bytes:
        url = httpx.URL(self._image.url)
        for _ in range(1 + self._limits.max_redirects):
            response = await self._open(url)
            try:
                if not response.has_redirect_location:
                    return await self._content(response)
                target = url.join(response.headers["location"])
            finally:
                await response.aclose()
            if url.scheme == "https" != target.scheme:
                raise self._invalid("is redirected from https to another scheme")
            url = target
        raise self._invalid(f"is redirected more than {self._limits.max_redirects} times")

    async def _open(self, url: httpx.URL) -> httpx.Response:
        host = url.raw_host.decode("ascii").lower()
        addresses = await self._addresses(url, host)
        for address in addresses:
            request = self._http.build_request(
                "GET",
                url.copy_with(host=address),
                headers={**HEADERS, "host": url.netloc.decode("ascii")},
                extensions={"sni_hostname": host},  # the name that the certificate must have
            )
            try:
                return await self._http.send(request, stream=True)
            except httpx.ConnectError:
                if address == addresses[-1]:
                    raise
        raise self._invalid(f"cannot be fetched: {host[:SHOWN_CHARACTERS]!r} has no address")

    async def _addresses(self, url: httpx.URL, host: str) -> list[str]:
        """Return the addresses of a host to which the router may connect."""
        shown = host[:SHOWN_CHARACTERS]
        if url.scheme not in PORTS or url.userinfo:
            raise self._invalid("has a URL that is not http:// or https://, or has a password")
        entries = self._hosts.find(url.scheme, host, url.port)
        if not entries:
            raise self._refused(f"images are not fetched from {_shown(url, shown)}")
        addresses = await self._resolve(host, url.port or PORTS[url.scheme])
        usable = usable_addresses(addresses, entries)
        if addresses and not usable:
            raise self._refused(f"{shown!r} has a private address", "private-image-hosts")
        return usable

    async def _content(self, response: httpx.Response) -> bytes:
        most, data = self._limits.max_bytes, bytearray()
        if response.status_code != httpx.codes.OK:
            raise self._invalid(f"cannot be fetched: the status is {response.status_code}")
        length = response.headers.get("content-length", "")
        if length.isdecimal() and int(length) > most:
            raise self._invalid(f"has {length} bytes; it may have {most}")
        async for piece in response.aiter_raw():
            data += piece
            if len(data) > most:
                raise self._invalid(f"has more than {most} bytes")
            self._hold(len(piece))
        return bytes(data)

    def _invalid(self, problem: str) -> InvalidRequest:
        where = self._image.where
        return InvalidRequest(f"{where}: the image {problem}; {SEND_BYTES}", where)

    def _refused(self, cause: str, option: str = "--image-hosts") -> UnsupportedInput:
        where = self._image.where
        return UnsupportedInput(
            f"{where}: {cause}: {SEND_BYTES}, or name the host in {option} of the router", where
        )


def _shown(url: httpx.URL, host: str) -> str:
    return repr(host if url.port is None else f"{host}:{url.port}")
