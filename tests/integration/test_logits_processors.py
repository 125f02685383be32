"""Logits processor of an installed package, and bad words, on a whole cluster."""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.client import BatonError, Client, Generation
from baton.cluster import ClusterFailed, ClusterOptions, LocalCluster
from baton.core.sampling import Argument, SamplingParams

MODEL = str(Path(__file__).resolve().parents[2] / "models" / "demo")
PROMPT = "import os\n\ndef main():\n"
FAVOURED = 77
SOURCE = """
class Favour:
    arguments = frozenset({"favour"})

    def __init__(self, model):
        self.vocab_size = model.vocab_size

    def check(self, given):
        if given["favour"] not in range(self.vocab_size):
            raise ValueError(f"{given['favour']} is no token")

    def apply(self, scores, tokens, num_prompt_tokens, given):
        scores[given["favour"]] += 1000.0
"""


def package(at: Path, version: str) -> Path:
    """Write the files of an installed package."""
    about = at / f"favourite-{version}.dist-info"
    about.mkdir(parents=True)
    (at / "favourite.py").write_text(SOURCE)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: favourite\nVersion: {version}\n")
    entry = "[baton.logits_processors]\nfavour = favourite:Favour\n"
    (about / "entry_points.txt").write_text(entry)
    return at


def installed(at: Path) -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join([str(at), *filter(None, [os.environ.get("PYTHONPATH")])])}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    options = ClusterOptions(
        MODEL,
        node_arguments=("--logits-processors", "favour"),
        router_arguments=("--http-port", "0"),
        environment=installed(package(tmp_path_factory.mktemp("site"), "1.0")),
    )
    with LocalCluster(options) as running:
        yield running


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[Client]:
    with Client(cluster.address) as one:
        yield one


def greedy(
    extra: dict[str, Argument] | None = None, max_tokens: int = 6, bad_words: tuple[str, ...] = ()
) -> Generation:
    sampling = SamplingParams(
        max_tokens=max_tokens, temperature=0.0, ignore_eos=True, extra_args=extra or {}
    )
    return Generation(sampling, bad_words=bad_words)


def test_the_processor_runs_on_both_nodes_for_requests_with_its_argument(client: Client) -> None:
    favoured = client.generate(PROMPT, greedy({"favour": FAVOURED}))
    plain = client.generate(PROMPT, greedy())

    assert favoured.token_ids == [FAVOURED] * 6
    assert favoured.finish is not None
    assert favoured.finish.served.is_prefill_remote
    assert FAVOURED not in plain.token_ids


@pytest.mark.parametrize(
    ("extra", "word"), [({"favour": 10**6}, "is no token"), ({"other": 1}, "taken: favour")]
)
def test_rejected_or_unknown_arguments_are_a_client_error(
    client: Client, extra: dict[str, Argument], word: str
) -> None:
    with pytest.raises(BatonError, match=word) as refused:
        client.generate(PROMPT, greedy(extra))

    assert refused.value.code.name == "INVALID_ARGUMENT"


def test_processor_arguments_are_accepted_over_http_as_vllm_xargs(cluster: LocalCluster) -> None:
    body = {
        "prompt": PROMPT,
        "max_tokens": 4,
        "vllm_xargs": {"favour": FAVOURED},
        "return_token_ids": True,
    }
    requested = urllib.request.Request(
        f"http://{cluster.router.http_address}/v1/completions", json.dumps(body).encode()
    )

    with urllib.request.urlopen(requested) as answer:
        choice = json.load(answer)["choices"][0]

    assert choice["token_ids"] == [FAVOURED] * 4


def test_bad_words_are_not_in_the_answer(client: Client) -> None:
    plain = client.generate(PROMPT, greedy(max_tokens=40))
    word = max(plain.text.split(), key=len)

    without = client.generate(PROMPT, greedy(max_tokens=40, bad_words=(word,)))

    assert word in plain.text
    assert word not in without.text


def test_nodes_with_different_processors_are_not_paired(tmp_path: Path) -> None:
    options = ClusterOptions(
        MODEL,
        decode_arguments=("--logits-processors", "favour"),
        environment=installed(package(tmp_path, "1.0")),
    )

    with (
        LocalCluster(options) as running,
        Client(running.address) as client,
        pytest.raises(BatonError) as refused,
    ):
        client.generate(PROMPT, greedy())

    assert refused.value.reason == "INCOMPATIBLE_NODES"


def test_a_node_with_a_missing_processor_reports_it() -> None:
    options = ClusterOptions(MODEL, node_arguments=("--logits-processors", "absent"))

    with pytest.raises(ClusterFailed, match="absent: no installed package"), LocalCluster(options):
        pass
