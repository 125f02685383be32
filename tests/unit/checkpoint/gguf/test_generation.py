"""Default sampling parameters of GGUF files."""

from __future__ import annotations

from pathlib import Path

from baton.checkpoint.checkpoint import GenerationDefaults
from baton.checkpoint.gguf.generation import read_generation_defaults
from baton.checkpoint.gguf.gguf_file import GgufFile
from baton.checkpoint.gguf.header import Header, Value
from baton.core.sampling import SamplingDefaults, SamplingParams


def defaults_of(**sampling: Value) -> GenerationDefaults:
    metadata: dict[str, Value] = {
        "general.architecture": "llama",
        "tokenizer.ggml.tokens": ["a", "b"],
        "tokenizer.ggml.token_type": [1, 1],
        **{f"general.sampling.{name}": value for name, value in sampling.items()},
    }
    return read_generation_defaults(GgufFile([Header(Path("model.gguf"), metadata, {})]))


def test_a_file_without_sampling_parameters_has_those_of_llama_cpp() -> None:
    defaults = defaults_of()

    assert defaults.is_sampling_assumed
    assert defaults.sampling == SamplingDefaults(temperature=0.8, top_p=0.95, min_p=0.05)
    assert defaults.sampling.params() == SamplingParams(temperature=0.8, top_p=0.95, min_p=0.05)


def test_suppressed_tokens_are_read() -> None:
    metadata: dict[str, Value] = {"tokenizer.ggml.suppress_tokens": [1, 0]}
    file = GgufFile([Header(Path("model.gguf"), metadata, {})])

    assert read_generation_defaults(file).suppressed_token_ids == (1, 0)


def test_a_request_overrides_assumed_sampling_parameters() -> None:
    params = defaults_of().sampling.params(temperature=0.0, top_p=1.0, min_p=0.0)

    assert params == SamplingParams(temperature=0.0, top_p=1.0, min_p=0.0)


def test_a_file_with_any_sampling_parameter_has_only_its_own() -> None:
    defaults = defaults_of(top_k=20)

    assert not defaults.is_sampling_assumed
    assert defaults.sampling == SamplingDefaults(top_k=20)
