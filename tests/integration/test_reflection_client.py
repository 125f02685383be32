"""Client that shares no code with Baton: `buf curl`, which uses gRPC reflection."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import sysconfig
from typing import Any

import pytest
from google.rpc import error_details_pb2

from baton.client import Client, Generation
from baton.cluster import LocalCluster
from baton.core.sampling import SamplingParams

BUF = shutil.which("buf", path=sysconfig.get_path("scripts")) or shutil.which("buf")

pytestmark = pytest.mark.skipif(BUF is None, reason="buf is not installed: pip install buf-bin")


def buf_curl(address: str, method: str, message: dict[str, Any]) -> list[Any]:
    """Return all responses."""
    called = run_buf_curl(address, method, message)
    assert called.returncode == 0, called.stderr
    return json_objects(called.stdout)


def run_buf_curl(
    address: str, method: str, message: dict[str, Any]
) -> subprocess.CompletedProcess[str]:
    options = ["--protocol", "grpc", "--http2-prior-knowledge", "--data", json.dumps(message)]
    return subprocess.run(
        [str(BUF), "curl", *options, f"http://{address}/{method}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def json_objects(written: str) -> list[Any]:
    """Parse concatenated JSON objects."""
    objects = []
    rest = written.strip()
    while rest:
        found, end = json.JSONDecoder().raw_decode(rest)
        objects.append(found)
        rest = rest[end:].lstrip()
    return objects


def test_a_reflection_client_streams_the_answer_of_the_baton_client(
    cluster: LocalCluster, client: Client
) -> None:
    sampling = {"maxTokens": 12, "temperature": 0, "ignoreEos": True}
    requested = {"text": "the quick brown fox", "sampling": sampling, "requestId": "foreign"}

    reported = buf_curl(cluster.address, "baton.v1.InferenceService/Generate", requested)

    ours = client.generate(
        "the quick brown fox",
        Generation(SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)),
    )
    token_ids = [token_id for one in reported for token_id in one.get("tokenIds", ())]
    finish = reported[-1]["finish"]
    assert token_ids == ours.token_ids
    assert "".join(one.get("text", "") for one in reported) == ours.text
    assert len(reported) > 2
    assert {one["requestId"] for one in reported} == {"foreign"}
    assert finish["reason"] == "FINISH_REASON_LENGTH"
    assert finish["served"]["prefill"] == "PREFILL_PLACE_REMOTE"


def test_a_reflection_client_reads_model_and_health(cluster: LocalCluster) -> None:
    [model] = buf_curl(cluster.address, "baton.v1.InferenceService/GetModel", {})
    [health] = buf_curl(
        cluster.address, "grpc.health.v1.Health/Check", {"service": "baton.v1.InferenceService"}
    )

    assert model["model"] == "tiny"
    assert model["maxModelLen"] == 512
    assert health == {"status": "SERVING"}


def test_a_reflection_client_reads_the_reason_of_a_refusal(cluster: LocalCluster) -> None:
    requested = {"text": "a", "sampling": {"topP": 7}}

    refused = run_buf_curl(cluster.address, "baton.v1.InferenceService/Generate", requested)

    reported = json.loads(refused.stderr)
    [detail] = [one for one in reported["details"] if one["type"] == "google.rpc.ErrorInfo"]
    assert reported["code"] == "invalid_argument"
    assert "top_p is 7" in reported["message"]
    info = error_details_pb2.ErrorInfo.FromString(base64.b64decode(detail["value"] + "=="))
    assert (info.reason, info.domain) == ("INVALID_REQUEST", "baton")
