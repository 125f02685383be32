"""Images are fetched from allowed hosts alone, within limits, from the address that was checked."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from baton.core.errors import InvalidRequest, NamedError
from baton.router.pictures.fetching import NUM_REQUESTS, FetchLimits, ImageFetcher
from baton.router.pictures.image_hosts import ImageHosts, parser_of
from baton.router.pictures.plan import ImageFile
from baton.rpc.errors import QueueFull, UnsupportedInput
from tests.support.certificates import make_authority
from tests.support.image_server import ImageServer, an_image_server

PATIENCE_S = 30
FOX, OWL = b"the bytes of a fox", b"the bytes of an owl"
LIMITS = FetchLimits(max_bytes=1 << 20)
WHERE = "messages.0.content.0.image_url.url"
HOST = "images.test"


@pytest.fixture
def server() -> Iterator[ImageServer]:
    with an_image_server({"fox": FOX, "owl": OWL}) as running:
        yield running


def hosts_of(public: str = "", private: str = "") -> ImageHosts:
    return ImageHosts(
        parser_of("--image-hosts", are_private=False)(public),
        parser_of("private-image-hosts", are_private=True)(private),
    )


def fetched(
    hosts: ImageHosts,
    *urls: str,
    limits: FetchLimits = LIMITS,
    names: Mapping[str, list[list[str]]] | None = None,
    tls: ssl.SSLContext | None = None,
    held: list[int] | None = None,
) -> list[bytes]:
    """Fetch images. `names` are the addresses of each host, which each look-up of it takes."""

    async def resolve(host: str, port: int) -> list[str]:
        return (names or {}).get(host, [[host]]).pop(0)

    async def run() -> list[bytes]:
        fetcher = ImageFetcher(hosts, limits, tls, resolve)
        images = [ImageFile(b"", WHERE, url=url) for url in urls]
        hold = ([] if held is None else held).append
        async with asyncio.timeout(PATIENCE_S):
            return [image.data for image in await fetcher.fetch(images, "", hold)]

    return asyncio.run(run())


def allowed(server: ImageServer) -> ImageHosts:
    return hosts_of(f"127.0.0.1:{server.port}")


def test_images_come_in_the_order_of_their_urls_and_are_counted(server: ImageServer) -> None:
    held = list[int]()
    urls = [server.url("fox"), server.url("owl"), server.url(f"redirect?{server.url('fox')}")]

    assert fetched(allowed(server), *urls, held=held) == [FOX, OWL, FOX]
    assert sum(held) == 2 * len(FOX) + len(OWL)


def test_a_name_is_looked_up_once_and_the_next_of_its_addresses_is_tried(
    server: ImageServer,
) -> None:
    names = {HOST: [["127.0.0.9", "127.0.0.1"]]}  # nothing listens on the first one

    assert fetched(
        hosts_of(private=f"{HOST}:{server.port}"), server.url("fox", HOST), names=names
    ) == [FOX]
    assert server.seen == [(f"{HOST}:{server.port}", "/fox")]


@pytest.mark.parametrize(
    ("path", "cause"),
    [
        ("missing", "the status is 404"),
        ("loop", "redirected more than 3 times"),
        ("announced?1048577", "has 1048577 bytes; it may have 1048576"),
        ("announced?9", "cannot be fetched: peer closed connection"),
        ("endless", "has more than 1048576 bytes"),
    ],
)
def test_what_cannot_be_fetched_is_refused_by_name(
    path: str, cause: str, server: ImageServer
) -> None:
    with pytest.raises(InvalidRequest, match=f"{WHERE}: the image .*{cause}.*in base64") as error:
        fetched(allowed(server), server.url("fox"), server.url(path))
    assert error.value.field == WHERE


def test_a_slow_image_is_refused(server: ImageServer) -> None:
    with pytest.raises(InvalidRequest, match=r"did not arrive within 0\.1 s"):
        fetched(allowed(server), server.url("slowly"), limits=FetchLimits(time_s=0.1))


@pytest.mark.parametrize(
    "target",
    [
        "http://localhost:{port}/owl",
        "http://127.0.0.1/owl",
        "http://user:secret@127.0.0.1:{port}/owl",
        "//[::1]:{port}/owl",
        "file:///etc/passwd",
        "data:image/png;base64,AAAA",
    ],
)
def test_a_redirect_to_what_is_not_allowed_is_refused(target: str, server: ImageServer) -> None:
    url = server.url(f"redirect?{target.format(port=server.port)}")

    with pytest.raises(NamedError):
        fetched(allowed(server), url)
    assert [path for _, path in server.seen if path.endswith("/owl") and "?" not in path] == []


@pytest.mark.parametrize(
    "addresses", ["127.0.0.1", "10.1.2.3", "169.254.169.254", "::1", "fe80::1", "::ffff:127.0.0.1"]
)
def test_a_name_with_a_private_address_is_refused_unless_it_may_have_one(
    addresses: str, server: ImageServer
) -> None:
    url = server.url("fox", HOST)

    with pytest.raises(UnsupportedInput, match=r"has a private address.*private-image-hosts"):
        fetched(hosts_of(f"{HOST}:{server.port}"), url, names={HOST: [[addresses]]})
    assert server.seen == []


def test_bytes_for_which_there_is_no_room_end_the_request(server: ImageServer) -> None:
    def hold(num_bytes: int) -> None:
        raise QueueFull("no room", 1.0)

    async def run() -> None:
        images = [ImageFile(b"", WHERE, url=server.url("fox"))]
        await ImageFetcher(allowed(server), LIMITS).fetch(images, "", hold)

    with pytest.raises(QueueFull, match="no room"):
        asyncio.run(asyncio.wait_for(run(), PATIENCE_S))


def test_the_certificate_must_be_that_of_the_name(tmp_path: Path) -> None:
    authority = make_authority(tmp_path)
    trusting = ssl.create_default_context(cafile=str(authority.ca))

    def get(subject: str, tls: ssl.SSLContext | None) -> list[bytes]:
        certificate = authority.issue(subject, subject)
        with an_image_server({"fox": FOX}, certificate) as server:
            hosts = hosts_of(private=f"{HOST}:{server.port}")
            names = {HOST: [["127.0.0.1"]]}
            return fetched(hosts, server.url("fox", HOST), names=names, tls=tls)

    assert get(HOST, trusting) == [FOX]
    for subject, tls in (("other.test", trusting), (HOST, None)):
        with pytest.raises(InvalidRequest, match="CERTIFICATE_VERIFY_FAILED"):
            get(subject, tls)


def test_clients_take_turns(server: ImageServer) -> None:
    async def run() -> None:
        fetcher = ImageFetcher(allowed(server), FetchLimits(time_s=PATIENCE_S))

        async def request(client: str, path: str) -> None:
            image = ImageFile(b"", WHERE, url=server.url(path))
            await fetcher.fetch([image], client, lambda _: None)

        slow = [asyncio.ensure_future(request("a", "slowly")) for _ in range(NUM_REQUESTS)]
        for _ in range(NUM_REQUESTS // 2):
            await asyncio.to_thread(server.arrived.acquire)
        await request("b", "fox")  # not behind those of the first client
        for task in slow:
            task.cancel()
        await asyncio.wait(slow)

    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))
