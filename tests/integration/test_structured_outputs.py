"""Structured outputs on clusters: the same disaggregated and colocated, and under faults."""

from __future__ import annotations

import json
import random
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from baton.checkpoint.tokenizer_files import load_tokenizer
from baton.client import BatonError, Client, Generation
from baton.cluster import ClusterOptions, LocalCluster
from baton.core.errors import InvalidRequest
from baton.core.output import FinishReason
from baton.core.sampling import ReasoningSection, SamplingParams
from baton.core.structured_outputs import StructuredOutputs
from baton.llm import LLM
from baton.rpc.status import remote_error
from baton.v1 import inference_pb2, inference_pb2_grpc, sampling_pb2
from tests.support.client_load import ClientRequest, answer_all
from tests.support.hypothesis_profiles import num_examples
from tests.support.models import EOS_TOKEN_ID, prompt_of
from tests.support.nodes import kill_the_writer
from tests.support.scheduler_state import is_idle
from tests.support.schemas import Schema, is_valid, random_schema
from tests.support.suspended_processes import suspended

SCHEMA: Schema = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "size": {"enum": ["small", "large"]},
        "tags": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}},
    },
    "required": ["name", "size"],
    "additionalProperties": False,
}
BY_SCHEMA = StructuredOutputs(json=json.dumps(SCHEMA))
NUM_SCHEMAS = num_examples(100)
REASONING_BEGIN, REASONING_END = 50, 51
LONG = StructuredOutputs(regex="([a-z]{3} ){60,70}")
FORMS = [
    BY_SCHEMA,
    StructuredOutputs(json=json.dumps(SCHEMA), disable_any_whitespace=True),
    StructuredOutputs(regex=r"[a-z]{2,9}@[a-z]{2,9}\.(com|org)"),
    StructuredOutputs(choice=("the quick brown fox", "the lazy dog")),
    StructuredOutputs(grammar='start: /[a-z]+/ ("+" /[a-z]+/)~2..4'),
    None,
]


def client_requests(num_each: int) -> list[ClientRequest]:
    """Return greedy and sampled requests, with and without constraints, of several lengths."""
    requests = []
    for place, form in enumerate(FORMS):
        for number in range(num_each):
            sampling = SamplingParams(
                max_tokens=60,
                temperature=0.0 if number == 0 else 1.0,
                seed=number,
                min_tokens=5 * number,
                logprobs=1,
                structured_outputs=form,
            )
            prompt = prompt_of(10 + 30 * number, seed=70 + place)
            requests.append(ClientRequest(prompt, Generation(sampling)))
    return requests


def reasoning_requests() -> list[ClientRequest]:
    """Return constrained requests that first reason; the end of it is made likely."""
    requests = []
    for number, form in enumerate(FORMS[2:4]):
        for begin in (None, REASONING_BEGIN):
            sampling = SamplingParams(
                max_tokens=90,
                seed=number,
                structured_outputs=form,
                reasoning=ReasoningSection((REASONING_END,), begin),
                logit_bias={REASONING_END: 6.0, REASONING_BEGIN: 9.0 * (number % 2)},
            )
            requests.append(ClientRequest(prompt_of(40, seed=number), Generation(sampling)))
    return requests


def test_disaggregated_colocated_and_local_tokens_are_the_same(
    cluster: LocalCluster, colocated: LocalCluster, local: LLM
) -> None:
    requests = [*client_requests(3), *reasoning_requests()]

    apart, together = answer_all(cluster.address, requests), answer_all(colocated.address, requests)

    here = local.generate(
        [request.prompt for request in requests], [_sampling(request) for request in requests]
    )
    expected = [tuple(one.token_ids) for one in here]
    assert [one.token_ids for one in apart] == expected
    assert [one.token_ids for one in together] == expected
    for one in apart:
        assert one.finish.served.prompt_tokens_computed_on_decode == 0
    for one in together[-len(reasoning_requests()) :]:
        sampling = _sampling(one.request)
        assert sampling.reasoning is not None
        begin, tokens = sampling.reasoning.begin_token_id, list(one.token_ids)
        has_section = begin is None or tokens[0] == begin
        assert one.finish.reason == "stop"
        assert REASONING_END in tokens or not has_section
    reasons: Counter[str] = Counter(
        one.finish.reason for one in apart if _sampling(one.request).structured_outputs
    )
    assert reasons["stop"] > 8


def test_a_first_token_that_completes_the_answer_ends_it_on_both_nodes(client: Client) -> None:
    empty = StructuredOutputs(regex="")

    answer = client.generate((5, 6, 7), Generation({"structured_outputs": empty}))

    assert answer.token_ids == [EOS_TOKEN_ID]
    assert answer.finish is not None
    assert answer.finish.reason == "stop"


def test_an_answer_follows_its_grammar_when_its_decode_node_is_killed(
    cluster_options: Callable[..., ClusterOptions], local: LLM
) -> None:
    prompt = prompt_of(40)
    sampling = SamplingParams(max_tokens=300, temperature=0.0, structured_outputs=LONG)
    with (
        LocalCluster(cluster_options(num_decode=2)) as cluster,
        Client(cluster.address) as client,
    ):
        with suspended(*cluster.decodes):
            stream = client.stream(prompt, Generation(sampling))
            chunks = [next(stream)]  # sampled on prefill
            kill_the_writer(cluster)
        chunks += stream

    [here] = local.generate([prompt], sampling)
    finish = chunks[-1].finish
    assert [token for chunk in chunks for token in chunk.token_ids] == here.token_ids
    assert here.finish_reason is FinishReason.STOP
    assert finish is not None
    assert (finish.reason, finish.served.attempts) == ("stop", 2)


def test_preempted_answers_follow_their_grammar(model_folder: Path, local: LLM) -> None:
    prompts = [prompt_of(40, seed=seed) for seed in range(4)]
    samplings = [
        SamplingParams(max_tokens=100, temperature=1.0, seed=seed, structured_outputs=LONG)
        for seed in range(4)
    ]
    apart = [local.generate([p], s)[0].token_ids for p, s in zip(prompts, samplings, strict=True)]
    with LLM(
        str(model_folder), kv_cache_memory="128KiB", num_threads=1, show_progress=False
    ) as tight:
        crowded = tight.generate(prompts, samplings)
        num_preempted = tight.engine.scheduler.stats().total_preemptions

    assert num_preempted > 0
    assert [one.token_ids for one in crowded] == apart


def test_an_invalid_constraint_is_refused_before_the_local_engine_runs(local: LLM) -> None:
    wrong = SamplingParams(structured_outputs=StructuredOutputs(json='{"type": "strnig"}'))

    with pytest.raises(InvalidRequest, match="strnig"):
        local.generate(["a", "b"], wrong)
    assert is_idle(local.engine.scheduler)


# --- Refused constraints and their errors -----------------------------------------------------

ENDLESS = {
    "$defs": {
        "n": {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}, "required": ["n"]}
    },
    "$ref": "#/$defs/n",
}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"json": "{"}, "is not JSON"),
    ({"json": {"type": "strnig"}}, "strnig"),
    ({"json": {"not": {}}}, "not"),
    ({"json": ENDLESS}, "never ends"),
    ({"regex": "(a"}, "unclosed group"),
    ({"regex": r"[^\s\S]"}, "no answer can fit"),  # only nodes find this out
    ({"grammar": 'start: "a" start'}, "never ends"),
    ({"choice": []}, "none of them"),
]


@pytest.mark.parametrize(("form", "reason"), REFUSED, ids=[str(form)[:30] for form, _ in REFUSED])
def test_an_invalid_constraint_is_refused_over_http_and_grpc_with_the_reason(
    form: dict[str, Any], reason: str, cluster: LocalCluster
) -> None:
    status, reported = _post(cluster, {"prompt": "a", "structured_outputs": form})

    assert status == 400
    assert reason in reported["message"]
    assert reported["type"] == "invalid_request_error"
    with grpc.insecure_channel(cluster.address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        with pytest.raises(grpc.RpcError) as failed:
            list(stub.Generate(_request(form), timeout=60))
    remote = remote_error(failed.value)
    assert remote.code is grpc.StatusCode.INVALID_ARGUMENT
    assert reason in remote.message


WRONG_TYPES: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}}, "response_format"),
    ({"response_format": {"type": "grammar"}}, "response_format"),
    ({"response_format": {}}, "response_format"),
    ({"response_format": "json_object"}, "response_format"),
    ({"structured_outputs": {"regex": "a", "json_object": True}}, "structured_outputs"),
    ({"structured_outputs": {"json": 5}}, "structured_outputs"),
    ({"structured_outputs": {"choice": "a"}}, "structured_outputs"),
    ({"structured_outputs": {"choice": [1]}}, "structured_outputs"),
    ({"structured_outputs": {"json_object": "yes"}}, "structured_outputs"),
    ({"structured_outputs": {"jsn": {}}}, "structured_outputs"),
    ({"guided_regex": "(a"}, "guided_regex"),
    ({"guided_json": {}, "guided_regex": "a"}, "guided_regex"),
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
]


@pytest.mark.parametrize(
    ("fields", "param"), WRONG_TYPES, ids=[str(f)[:50] for f, _ in WRONG_TYPES]
)
def test_wrong_types_are_refused_with_the_field_name(
    fields: dict[str, Any], param: str, cluster: LocalCluster
) -> None:
    status, reported = _post(cluster, {"prompt": "a", **fields})

    assert (status, reported["param"]) == (400, param)


def test_a_client_gets_a_named_error_and_can_continue(client: Client) -> None:
    with pytest.raises(BatonError, match="never ends"):
        client.generate("a", Generation({"structured_outputs": {"json": ENDLESS}}))

    form = {"choice": ["a", "b"]}
    assert client.generate("a", Generation({"structured_outputs": form})).text in form["choice"]


# --- Random schemas ---------------------------------------------------------------------------


def test_answers_to_random_schemas_parse_and_validate(local: LLM) -> None:
    counts = _judged_here(local, num=50, seed=0)

    assert counts["invalid"] == 0
    assert counts["valid"] > 40


@pytest.mark.slow
def test_answers_to_random_schemas_parse_and_validate_on_a_cluster(
    cluster: LocalCluster, model_folder: Path
) -> None:
    tokenizer = load_tokenizer(model_folder)
    chance = random.Random(1)
    counts: Counter[str] = Counter()
    schemas = [random_schema(chance) for _ in range(NUM_SCHEMAS)]
    requests = [_client_request(schema, place) for place, schema in enumerate(schemas)]
    answers = answer_all(cluster.address, requests, num_at_once=50)
    for schema, reported in zip(schemas, answers, strict=True):
        counts[_verdict(tokenizer.decode(reported.token_ids), reported.finish.reason, schema)] += 1
        assert reported.finish.served.prompt_tokens_computed_on_decode == 0
    print(f"{NUM_SCHEMAS} random schemas, disaggregated: {dict(counts)}")

    assert counts["invalid"] == 0
    assert counts["valid"] > 0.9 * NUM_SCHEMAS


def _judged_here(local: LLM, *, num: int, seed: int) -> Counter[str]:
    chance = random.Random(seed)
    schemas = [random_schema(chance) for _ in range(num)]
    requests = [_client_request(schema, place) for place, schema in enumerate(schemas)]
    answers = local.generate(
        [request.prompt for request in requests], [_sampling(request) for request in requests]
    )
    return Counter(
        _verdict(one.text, "" if one.finish_reason is None else one.finish_reason.value, schema)
        for one, schema in zip(answers, schemas, strict=True)
    )


def _client_request(schema: Schema, place: int) -> ClientRequest:
    form = StructuredOutputs(json=json.dumps(schema), disable_any_whitespace=place % 2 == 0)
    sampling = SamplingParams(
        max_tokens=400, temperature=(0.0, 1.0)[place % 3 > 0], seed=place, structured_outputs=form
    )
    return ClientRequest(prompt_of(5 + place % 40, seed=place), Generation(sampling))


def _verdict(text: str, reason: str, schema: Schema) -> str:
    if reason != "stop":
        return reason
    try:
        return "valid" if is_valid(text, schema) else "invalid"
    except ValueError:
        return "invalid"


def _sampling(request: ClientRequest) -> SamplingParams:
    assert isinstance(request.generation.sampling, SamplingParams)
    return request.generation.sampling


def _post(cluster: LocalCluster, fields: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Return the status and the error in the body."""
    request = urllib.request.Request(
        f"http://{cluster.router.http_address}/v1/completions",
        json.dumps(fields).encode(),
        {"content-type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, {}
    except urllib.error.HTTPError as refused:
        return refused.code, json.load(refused)["error"]


def _request(form: dict[str, Any]) -> inference_pb2.GenerateRequest:
    """Build a request as a client in another language would."""
    given = dict(form)
    if isinstance(given.get("json"), dict):
        given["json"] = json.dumps(given["json"])
    if "choice" in given:
        given["choice"] = sampling_pb2.Choice(texts=given["choice"])
    reported = sampling_pb2.StructuredOutputs(**given)
    sampling = sampling_pb2.SamplingParams(structured_outputs=reported)
    return inference_pb2.GenerateRequest(text="a", sampling=sampling)
