"""Architectures that Baton does not know, on transformers' modules: tokens are transformers' own.

In float32 they are equal in batches, in odd chunks, with cached prefixes, through hand-offs over
NIXL by layers and after the death of a decode engine.
"""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from baton import LLM
from baton.checkpoint.hub import open_checkpoint
from baton.checkpoint.safetensors_folder import SafetensorsFolder
from baton.core.errors import InvalidConfig, ModelError
from baton.core.ids import RequestId
from baton.core.sampling import SamplingParams
from baton.core.structured_outputs import StructuredOutputs
from baton.doctor.findings import Finding, Status
from baton.doctor.model import check_model_folder
from baton.engine.runner.config import RunnerConfig
from baton.engine.runner.load import load_runner
from baton.engine.runner.model_runner import TorchRunner
from baton.engine.runner.open_runner import kind_of, open_runner, read_cached_layers
from baton.engine.runner.transformers_models.model_kind import TransformersModels
from baton.engine.runner.transformers_models.outline import UnsupportedModel
from baton.engine.spec_decode.config import parse_speculation
from tests.support.kernels import kernels_by_variant
from tests.support.local_handoffs import LocalHandoffs
from tests.support.models import (
    VARIANTS,
    half_reference_logprobs,
    make_model_folder,
    prompt_of,
    reference_choices,
    reference_logprobs,
)
from tests.support.runner_drivers import Drive, Driver, drives_of
from tests.support.unknown_architectures import TRAINED_LEN, UNKNOWN

BLOCK_SIZE = 16
CHUNK = 23  # no multiple of a block
NUM_TOKENS = 32  # longer than the windows, also after one token
PROMPT = prompt_of(70)  # four blocks and six tokens
TOLERANCE = 2e-4
HALF_TOLERANCE = 0.1  # as in test_families.py
SIZES = {"vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}

LoadRunner = Callable[..., TorchRunner]
FolderOf = Callable[[str], Path]

each_architecture = pytest.mark.parametrize("name", UNKNOWN)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> FolderOf:
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = make_model_folder(tmp_path_factory.mktemp(name), UNKNOWN[name])
        return made[name]

    return make


@pytest.fixture(scope="module")
def runner_of(folder_of: FolderOf) -> Iterator[LoadRunner]:
    """Yield a loader of runners. Settings other than the name make further runners."""
    loaded: dict[tuple[str, ...], TorchRunner] = {}

    def load(name: str, **settings: Any) -> TorchRunner:
        key = (name, *map(str, settings.values()))
        if key not in loaded:
            settings.pop("copy", "")
            opened = open_runner(config_of(folder_of(name), **settings))
            assert isinstance(opened, TorchRunner)
            loaded[key] = opened
        return loaded[key]

    yield load
    for runner in loaded.values():
        runner.__exit__(None, None, None)


def config_of(folder: Path, **settings: Any) -> RunnerConfig:
    sizes = {"block_size": BLOCK_SIZE, "max_num_seqs": 32, "kv_cache_bytes": 4 << 20}
    return RunnerConfig(str(folder), **{**sizes, **settings})


def driver(runner: TorchRunner, chunk: int = CHUNK) -> Driver:
    blocks = runner.kv_memory.num_blocks
    return Driver(runner, num_blocks=blocks, block_size=BLOCK_SIZE, chunk=chunk)


@each_architecture
def test_greedy_tokens_in_batches_and_chunks_equal_those_of_transformers(
    name: str, runner_of: LoadRunner, folder_of: FolderOf
) -> None:
    prompts = [PROMPT, prompt_of(1), prompt_of(33)]

    batched = driver(runner_of(name)).run(*drives_of(prompts, num_tokens=NUM_TOKENS))

    assert batched == [
        reference_choices(folder_of(name), prompt, answer, NUM_TOKENS)
        for prompt, answer in zip(prompts, batched, strict=True)
    ]
    assert len(set(batched[0])) > 4


@each_architecture
def test_hand_offs_prefix_hits_and_a_dead_decode_engine_change_no_token(
    name: str, runner_of: LoadRunner, folder_of: FolderOf
) -> None:
    decodes = [runner_of(name, copy=copy) for copy in ("decode-0", "decode-1")]
    branched = (*PROMPT[:48], *prompt_of(9, seed=5))
    with LocalHandoffs(runner_of(name), decodes, chunk=CHUNK) as engines:
        whole = engines.answer(PROMPT, 16)
        pushes_layers = engines.prefill.sends_before_the_end()
        other = engines.answer(branched, 8)
        begun = engines.answer(PROMPT, 16, until=6)
        engines.kill_decode()
        rest = engines.answer(PROMPT, 16, prior=begun.token_ids)

    expected = reference_choices(folder_of(name), PROMPT, whole.token_ids, 16)
    assert whole.token_ids == expected
    assert begun.token_ids + rest.token_ids == expected
    assert other.token_ids == reference_choices(folder_of(name), branched, other.token_ids, 8)
    assert pushes_layers
    assert whole.num_received == len(PROMPT)
    assert other.num_received == len(branched) - 48  # cached on the decode node
    assert rest.num_received == len(PROMPT) + len(begun.token_ids)


@pytest.mark.parametrize("name", ["arcee-dynamic", "phi4-multimodal"])
def test_texts_end_where_angles_would_depend_on_their_length(
    name: str, runner_of: LoadRunner
) -> None:
    assert runner_of(name).info.max_model_len == TRAINED_LEN


# Scaled and capped logits are computed by the forward pass of the whole model.
@pytest.mark.parametrize("name", ["cohere", "vaultgemma"])
def test_logprobs_equal_those_of_transformers(
    name: str, runner_of: LoadRunner, folder_of: FolderOf
) -> None:
    sampling = SamplingParams(temperature=1.3, top_k=50, logprobs=3, prompt_logprobs=0)
    drive = Drive(RequestId("r"), prompt_of(50), sampling=sampling, seed=5, num_tokens=24)

    driver(runner_of(name)).run(drive)

    expected = reference_logprobs(folder_of(name), drive.tokens)
    for found, row in zip(drive.logprobs, expected[len(drive.prompt) - 1 :], strict=False):
        assert found.logprob == pytest.approx(float(row[found.token_id]), abs=TOLERANCE)
        assert [token for token, _ in found.top] == row.topk(3).indices.tolist()
    prompt = [each for each in drive.prompt_logprobs if each is not None]
    assert len(prompt) == len(drive.prompt) - 1
    for found, row in zip(prompt, expected, strict=False):
        assert found.logprob == pytest.approx(float(row[found.token_id]), abs=TOLERANCE)


def test_structured_output_and_speculation_work_as_for_known_models(folder_of: FolderOf) -> None:
    folder = folder_of("gpt-neox")
    digits = StructuredOutputs(regex="[0-9]{5}")
    constrained = SamplingParams(max_tokens=8, temperature=0.7, seed=1, structured_outputs=digits)
    greedy = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    prompt = (*PROMPT[:20], *PROMPT[:20])  # drafts follow

    with LLM(str(folder), dtype="float32", speculative="suffix:3:fixed") as llm:
        [written] = llm.generate("a number: ", constrained)
        [answer] = llm.generate([prompt], greedy)

    assert written.text.isdigit()
    assert len(written.text) == 5
    assert answer.token_ids == reference_choices(folder, prompt, answer.token_ids, 40)


def test_a_known_family_has_the_same_tokens_either_way(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path, VARIANTS["llama"])
    prompts = [PROMPT, prompt_of(1), prompt_of(33)]
    config = config_of(folder)

    with TransformersModels().load(config, open_checkpoint(str(folder))) as fallback:
        found = driver(fallback).run(*drives_of(prompts, num_tokens=NUM_TOKENS))
    with load_runner(config) as known:
        expected = driver(known).run(*drives_of(prompts, num_tokens=NUM_TOKENS))

    assert found == expected


@pytest.mark.skipif(not kernels_by_variant(), reason="no C++ compiler")
@pytest.mark.parametrize(
    ("name", "num_native"),
    [
        *(("gemma", 15), ("starcoder2", 13), ("phimoe", 9), ("gpt2", 9)),
        *(("mimo-v2", 16), ("minicpm3", 17), ("granite-swa", 22)),
    ],
)
def test_native_kernels_compute_linear_layers_as_exactly_as_transformers(
    name: str,
    num_native: int,
    runner_of: LoadRunner,
    folder_of: FolderOf,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        runner = runner_of(name, dtype="bfloat16", kernels="native")
    drive = Drive(RequestId("r"), PROMPT, num_tokens=12)
    driver(runner).run(drive)
    sampling = SamplingParams(temperature=0.0, prompt_logprobs=0)
    again = Drive(RequestId("again"), drive.tokens, sampling=sampling, num_tokens=1)
    driver(runner, chunk=9).run(again)

    found = torch.tensor([each.logprob for each in again.prompt_logprobs if each is not None])
    expected = half_reference_logprobs(folder_of(name), drive.tokens)
    assert (found - expected).abs().median() < HALF_TOLERANCE
    assert f"kernels compute {num_native} of {num_native} linear layers" in caplog.text


def test_weights_quantized_at_load_change_the_logprobs_little(
    runner_of: LoadRunner, folder_of: FolderOf
) -> None:
    runner = runner_of("starcoder2", quantize="int8", kernels="torch")
    sampling = SamplingParams(temperature=0.0, prompt_logprobs=0)
    drive = Drive(RequestId("r"), PROMPT, sampling=sampling, num_tokens=1)
    driver(runner).run(drive)

    found = torch.tensor([each.logprob for each in drive.prompt_logprobs if each is not None])
    exact = reference_logprobs(folder_of("starcoder2"), PROMPT)[:-1]
    exact = exact.gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0]
    assert 0 < (found - exact).abs().mean() < HALF_TOLERANCE


def refused(tmp_path: Path, **fields: object) -> Finding:
    """Return what `baton doctor --model` finds about a folder with this config.json."""
    (tmp_path / "config.json").write_text(json.dumps({**SIZES, **fields}), encoding="utf-8")
    found = {each.check: each for each in check_model_folder(str(tmp_path), None)}
    assert found["weights"].status is Status.FAIL
    return found["weights"]


@pytest.mark.parametrize(
    ("architecture", "fields", "reason"),
    [
        ("MambaForCausalLM", {}, "its layers keep a state that the KV cache does not hold"),
        ("RecurrentGemmaForCausalLM", {}, "its layers keep a state"),
        ("ArceeForCausalLM", {"layer_types": ["conv"]}, "layers of the type 'conv' keep a state"),
        ("MiniMaxForCausalLM", {}, "its module MiniMaxLightningAttention keeps a state"),
        ("BloomForCausalLM", {}, "its attention does not go through AttentionInterface"),
        ("GPTJForCausalLM", {"rotary_dim": 8}, "does not go through AttentionInterface"),
        ("DogeForCausalLM", {}, "its layers add numbers to the scores of attention"),
        ("DeepseekV32ForCausalLM", {}, "its module DeepseekV32Indexer keeps a state"),
        ("BertLMHeadModel", {}, "masks that are neither causal nor windows"),
        ("JetMoeForCausalLM", {}, "a pass without numbers fails"),
        ("BartForCausalLM", {"is_encoder_decoder": True}, "the states of an encoder"),
        ("GPT2LMHeadModel", {"add_cross_attention": True}, "the states of an encoder"),
        ("ArceeForCausalLM", {"text_config": {}}, "it takes more than text"),
        ("ArceeForCausalLM", {"quantization_config": {}}, "its weights are quantized"),
        ("ArceeForCausalLM", {"num_attention_heads": 7}, "transformers refuses its config.json"),
        ("ArceeForCausalLM", {"num_hidden_layers": 10_001}, "it must be from 1 to 10000"),
        ("GPT2ForSequenceClassification", {}, "it does not continue texts"),
        ("OtherForCausalLM", {}, "transformers .* does not have it"),
        (
            "OtherForCausalLM",
            {"auto_map": {"AutoModelForCausalLM": "modeling_other.OtherForCausalLM"}},
            r"its code is in its folder \(trust_remote_code\), and is not run",
        ),
    ],
)
def test_what_the_kv_cache_cannot_hold_is_refused_by_name(
    architecture: str, fields: Mapping[str, object], reason: str, tmp_path: Path
) -> None:
    found = refused(tmp_path, architectures=[architecture], **fields)

    assert re.search(f"^{architecture} is not known .*{reason}.*; choose a model", found.found)


# Published configurations, with the names of fields that their architectures have.
PUBLISHED: Mapping[str, tuple[Mapping[str, object], tuple[object, ...]]] = {
    "gpt2": (
        {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "n_embd": 768,
            "n_head": 12,
            "n_layer": 12,
            "n_positions": 1024,
            "vocab_size": 50257,
        },
        (12, 12, 64, None, 1024, 50257),
    ),
    "pythia-1.4b": (
        {
            "architectures": ["GPTNeoXForCausalLM"],
            "model_type": "gpt_neox",
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_attention_heads": 16,
            "num_hidden_layers": 24,
            "max_position_embeddings": 2048,
            "rotary_pct": 0.25,
            "torch_dtype": "float16",
            "vocab_size": 50304,
        },
        (24, 16, 128, None, 2048, 50304),
    ),
    "starcoder2-3b": (
        {
            "architectures": ["Starcoder2ForCausalLM"],
            "model_type": "starcoder2",
            "hidden_size": 3072,
            "intermediate_size": 12288,
            "num_attention_heads": 24,
            "num_hidden_layers": 30,
            "num_key_value_heads": 2,
            "max_position_embeddings": 16384,
            "rope_theta": 999999.4420358813,
            "sliding_window": 4096,
            "use_bias": True,
            "vocab_size": 49152,
        },
        (30, 2, 128, 4096, 16384, 49152),
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_a_published_model_keeps_is_found_without_weights(name: str, tmp_path: Path) -> None:
    fields, expected = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(fields), encoding="utf-8")

    found = read_cached_layers(SafetensorsFolder(tmp_path))

    assert found is not None
    assert expected == (
        *(found.num_layers, found.num_kv_heads, found.head_dim, found.layers[0].window),
        *(found.max_context_len(), found.vocab_size),
    )


def test_reading_a_configuration_imports_no_transformers(folder_of: FolderOf) -> None:
    program = (
        "import sys; from baton.checkpoint.hub import open_checkpoint; "
        "from baton.engine.runner.open_runner import read_any_config; "
        "print(read_any_config(open_checkpoint(sys.argv[1])).dtype, "
        "*sorted({'torch', 'transformers'} & sys.modules.keys()))"
    )
    command = [sys.executable, "-c", program, str(folder_of("phi"))]

    done = subprocess.run(command, capture_output=True, text=True, check=True)

    assert done.stdout == "float32\n"


def test_without_transformers_the_remedy_is_its_installation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)  # as if it was not installed

    found = refused(tmp_path, architectures=["ArceeForCausalLM"])

    assert found.found.endswith(
        "the package transformers is not installed; pip install 'baton[transformers]'"
    )


def test_the_doctor_says_which_way_a_model_takes(folder_of: FolderOf, tmp_path: Path) -> None:
    unknown = {each.check: each for each in check_model_folder(str(folder_of("phi")), None)}
    known = make_model_folder(tmp_path, VARIANTS["llama"])

    assert unknown["weights"].status is Status.OK
    assert unknown["weights"].found.startswith("PhiForCausalLM, 91,520 ")
    assert "runs on transformers' modules" in unknown["weights"].found
    assert "(512 bytes a token, " in unknown["room"].found
    assert kind_of(SafetensorsFolder(known)) is None


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"max_loras": 1}, "it has no linear layers that adapters can change"),
        ({"speculation": parse_speculation("mtp:2")}, "use --speculative suffix:K with it"),
        ({"quantize": "int4", "quantize_importance": "file"}, "no names for --quantize-importance"),
    ],
)
def test_settings_that_need_layers_of_baton_are_refused(
    settings: Mapping[str, object], reason: str, folder_of: FolderOf
) -> None:
    with pytest.raises(InvalidConfig, match=reason):
        open_runner(config_of(folder_of("phi"), **settings))


def test_missing_weights_are_refused_and_further_ones_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_model_folder(tmp_path, UNKNOWN["phi"])
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "model.extra": torch.ones(2)}, folder / "model.safetensors")

    with open_runner(config_of(folder)):
        pass
    assert "tensors that transformers does not use: model.extra" in caplog.text

    del tensors["lm_head.bias"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(
        ModelError, match=r"do not match its config.json: missing_keys lm_head\.bias"
    ):
        open_runner(config_of(folder))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda states, _: states.cumsum(dim=1),  # a state
        lambda states, _: states + torch.arange(states.shape[1])[:, None],  # no positions
    ],
)
def test_a_decoder_whose_tokens_depend_on_others_is_refused(
    wrong: Callable[[Tensor, Tensor], Tensor], runner_of: LoadRunner
) -> None:
    from baton.engine.runner.transformers_models.load import TransformersDecoder  # a slow import

    known = runner_of("phi").decoder
    assert isinstance(known, TransformersDecoder)

    def compute(*, input_ids: Tensor, position_ids: Tensor, **_: object) -> Any:
        states = input_ids[..., None].float() + position_ids[..., None]
        return SimpleNamespace(last_hidden_state=wrong(states, position_ids))

    model = replace(known.model, decoder=compute)

    with torch.inference_mode():
        known.check_isolation(torch.device("cpu"))
        with pytest.raises(UnsupportedModel, match="keeps a state besides keys and values"):
            replace(known, model=model).check_isolation(torch.device("cpu"))
