"""Client that sends one streamed request for each line on standard input: `grpc` or `http`.

It uses the stubs of the checkout that is its working folder.
"""

from __future__ import annotations

import json
import sys
import urllib.request

import grpc

sys.path.insert(0, ".")
from baton.v1 import inference_pb2, inference_pb2_grpc, sampling_pb2


def main() -> None:
    grpc_address, http_address, num_tokens = sys.argv[1:]
    with grpc.insecure_channel(grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        for number, line in enumerate(sys.stdin):
            # Distinct from the first token on, so that no prefix is cached.
            prompt = f"{number} " + " ".join(f"word{number}x{i}" for i in range(16))
            if line.strip() == "http":
                count = send_http(http_address, prompt, int(num_tokens))
            else:
                count = send_grpc(stub, prompt, int(num_tokens))
            print(count, flush=True)


def send_grpc(stub: inference_pb2_grpc.InferenceServiceStub, prompt: str, num_tokens: int) -> int:
    """Return the number of tokens that arrived."""
    sampling = sampling_pb2.SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    request = inference_pb2.GenerateRequest(text=prompt, sampling=sampling)
    return sum(len(response.token_ids) for response in stub.Generate(request))


def send_http(address: str, prompt: str, num_tokens: int) -> int:
    """Return the number of tokens that the last event reports."""
    body = {
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    request = urllib.request.Request(
        f"http://{address}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        events = [line[6:] for line in response if line.startswith(b"data: {")]
    usage = json.loads(events[-1])["usage"]
    return int(usage["completion_tokens"])


if __name__ == "__main__":
    main()
