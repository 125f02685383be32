"""Completions of embeddings by real nodes, one for prompts and one for answers."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import httpx2
import torch
from safetensors.torch import save

from baton.cluster import ClusterOptions, LocalCluster
from tests.integration.conftest import NODE_ARGUMENTS
from tests.support.models import prompt_of, reference
from tests.support.nodes import await_all_free

OPTION = "--enable-prompt-embeds"


def complete(cluster: LocalCluster, **fields: Any) -> Any:
    body = {"max_tokens": 12, "temperature": 0, "ignore_eos": True, "logprobs": 0, **fields}
    body |= {"return_tokens_as_token_ids": True}
    url = f"http://{cluster.router.http_address}/v1/completions"
    answer = httpx2.post(url, json=body, timeout=60).raise_for_status().json()
    return answer["choices"][0]["logprobs"]["tokens"], answer["usage"]


def test_rows_of_the_model_give_the_answers_of_their_tokens(model_folder: Path) -> None:
    prompts = [prompt_of(length, seed=length) for length in (1, 40, 300)]
    table = reference(model_folder).get_input_embeddings()
    with torch.no_grad():
        texts = [
            base64.b64encode(save({"prompt_embeds": table(torch.tensor(prompt))})).decode()
            for prompt in prompts
        ]
    options = ClusterOptions(
        str(model_folder),
        node_arguments=(*NODE_ARGUMENTS, OPTION),
        router_arguments=("--http-port", "0", OPTION),
    )
    with LocalCluster(options) as cluster:
        wanted = [complete(cluster, prompt=prompt)[0] for prompt in prompts]
        found = [complete(cluster, prompt_embeds=text)[0] for text in texts]
        again = [complete(cluster, prompt_embeds=text) for text in texts]
        for node in (*cluster.prefills, *cluster.decodes):
            await_all_free(node.address)

    assert found == wanted
    assert [tokens for tokens, _ in again] == wanted
    assert again[-1][1]["prompt_tokens_details"]["cached_tokens"] >= 256
