"""Adapters on clusters of real processes: answers, loads, unloads and failures."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import openai
import pytest
import torch
from openai import OpenAI
from safetensors.torch import load_file, save_file

from baton.client import BatonError, Client, Generation
from baton.cluster import ClusterOptions, LocalCluster
from baton.core.sampling import SamplingParams
from baton.llm import LLM
from tests.support.adapters import merge, write_adapter
from tests.support.baton_command import call_baton
from tests.support.models import prompt_of
from tests.support.nodes import await_all_free, kill_the_writer
from tests.support.suspended_processes import suspended

NUM_TOKENS = 16
PROMPT = prompt_of(87, seed=700)
PATIENCE_S = 60.0
WEIGHTS = "adapter_model.safetensors"
FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
SEEDS = {"fixed": 1, "sql": 2, "chat": 3, "newer": 4}
NODES = 2  # of a pair

pytestmark = pytest.mark.slow


def sampling(num_tokens: int = NUM_TOKENS) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)


def greedy(model: str, num_tokens: int = NUM_TOKENS) -> Generation:
    return Generation(sampling(num_tokens), model=model)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    for name, seed in SEEDS.items():
        write_adapter(model_folder, root / name, seed=seed)
    return root


@pytest.fixture(scope="module")
def operators(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("operators") / "tokens"
    file.write_text("secret\n")
    return file


@pytest.fixture(scope="module")
def alone(model_folder: Path, root: Path) -> Iterator[LLM]:
    """Run the model and all adapters in this process."""
    folders = {name: str(root / name) for name in SEEDS}
    with LLM(
        str(model_folder), kv_cache_memory="4MiB", num_threads=1, show_progress=False, lora=folders
    ) as llm:
        yield llm


@pytest.fixture(scope="module")
def answers(alone: LLM) -> dict[str, list[int]]:
    """Return what each adapter answers to the prompt; without one, the base."""
    tokens = {
        name: alone.generate(PROMPT, sampling(), lora=name)[0].token_ids for name in ("", *SEEDS)
    }
    assert len({*map(tuple, tokens.values())}) == len(tokens)
    return tokens


@pytest.fixture(scope="module")
def adapter_options(
    cluster_options: Callable[..., ClusterOptions], root: Path, operators: Path
) -> Callable[..., ClusterOptions]:
    def make(num_each: int) -> ClusterOptions:
        arguments = ("--operator-token-file", str(operators))
        options = cluster_options(
            num_prefill=num_each,
            num_decode=num_each,
            router_arguments=("--http-port", "0", *arguments),
        )
        adapters = ("--lora-root", str(root), "--lora", f"fixed={root / 'fixed'}")
        limits = ("--max-loras", "2", "--max-cpu-loras", "3")
        return replace(
            options, node_arguments=(*options.node_arguments, *adapters, *limits, *arguments)
        )

    return make


@pytest.fixture(scope="module")
def pair(adapter_options: Callable[..., ClusterOptions]) -> Iterator[LocalCluster]:
    """Run one prefill and one decode node."""
    with LocalCluster(adapter_options(1)) as running:
        yield running
    codes = {child.name: child.process.returncode for child in running.children}
    assert set(codes.values()) == {0}, codes


@pytest.fixture
def client(pair: LocalCluster) -> Iterator[Client]:
    with Client(pair.address, timeout_s=PATIENCE_S) as connected:
        yield connected


@pytest.fixture
def api(pair: LocalCluster) -> Iterator[OpenAI]:
    with api_of(pair) as connected:
        yield connected


def api_of(cluster: LocalCluster) -> OpenAI:
    url = f"http://{cluster.router.http_address}/v1"
    return OpenAI(base_url=url, api_key="secret", max_retries=0)


@pytest.fixture
def command(pair: LocalCluster, operators: Path) -> Callable[..., str]:
    """Run `baton adapters` as an operator."""

    def run(*arguments: str) -> str:
        connection = ["--address", pair.address]
        if arguments[0] != "list":
            connection += ["--operator-token-file", str(operators)]
        result = call_baton("adapters", *arguments, *connection)
        assert result.returncode == 0, result.stderr
        return result.stdout

    return run


def load(api: OpenAI, name: str, path: str, *, in_place: bool = False) -> None:
    body = {"lora_name": name, "lora_path": path, "load_inplace": in_place}
    assert "added" in api.post("/load_lora_adapter", body=body, cast_to=str)


def unload(api: OpenAI, name: str) -> None:
    assert "removed" in api.post("/unload_lora_adapter", body={"lora_name": name}, cast_to=str)


def test_answers_over_grpc_equal_those_of_one_engine(
    pair: LocalCluster, client: Client, answers: dict[str, list[int]]
) -> None:
    for model, name in (("fixed", "fixed"), ("tiny", ""), ("", "")):
        answer = client.generate(PROMPT, greedy(model))

        assert answer.token_ids == answers[name]
        assert answer.finish is not None
        assert answer.finish.served.is_prefill_remote
    for node in (*pair.prefills, *pair.decodes):
        await_all_free(node.address)


def test_answers_over_http_equal_those_of_one_engine(
    client: Client, api: OpenAI, answers: dict[str, list[int]]
) -> None:
    found = api.completions.create(
        model="fixed",
        prompt=list(PROMPT),
        max_tokens=NUM_TOKENS,
        temperature=0,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    assert found.choices[0].model_extra is not None
    assert found.choices[0].model_extra["token_ids"] == answers["fixed"]
    assert found.model == "fixed"

    text = "the quick brown"
    talk = {
        model: api.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": text}],
            max_tokens=NUM_TOKENS,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
        for model in ("fixed", "tiny")
    }
    chat = [{"role": "user", "content": text}]
    for model, answer in talk.items():
        assert answer.choices[0].message.content == client.generate(chat, greedy(model)).text
    assert talk["fixed"].choices[0].message.content != talk["tiny"].choices[0].message.content


def test_texts_are_embedded_with_an_adapter(
    client: Client, model_folder: Path, root: Path, tmp_path: Path
) -> None:
    merged = merge(model_folder, root / "fixed", tmp_path / "merged")
    with LLM(
        str(merged),
        kv_cache_memory="4MiB",
        num_threads=1,
        show_progress=False,
        pooling="mean",
    ) as llm:
        [expected] = llm.embed([PROMPT])

    [found] = client.embed([PROMPT], model="fixed")

    assert np.abs(np.array(found) - expected).max() < 1e-4
    assert np.abs(np.array(client.embed([PROMPT], model="tiny")[0]) - expected).max() > 1e-2


def test_an_adapter_is_described_by_its_own_name(client: Client) -> None:
    adapted, base = client.model("fixed"), client.model("tiny")

    assert (adapted.name, base.name) == ("fixed", "tiny")
    assert replace(adapted, name="tiny") == base


def test_an_adapter_is_loaded_listed_and_unloaded_while_the_cluster_runs(
    client: Client, command: Callable[..., str], api: OpenAI, answers: dict[str, list[int]]
) -> None:
    with pytest.raises(BatonError, match="'sql' is not served here; served: tiny, fixed"):
        client.generate(PROMPT, greedy("sql"))

    assert f"sql: loaded on {NODES} nodes" in command("load", "sql", "sql")

    assert client.generate(PROMPT, greedy("sql")).token_ids == answers["sql"]
    listed = {each["adapter"]["name"]: each for each in json.loads(command("list", "--json"))}
    assert {name: each["num_in_memory"] for name, each in listed.items()} == {
        "fixed": NODES,
        "sql": NODES,
    }
    models = {each.id: each.model_extra or {} for each in api.models.list().data}
    assert {name: each["parent"] for name, each in models.items()} == {
        "tiny": None,
        "fixed": "tiny",
        "sql": "tiny",
    }
    assert models["sql"]["root"] == "sql"
    assert f"sql: unloaded from {NODES} nodes" in command("unload", "sql")
    with pytest.raises(openai.NotFoundError, match="served: tiny, fixed"):
        api.completions.create(model="sql", prompt="the")


def test_more_adapters_than_fit_into_memory_are_read_again(
    client: Client, api: OpenAI, answers: dict[str, list[int]]
) -> None:
    names = ("sql", "chat", "newer")
    for name in names:
        load(api, name, name)
    try:
        with ThreadPoolExecutor(4) as threads:
            models = ("fixed", *names, "tiny") * 3
            found = threads.map(lambda model: client.generate(PROMPT, greedy(model)), models)
            for model, answer in zip(models, found, strict=True):
                assert answer.token_ids == answers["" if model == "tiny" else model], model
    finally:
        for name in names:
            unload(api, name)


def test_an_adapter_that_is_unloaded_while_in_use_completes_its_answers(
    pair: LocalCluster, client: Client, api: OpenAI, alone: LLM
) -> None:
    load(api, "sql", "sql")
    long = greedy("sql", 100)
    expected = alone.generate(PROMPT, sampling(100), lora="sql")[0].token_ids

    token_ids: list[int] = []
    with closing(client.stream(PROMPT, long)) as chunks:
        for chunk in chunks:
            if not token_ids:
                unload(api, "sql")
            token_ids += chunk.token_ids

    assert token_ids == expected
    for node in (*pair.prefills, *pair.decodes):
        await_all_free(node.address)


def test_a_reload_with_other_weights_gives_the_new_answer(
    client: Client, api: OpenAI, root: Path, answers: dict[str, list[int]]
) -> None:
    shutil.copytree(root / "sql", root / "live")
    load(api, "live", "live")
    assert client.generate(PROMPT, greedy("live")).token_ids == answers["sql"]
    with pytest.raises(openai.BadRequestError, match="already been loaded"):
        load(api, "live", "live")

    shutil.copytree(root / "newer", root / "live", dirs_exist_ok=True)
    load(api, "live", "live", in_place=True)

    assert client.generate(PROMPT, greedy("live")).token_ids == answers["newer"]
    unload(api, "live")


def test_refusals_name_the_cause_and_leave_no_adapter(
    pair: LocalCluster, api: OpenAI, root: Path
) -> None:
    (root / "broken").mkdir()
    for name, path, expected in (
        ("x", "missing", "decode-0: path 'missing'.*prefill-0: path 'missing'"),
        ("x", "../sql", "relative to the node's --lora-root"),
        ("x", "broken", "there is no file"),
        ("tiny", "sql", "name of a served model"),
    ):
        with pytest.raises(openai.BadRequestError, match=expected):
            load(api, name, path)
    with pytest.raises(openai.NotFoundError, match="no adapter 'x' here; served: tiny, fixed"):
        unload(api, "x")
    stranger = api.with_options(api_key="client")
    with pytest.raises(openai.PermissionDeniedError, match="operators"):
        load(stranger, "x", "sql")
    assert {each.id for each in api.models.list().data} == {"tiny", "fixed"}
    result = call_baton("adapters", "load", "x", "sql", "--address", pair.address)
    assert (result.returncode, "--operator-token-file" in result.stderr) == (1, True)


def test_damaged_adapters_are_refused_and_other_answers_go_on(
    client: Client, api: OpenAI, root: Path, model_folder: Path, alone: LLM
) -> None:
    write_adapter(model_folder, root / "large", rank=65, seed=5)
    nan = load_file(write_adapter(model_folder, root / "nan", seed=6) / WEIGHTS)
    save_file({**nan, FIRST: torch.full_like(nan[FIRST], torch.nan)}, root / "nan" / WEIGHTS)
    (write_adapter(model_folder, root / "damaged", seed=7) / WEIGHTS).write_bytes(b"x" * 100)
    expected = alone.generate(PROMPT, sampling(150))[0].token_ids
    gaps: list[float] = []

    def stream() -> list[int]:
        token_ids: list[int] = []
        last_s = time.monotonic()
        for chunk in client.stream(PROMPT, greedy("tiny", 150)):
            token_ids += chunk.token_ids
            now_s = time.monotonic()
            gaps.append(now_s - last_s)
            last_s = now_s
        return token_ids

    with ThreadPoolExecutor(1) as threads:
        bystander = threads.submit(stream)
        for path, cause in (("large", "rank"), ("nan", "not finite"), ("damaged", "be read")):
            with pytest.raises(openai.BadRequestError, match=rf"2 of 2 nodes .*{cause}"):
                load(api, "x", path)
        assert bystander.result() == expected
    assert max(gaps) < 1.0
    assert {each.id for each in api.models.list().data} == {"tiny", "fixed"}


def test_an_answer_continues_with_its_adapter_on_another_node_when_its_node_dies(
    adapter_options: Callable[..., ClusterOptions], alone: LLM, answers: dict[str, list[int]]
) -> None:
    long = greedy("sql", 150)
    expected = alone.generate(PROMPT, sampling(150), lora="sql")[0].token_ids
    with (
        LocalCluster(adapter_options(2)) as cluster,
        Client(cluster.address, timeout_s=PATIENCE_S) as client,
        api_of(cluster) as api,
    ):
        load(api, "sql", "sql")
        with suspended(*cluster.decodes):  # or the answer may be whole before that
            stream = client.stream(PROMPT, long)
            chunks = [next(stream)]  # sampled on prefill
            dead = kill_the_writer(cluster)
        chunks += stream
        finish = chunks[-1].finish
        assert [token_id for chunk in chunks for token_id in chunk.token_ids] == expected
        assert finish is not None
        assert finish.served.attempts == 2

        # The new process was not there at the load: it reads the adapter for the request.
        restarted = cluster.restart(dead)
        for child in cluster.decodes:
            if child is not restarted:
                child.process.kill()
                child.process.wait()
        assert client.generate(PROMPT, greedy("sql")).token_ids == answers["sql"]
