"""Images in chats, responses and messages against a real cluster."""

from __future__ import annotations

import asyncio
import base64
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("PIL", reason="baton[images] is not installed")

from PIL import Image

from baton.checkpoint.safetensors_folder import SafetensorsFolder
from baton.client import BatonError, Client, Generation
from baton.cluster import ClusterOptions, LocalCluster
from baton.core.errors import InvalidRequest
from baton.core.ids import PrefixKeys, RequestId
from baton.core.request import EngineRequest
from baton.core.sampling import SamplingParams
from baton.llm import LLM
from baton.node.kv.events.messages import HashFormat
from baton.router.documents.reader import PdfLimits, read_pdfs
from baton.router.input_processing.tokenization import ModelText
from baton.router.part_readers import FileReading
from baton.router.pictures.families.table import read_format
from baton.router.pictures.plan import ImageFile
from baton.router.pictures.reader import PictureReader
from baton.router.values import ChatMessage, ChatPrompt, TokenPrompt
from tests.support.baton_command import BATON
from tests.support.collector import Collector, collecting
from tests.support.image_files import file_of, random_image
from tests.support.image_server import ImageServer, an_image_server
from tests.support.langchain_clients import LANGCHAIN
from tests.support.nodes import card_at, kill_the_writer, load_at, prefixes_at
from tests.support.pdf_files import SHOW_IMAGE, pdf_of
from tests.support.suspended_processes import suspended
from tests.support.vision import generated_with_pictures, make_chat_folder
from tests.support.waits import await_value

anthropic = pytest.importorskip("anthropic", reason="anthropic is not installed")
openai = pytest.importorskip("openai", reason="openai is not installed")

NUM_TOKENS = 8
PATIENCE_MS = 30_000
# Not at its end before something happens to it.
LONG = SamplingParams(max_tokens=380, temperature=0, ignore_eos=True)
AS_BATON: dict[str, Any] = {"ignore_eos": True}
TEXT_PART = {"type": "text", "text": "who?"}
FOX, OWL, HEN = (file_of(random_image(150, 90, seed=seed)) for seed in (1, 2, 3))
ABOUT_FOX: Any = [{"role": "user", "content": "who?", "images": [FOX]}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_folder(tmp_path_factory.mktemp("models") / "eyes")


def options_for(folder: Path, *arguments: str, num_decode: int = 1) -> ClusterOptions:
    return ClusterOptions(
        str(folder),
        num_decode=num_decode,
        node_arguments=("--kv-cache-memory", "8MiB", "--threads", "1", *arguments),
        router_arguments=("--http-port", "0"),
    )


def connected_to(cluster: LocalCluster) -> Any:
    url = f"http://{cluster.router.http_address}/v1"
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def pictures() -> Iterator[ImageServer]:
    """Serve images at an address that the cluster's router is allowed to fetch from."""
    with an_image_server({"fox": FOX, "hen": HEN, "text": b"no image"}) as server:
        yield server


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the endpoint of KV events, whose address ends with a node's id."""
    return f"ipc://{tmp_path_factory.mktemp('events')}/"


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as running:
        yield running


@pytest.fixture(scope="module")
def cluster(
    folder: Path, pictures: ImageServer, events: str, collector: Collector
) -> Iterator[LocalCluster]:
    otlp = ("--otlp-endpoint", collector.address)
    options = options_for(
        folder,
        *otlp,
        *("--kv-events-endpoint", f"{events}{{node_id}}"),
        *("--kv-events-replay-endpoint", f"{events}{{node_id}}-replay"),
    )
    hosts = f"127.0.0.1:{pictures.port},localhost:{pictures.port}"
    arguments = (*options.router_arguments, *otlp, "--image-hosts", hosts)
    with LocalCluster(replace(options, router_arguments=arguments)) as running:
        yield running
    assert {child.process.returncode for child in running.children} == {0}


@pytest.fixture
def chats(cluster: LocalCluster) -> Iterator[Any]:
    with connected_to(cluster) as connected:
        yield connected


def data_url(image: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(image).decode()}"


def source(image: bytes) -> dict[str, str]:
    data = base64.b64encode(image).decode()
    return {"type": "base64", "media_type": "image/png", "data": data}


def asked(*parts: bytes | str) -> list[Any]:
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": data_url(part)}}
        for part in parts
    ]
    return [{"role": "user", "content": content}]


def expected(folder: Path, parts: Sequence[bytes | str]) -> str:
    """Return the answer of transformers to a message of these parts."""
    return expected_after(folder, [("user", parts)])


def expected_after(folder: Path, messages: Sequence[tuple[str, Sequence[bytes | str]]]) -> str:
    """Return the answer of transformers to the prompt that the router makes."""
    text, prompt = prompt_of(folder, messages)
    sampling = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    ids, media, pictures = prompt.token_ids, prompt.media, prompt.pictures
    request = EngineRequest(RequestId("r"), ids, sampling, 0, media=media, pictures=pictures)
    return text.text(tuple(generated_with_pictures(folder, request)))


def prompt_of(
    folder: Path, messages: Sequence[tuple[str, Sequence[bytes | str]]]
) -> tuple[ModelText, TokenPrompt]:
    checkpoint = SafetensorsFolder(folder)
    images_as = read_format(checkpoint)
    assert images_as is not None
    said = [
        ChatMessage(
            role,
            tuple(part if isinstance(part, str) else ImageFile(part, "image") for part in parts),
        )
        for role, parts in messages
    ]
    chat = ChatPrompt(tuple(said))
    read = asyncio.run(PictureReader().read(chat.parts(ImageFile), FileReading(images_as)))
    text = ModelText(checkpoint.load_tokenizer(), images_as)
    return text, text.tokenize(chat.replaced(ImageFile, read))


def answer_of(chats: Any, *parts: bytes | str) -> Any:
    return chats.chat.completions.create(
        model="",
        messages=asked(*parts),
        max_tokens=NUM_TOKENS,
        temperature=0,
        extra_body=AS_BATON,
    )


@pytest.mark.parametrize(
    "parts", [(FOX, "who?"), ("who?", OWL), (FOX, "or", OWL), (OWL, FOX), (FOX, FOX), (OWL, "who?")]
)
def test_answers_are_those_of_transformers(
    parts: tuple[bytes | str, ...], chats: Any, folder: Path
) -> None:
    first, again = answer_of(chats, *parts), answer_of(chats, *parts)

    assert first.choices[0].message.content == expected(folder, parts)
    assert again.choices[0].message.content == first.choices[0].message.content
    assert again.usage.prompt_tokens_details.cached_tokens > 0


def test_all_apis_take_the_same_image(chats: Any, cluster: LocalCluster) -> None:
    chat = answer_of(chats, FOX, "who?").choices[0].message.content
    parts: Any = [
        {"type": "input_image", "image_url": data_url(FOX)},
        {"type": "input_text", "text": "who?"},
    ]
    response = chats.responses.create(
        model="",
        input=[{"role": "user", "content": parts}],
        max_output_tokens=NUM_TOKENS,
        temperature=0,
        extra_body=AS_BATON,
    )
    content: Any = [{"type": "image", "source": source(FOX)}, {"type": "text", "text": "who?"}]
    url = f"http://{cluster.router.http_address}"
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as messages:
        body = {"model": "eyes", "messages": [{"role": "user", "content": content}]}
        options = {"max_tokens": NUM_TOKENS, "extra_body": {**AS_BATON, "temperature": 0}}
        message = messages.messages.create(**body, **options)
        counted = messages.messages.count_tokens(**body).input_tokens
        with messages.messages.stream(**body, **options) as stream:
            streamed = stream.get_final_message()

    assert response.output_text == message.content[0].text == streamed.content[0].text == chat
    used = message.usage
    assert counted == used.input_tokens + used.cache_read_input_tokens


def test_all_apis_take_the_url_of_an_image(
    chats: Any, cluster: LocalCluster, pictures: ImageServer, folder: Path
) -> None:
    url = pictures.url(f"redirect?{pictures.url('fox')}")
    greedy: Any = {"model": "", "temperature": 0, "extra_body": AS_BATON}
    content: Any = [{"type": "image_url", "image_url": {"url": url}}, TEXT_PART]
    chat = chats.chat.completions.create(
        messages=[{"role": "user", "content": content}], max_tokens=NUM_TOKENS, **greedy
    )
    parts: Any = [
        {"type": "input_image", "image_url": url},
        {"type": "input_text", "text": "who?"},
    ]
    items: Any = [{"role": "user", "content": parts}]
    response = chats.responses.create(input=items, max_output_tokens=NUM_TOKENS, **greedy)
    blocks = [{"type": "image", "source": {"type": "url", "url": url}}, TEXT_PART]
    body = {
        "model": "",
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        **AS_BATON,
        "messages": [{"role": "user", "content": blocks}],
    }
    router = f"http://{cluster.router.http_address}"
    message = httpx.post(f"{router}/v1/messages", json=body, timeout=60).json()

    seen = expected(folder, (FOX, "who?"))
    assert chat.choices[0].message.content == response.output_text == seen
    assert message["content"] == [{"type": "text", "text": seen}]


@pytest.mark.parametrize(
    ("path", "host", "cause"),
    [
        ("fox", "0.0.0.0", "not fetched from '0.0.0.0:.*--image-hosts"),
        ("fox", "localhost", "'localhost' has a private address"),
        ("missing", "127.0.0.1", "status is 404"),
        ("text", "127.0.0.1", "no PNG, JPEG, WebP or GIF"),
    ],
)
def test_urls_of_no_images_and_of_other_hosts_are_refused_by_name(
    path: str, host: str, cause: str, chats: Any, pictures: ImageServer
) -> None:
    content: Any = [{"type": "image_url", "image_url": {"url": pictures.url(path, host)}}]

    with pytest.raises(openai.BadRequestError, match=cause) as refused:
        chats.chat.completions.create(model="", messages=[{"role": "user", "content": content}])
    assert refused.value.param == "messages.0.content.0.image_url.url"


def test_an_image_that_was_sent_before_is_found_by_its_uuid(chats: Any, folder: Path) -> None:
    def answer(url: str | None, uuid: str) -> Any:
        image = {"type": "image_url", "image_url": url and {"url": url}, "uuid": uuid}
        content: Any = [image, TEXT_PART]
        return chats.chat.completions.create(
            model="",
            messages=[{"role": "user", "content": content}],
            max_tokens=NUM_TOKENS,
            temperature=0,
            extra_body=AS_BATON,
        )

    answer(data_url(FOX), "pet")
    again = answer(None, "pet")

    assert again.choices[0].message.content == expected(folder, (FOX, "who?"))
    with pytest.raises(openai.BadRequestError, match="no image with this uuid") as refused:
        answer(None, "other")
    assert refused.value.param == "messages.0.content.0.uuid"


def test_screenshots_in_results_of_tools_are_seen(
    chats: Any, cluster: LocalCluster, folder: Path
) -> None:
    function = {"name": "look", "arguments": "{}"}
    called: Any = {"id": "a", "type": "function", "function": function}
    chat: Any = [
        {"role": "user", "content": "who?"},
        {"role": "assistant", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "a", "content": asked("It is", FOX)[0]["content"]},
    ]
    greedy: Any = {"model": "", "temperature": 0, "extra_body": AS_BATON}
    answer = chats.chat.completions.create(messages=chat, max_tokens=NUM_TOKENS, **greedy)
    parts: Any = [
        {"type": "input_text", "text": "It is"},
        {"type": "input_image", "image_url": data_url(FOX)},
    ]
    items: Any = [
        {"role": "user", "content": "who?"},
        {"type": "function_call", "call_id": "a", **function},
        {"type": "function_call_output", "call_id": "a", "output": parts},
    ]
    response = chats.responses.create(input=items, max_output_tokens=NUM_TOKENS, **greedy)
    blocks: Any = [{"type": "text", "text": "It is"}, {"type": "image", "source": source(FOX)}]
    result: Any = {"type": "tool_result", "tool_use_id": "a", "content": blocks}
    use: Any = {"type": "tool_use", "id": "a", "name": "look", "input": {}}
    turns: Any = [
        {"role": "user", "content": "who?"},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    url = f"http://{cluster.router.http_address}"
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as messages:
        body = {"model": "", "messages": turns, "max_tokens": NUM_TOKENS}
        message = messages.messages.create(**body, extra_body={**AS_BATON, "temperature": 0})

    seen = expected_after(
        folder, [("user", ["who?"]), ("assistant", [""]), ("tool", ["It is", FOX])]
    )
    assert answer.choices[0].message.content == seen
    assert response.output_text == message.content[0].text == seen


# Of the client and its libraries.
@pytest.mark.filterwarnings("ignore::Warning")
@pytest.mark.parametrize("connect", LANGCHAIN)
def test_langchain_sends_images(
    connect: Callable[..., Any], cluster: LocalCluster, folder: Path
) -> None:
    messages = pytest.importorskip("langchain_core.messages")
    url = f"http://{cluster.router.http_address}"
    model = connect(url, model="eyes", max_tokens=NUM_TOKENS, extra_body=AS_BATON)
    image = {"type": "image", "base64": base64.b64encode(FOX).decode(), "mime_type": "image/png"}

    answer = model.invoke([messages.HumanMessage([image, {"type": "text", "text": "who?"}])])

    assert answer.text == expected(folder, (FOX, "who?"))


@pytest.mark.filterwarnings("ignore::Warning")
@pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "anthropic"])
def test_litellm_sends_images(
    provider: str, cluster: LocalCluster, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # instead of a download
    litellm = pytest.importorskip("litellm")
    url = f"http://{cluster.router.http_address}"
    own = AS_BATON if provider == "anthropic" else {"extra_body": AS_BATON}

    answer = litellm.completion(
        model=f"{provider}/eyes",
        api_base=url if provider == "anthropic" else f"{url}/v1",
        api_key="none",
        num_retries=0,
        messages=asked(FOX, "who?"),
        max_tokens=NUM_TOKENS,
        temperature=0,
        **own,
    )

    assert answer.choices[0].message.content == expected(folder, (FOX, "who?"))
    litellm.in_memory_llm_clients_cache.flush_cache()


def test_pages_of_a_scan_are_images(chats: Any, folder: Path) -> None:
    pytest.importorskip("pypdfium2", reason="baton[documents] is not installed")
    scan = pdf_of(SHOW_IMAGE)
    [read] = asyncio.run(read_pdfs([scan], PdfLimits()))
    data = f"data:application/pdf;base64,{base64.b64encode(scan).decode()}"
    file = {"type": "file", "file": {"filename": "scan.pdf", "file_data": data}}

    answer = chats.chat.completions.create(
        model="",
        messages=[{"role": "user", "content": [file, {"type": "text", "text": "who?"}]}],
        max_tokens=NUM_TOKENS,
        temperature=0,
        extra_body=AS_BATON,
    )

    parts: list[bytes | str] = ["File scan.pdf:\n\n", *read.pages, "who?"]
    assert answer.choices[0].message.content == expected(folder, parts)


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        ([{"type": "image_url", "image_url": {"url": "file:///fox.png"}}], "is not a URL of data:"),
        ([{"type": "image_url", "image_url": {"url": data_url(FOX[:300])}}], "content.0"),
        ([*asked(FOX)[0]["content"], {"type": "text", "text": "an <image>"}], "leave it out"),
    ],
)
def test_what_cannot_be_seen_is_refused_by_name(content: Any, cause: str, chats: Any) -> None:
    with pytest.raises(openai.BadRequestError, match=cause):
        chats.chat.completions.create(model="", messages=[{"role": "user", "content": content}])


def test_an_answer_about_an_image_goes_on_when_its_decode_node_is_killed(folder: Path) -> None:
    with (
        LocalCluster(options_for(folder, num_decode=2)) as cluster,
        Client(cluster.address, timeout_s=60) as client,
    ):
        whole = client.generate(ABOUT_FOX, Generation(LONG))
        with suspended(*cluster.decodes):  # or the answer may be whole before one is killed
            stream = client.stream(ABOUT_FOX, Generation(LONG))
            chunks = [next(stream)]  # of the prefill node
            kill_the_writer(cluster)
        chunks += stream

    assert "".join(chunk.text for chunk in chunks) == whole.text
    finish = chunks[-1].finish
    assert finish is not None
    assert finish.served.attempts == 2


def test_an_answer_about_an_image_goes_on_when_its_decode_node_loses_the_kv(
    cluster: LocalCluster,
) -> None:
    url, [prefill] = f"http://{cluster.router.http_address}/reset_prefix_cache", cluster.prefills
    with Client(cluster.address, timeout_s=60) as client, ThreadPoolExecutor(1) as thread:
        whole = client.generate(ABOUT_FOX, Generation(LONG))
        stream = client.stream(ABOUT_FOX, Generation(LONG))
        chunks = [next(stream), next(stream)]
        with suspended(*cluster.decodes):  # or the answer may be whole before that
            reset = thread.submit(httpx.post, url, json={"reset_running": True}, timeout=60)
            await_value(lambda: not prefixes_at(prefill.address), what="an empty prefix cache")
        reset.result().raise_for_status()
        chunks += stream

    assert "".join(chunk.text for chunk in chunks) == whole.text
    finish = chunks[-1].finish
    assert finish is not None
    assert finish.served.attempts == 2


def test_images_are_in_traces_and_in_the_report_of_the_node_that_encodes_them(
    cluster: LocalCluster, chats: Any, collector: Collector, pictures: ImageServer
) -> None:
    def spans_of(trace: int, *parts: str) -> dict[str, Any]:
        """Return the attributes of the spans of a chat about the hen by their names."""
        image = {"type": "image_url", "image_url": {"url": pictures.url("hen")}}
        content: Any = [*({"type": "text", "text": part} for part in parts), image, TEXT_PART]
        chats.chat.completions.create(
            model="",
            messages=[{"role": "user", "content": content}],
            max_tokens=NUM_TOKENS,
            extra_headers={"traceparent": f"00-{trace:032x}-{1:016x}-01"},
        )
        whole = {"generate", "prefill_compute"}
        spans = collector.trace(f"{trace:032x}", lambda found: {e.name for e in found} >= whole)
        return {span.name: span.attributes for span in spans}

    first, again = spans_of(0xA), spans_of(0xB, "now")

    num_pictures = first["prepare_images"]["baton.pictures"]
    assert num_pictures > 1  # a tile is a picture
    fetched = first["fetch_images"]
    assert (fetched["baton.images"], fetched["baton.images.bytes"]) == (1, len(HEN))
    assert first["prepare_images"]["baton.images.cached"] == 0
    assert first["encode_pictures"]["baton.pictures"] == num_pictures
    assert first["prefill_compute"]["baton.pictures.cached"] == 0
    num_rows = first["encode_pictures"]["baton.pictures.rows"]
    assert num_rows > num_pictures
    assert again["prepare_images"]["baton.images.cached"] == 1
    assert "encode_pictures" not in again
    assert again["prefill_compute"]["baton.pictures.cached"] == num_pictures
    totals = load_at(cluster.prefills[0].address).totals
    assert num_rows <= totals.num_encoder_rows <= totals.max_encoder_rows == 16384


def test_kv_events_name_the_pictures_of_blocks(
    cluster: LocalCluster, chats: Any, folder: Path, events: str
) -> None:
    follower = pytest.importorskip("tools.follow_kv_events", reason="baton[vllm] is not installed")
    parts = (OWL, "and", FOX, "or", OWL)
    answer_of(chats, *parts)
    _, prompt = prompt_of(folder, [("user", parts)])
    begins = {(each.digest.hex(), each.start) for each in prompt.media}
    keys = PrefixKeys(media=prompt.media)

    for node in (*cluster.prefills, *cluster.decodes):
        naming = card_at(node.address).prefix_naming
        assert naming is not None
        named = naming.names(prompt.token_ids, len(prompt.token_ids), keys)
        endpoint, found = f"{events}{node.name}", set()
        with follower.KvEventFollower(endpoint, f"{endpoint}-replay") as following:
            following.catch_up()
            while HashFormat.INT.encode(named[-1]) not in following.view.blocks:
                assert following.receive(PATIENCE_MS), "the last block was not published"
            blocks = following.view.blocks
        for number, name in enumerate(named):
            start, block = number * naming.block_size, blocks[HashFormat.INT.encode(name)]
            assert block.token_ids == prompt.token_ids[start : start + naming.block_size]
            for kind, digest, offset in block.extra_keys or ():
                assert kind == "mm"
                found.add((digest, start + offset))
        assert found == begins


def test_an_image_over_grpc_and_in_a_terminal_gives_the_same_answer(
    cluster: LocalCluster, chats: Any, tmp_path: Path
) -> None:
    whole = answer_of(chats, FOX, "who?").choices[0].message.content
    greedy = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    messages = [{"role": "user", "content": "who?", "images": [FOX]}]
    with Client(cluster.address) as client:
        answer = client.generate(messages, Generation(greedy))
        assert answer.finish is not None
        assert len(client.tokenize(messages)) == answer.finish.num_prompt_tokens
        with pytest.raises(BatonError, match=r"chat\.messages\.0\.images\.0"):
            client.generate([{**messages[0], "images": [FOX[:300]]}])
    (tmp_path / "fox.png").write_bytes(FOX)
    lines = f"/image {tmp_path / 'none.png'}\n/image {tmp_path / 'fox.png'}\nwho?\n"
    options = ("--temperature", "0", "--max-tokens", str(NUM_TOKENS), "--ignore-eos")
    talk = subprocess.run(
        [*BATON, "chat", "--address", cluster.address, *options],
        input=lines,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )

    assert answer.text == whole
    assert "No such file" in talk.stderr
    assert talk.stdout.strip() == whole.strip()


def test_an_engine_in_this_process_takes_images_in_any_form(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "fox.png").write_bytes(FOX)
    prompt = "user: <image>who?assistant: "  # as the chat template renders it
    forms: list[Any] = [
        FOX,
        tmp_path / "fox.png",
        str(tmp_path / "fox.png"),
        Image.open(BytesIO(FOX)),
    ]
    greedy = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(str(folder), kv_cache_memory="8MiB", num_threads=1, show_progress=False) as llm:
        answers = llm.generate([prompt] * 4, greedy, images=[[form] for form in forms])
        with pytest.raises(InvalidRequest, match="prompt 0: messages contain '<image>'"):
            llm.generate(prompt + "<image>", greedy, images=[[FOX]])
        with pytest.raises(InvalidRequest, match=r"prompt 0: the image none\.png cannot"):
            llm.generate(prompt, greedy, images=[["none.png"]])

    assert {answer.text for answer in answers} == {expected(folder, (FOX, "who?"))}
