"""EAGLE-3 heads: drafts as an independent reference makes them, and answers as without drafts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from baton.core.errors import InvalidConfig, ModelError
from baton.core.ids import RequestId
from baton.core.request import EngineRequest
from baton.core.sampling import SamplingParams
from baton.engine.config import EngineOptions
from baton.engine.core import EngineCore
from baton.engine.factory import build_engine
from baton.engine.runner.draft_heads.head_drafter import HeadDrafter
from baton.engine.runner.drafters import DRAFTERS
from baton.engine.runner.drafting.drafter import Drafter, DrafterParts
from baton.engine.runner.load import RunnerConfig, load_runner
from baton.engine.runner.model_runner import TorchRunner
from baton.engine.runner.sampling.torch_sampling import draw_keys, exponential_numbers
from baton.engine.scheduler.config import SchedulerConfig
from baton.engine.spec_decode.config import Speculation, parse_speculation
from baton.engine.spec_decode.proposer import DraftRow, Drafts, Proposer
from tests.golden import test_gguf_conversions
from tests.golden.test_demo_model import UNSEEN
from tests.golden.test_speculation import (
    GREEDY,
    REQUESTED,
    FolderOf,
    Got,
    assert_alike,
    run,
    specs_of,
)
from tests.support.draft_heads import (
    TAPS,
    make_eagle_folder,
    make_head_folder,
    make_speculators_folder,
)
from tests.support.eagle3_reference import Eagle3Reference
from tests.support.families import FAMILY_VARIANTS
from tests.support.gguf_conversion import convert
from tests.support.kernels import kernels_by_variant
from tests.support.layer_reference import Choose, eagle_reference
from tests.support.models import make_model_folder, prompt_of, reference, reference_logprobs
from tests.support.mtp_heads import form_of, make_mtp_folder, mtp_reference

MODELS = Path(__file__).parents[2] / "models"
ConfigWithHead = Callable[[Path], RunnerConfig]
SPECULATION = Speculation(4, method="eagle3", max_rows=64, is_adaptive=False)
WARM = replace(GREEDY, temperature=0.8)
SEEDED = replace(
    REQUESTED["seeded"], max_tokens=24
)  # the answers begin in one block, and end in another

VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "two-taps": {TAPS: [1, 0]},
    "norm-before-residual": {"norm_before_residual": True},
    "norm-before-fc": {"eagle_config": {"norm_before_fc": True}, "norm_before_fc": True},
    "fc-norm": {"fc_norm": True},
    "norm-output": {"norm_output": True},
    "more-heads": {"num_attention_heads": 8},
    "one-kv-head": {"num_key_value_heads": 1},
    "own-rope": {"rope_theta": 500.0},
}


def greedy_choice(logits: torch.Tensor, position: int) -> int:
    return int(logits.argmax())


@dataclass
class Recorder:
    """Keeps what a proposer proposes, after which tokens."""

    inner: Proposer
    made: list[tuple[str, list[int], list[int]]] = field(default_factory=list)

    def propose(self, rows: Iterable[DraftRow], max_tokens: int) -> Drafts:
        rows = list(rows)
        drafts = self.inner.propose(rows, max_tokens)
        for row in rows:
            if row.request_id in drafts:
                known, drafted = row.known_tokens.tolist(), drafts[row.request_id]
                self.made.append((row.request_id, known, list(drafted)))
        return drafts

    def forget(self, rows: Mapping[RequestId, DraftRow]) -> None:
        self.inner.forget(rows)


def config_of(model: Path, head: Path | None) -> RunnerConfig:
    return RunnerConfig(
        str(model),
        kv_cache_bytes=1 << 20,
        max_num_seqs=8,
        speculation=None if head is None else SPECULATION,
        speculative_model="" if head is None else str(head),
    )


def engine_of(runner: TorchRunner, *, max_num_batched_tokens: int = 64) -> EngineCore:
    limits = SchedulerConfig(max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=8)
    return build_engine(runner, EngineOptions(limits))


def answers(config: RunnerConfig, requests: Sequence[EngineRequest], **options: Any) -> list[Got]:
    with load_runner(config) as runner:
        engine = engine_of(runner, **options)
        got = run(engine, *requests)
        engine.scheduler.check()
        return got


def taps_of(model: Path, layers: Sequence[int], tokens: Sequence[int]) -> list[torch.Tensor]:
    """Return transformers' hidden states that enter these layers."""
    with torch.no_grad():
        output = reference(model)(torch.tensor([tokens]), output_hidden_states=True)
    return [output.hidden_states[layer][0] for layer in layers]


def keyed_choice(seed: int, temperature: float) -> Any:
    """Return the choice by the numbers of a seed and a position, as answers are drawn."""

    def choose(logits: torch.Tensor, position: int) -> int:
        keys = torch.from_numpy(draw_keys([seed], [position]))[:, None]
        numbers = exponential_numbers(keys, torch.arange(len(logits))[None])[0]
        return int((torch.softmax(logits.float() / temperature, 0) / numbers).argmax())

    return choose


@pytest.mark.parametrize(
    ("variant", "name"), [*((variant, "llama") for variant in VARIANTS), ("plain", "qwen2-window")]
)
def test_drafts_are_those_of_the_reference(
    variant: str, name: str, model_folder: FolderOf, tmp_path: Path
) -> None:
    check_eagle3_drafts(model_folder(name), tmp_path / "head", VARIANTS[variant])


def test_drafts_from_layers_after_the_last_that_writes_kv(tmp_path: Path) -> None:
    """Other passes compute these layers for the last token of a prompt alone."""
    model = make_model_folder(tmp_path / "model", FAMILY_VARIANTS["gemma4"])

    check_eagle3_drafts(model, tmp_path / "head", {TAPS: [0, 2, 5]})


def check_eagle3_drafts(model: Path, folder: Path, fields: Mapping[str, Any]) -> None:
    head = make_head_folder(folder, model, fields)
    embeddings = reference(model).get_input_embeddings().weight
    expected = Eagle3Reference.read(head, embeddings)

    def draft(known: list[int], number: int, choose: Choose) -> list[int]:
        taps = taps_of(model, expected.tap_ids(len(reference(model).model.layers)), known[:-1])
        return expected.draft(taps, known, number, choose)

    check_drafts(config_of(model, head), draft)


EAGLE: Mapping[str, Callable[[Path, Path], Path]] = {
    "plain": make_eagle_folder,
    "without-bias": lambda folder, model: make_eagle_folder(
        folder, model, {"bias": False, "architectures": ["EagleLlamaForCausalLM"]}
    ),
    "qkv-bias": lambda folder, model: make_eagle_folder(
        folder, model, {"qkv_bias": True, "architectures": ["Qwen2ForCausalLM"]}
    ),
    "own-heads-and-rope": lambda folder, model: make_eagle_folder(
        folder,
        model,
        {"num_attention_heads": 8, "num_key_value_heads": 1, "rope_theta": 500_000.0},
    ),
    "speculators": partial(make_speculators_folder, has_norms=False),
    "speculators-with-norms": partial(make_speculators_folder, has_norms=True),
}


def eagle_config_of(model: Path, head: Path) -> RunnerConfig:
    return replace(config_of(model, head), speculation=replace(SPECULATION, method="eagle"))


@pytest.mark.parametrize(
    ("variant", "name"), [*((variant, "llama") for variant in EAGLE), ("plain", "qwen2-window")]
)
def test_drafts_of_eagle_heads_are_those_of_transformers(
    variant: str, name: str, model_folder: FolderOf, tmp_path: Path
) -> None:
    model = model_folder(name)
    head = EAGLE[variant](tmp_path / "head", model)

    check_drafts(eagle_config_of(model, head), eagle_reference(model, head).draft)


@pytest.mark.parametrize(
    "name", ["glm4-moe", "deepseek-v3", "glm4-moe-lite", "qwen3-next", "qwen3.5"]
)
def test_drafts_of_a_layer_after_the_last_are_those_of_transformers(
    name: str, tmp_path: Path
) -> None:
    variant = FAMILY_VARIANTS[name]
    model = make_mtp_folder(tmp_path / "model", variant, num_layers=2)
    expected = mtp_reference(model, tmp_path / "whole", form_of(variant))
    config = replace(config_of(model, None), speculation=replace(SPECULATION, method="mtp"))

    check_drafts(config, expected.draft)

    requests = specs_of(SEEDED)
    drafted = answers(config, requests)
    assert_alike(answers(replace(config, speculation=None), requests), drafted)
    assert sum(got.num_accepted for got in drafted) > 0


@pytest.mark.parametrize(
    ("name", "is_apart"),
    [
        *((name, False) for name in ("glm4-moe", "deepseek-v3", "qwen3-next", "qwen3.5-moe")),
        *((name, True) for name in ("glm4-moe-lite", "qwen3.5")),
    ],
)
def test_the_layer_in_a_gguf_file_drafts_as_in_its_folder(
    name: str, is_apart: bool, tmp_path: Path
) -> None:
    folder = make_mtp_folder(tmp_path / "model", test_gguf_conversions.VARIANTS[name], num_layers=2)
    config = replace(config_of(folder, None), speculation=replace(SPECULATION, method="mtp"))
    in_files = replace(config, dtype="float32")
    if is_apart:
        model = convert(folder, tmp_path / "model.gguf", holds=("model",))
        layer = convert(folder, tmp_path / "mtp.gguf", holds=("predictor",))
        in_files = replace(in_files, model=str(model), speculative_model=str(layer))
    else:
        in_files = replace(in_files, model=str(convert(folder, tmp_path / "model.gguf")))
    requests = specs_of(SEEDED)

    of_files = answers(in_files, requests)

    of_folder = answers(config, requests)
    assert_alike(of_folder, of_files)
    assert [got.num_accepted for got in of_files] == [got.num_accepted for got in of_folder]
    assert sum(got.num_accepted for got in of_files) > 0
    if is_apart:
        with pytest.raises((InvalidConfig, ModelError), match="mtp"):
            load_runner(replace(in_files, speculative_model=""))


def test_the_quantized_layer_of_a_gguf_file_drafts(tmp_path: Path) -> None:
    folder = make_mtp_folder(
        tmp_path / "model", test_gguf_conversions.VARIANTS["qwen3.5"], num_layers=2
    )
    path = convert(folder, tmp_path / "model.gguf", "Q8_0")
    config = replace(config_of(path, None), speculation=replace(SPECULATION, method="mtp"))
    requests = specs_of(SEEDED)

    drafted = answers(config, requests)

    assert_alike(answers(replace(config, speculation=None), requests), drafted)
    assert sum(got.num_accepted for got in drafted) > 0


@pytest.mark.parametrize(
    ("name", "chosen"), [("glm4-moe", "mtp:3"), ("qwen3.5", "mtp:2"), ("llama", "suffix:8")]
)
def test_auto_drafts_by_the_layer_of_the_model_if_there_is_one(
    name: str, chosen: str, model_folder: FolderOf, tmp_path: Path
) -> None:
    model = model_folder(name) if name == "llama" else tmp_path / "model"
    if name != "llama":
        make_mtp_folder(model, FAMILY_VARIANTS[name], num_layers=2)

    with load_runner(
        replace(config_of(model, None), speculation=parse_speculation("auto"))
    ) as found:
        assert found.speculation == parse_speculation(chosen)


def check_drafts(config: RunnerConfig, expected: Callable[..., list[int]]) -> None:
    """Run greedy and drawn answers, and compare all drafts with those that are expected."""
    assert config.speculation is not None
    method, recorders = config.speculation.method, []

    def record(parts: DrafterParts) -> Drafter:
        made = DRAFTERS[method](parts)
        recorders.append(Recorder(made.proposer))
        return made._replace(proposer=recorders[0])

    samplings = {name: replace(one, max_tokens=8) for name, one in (("g", GREEDY), ("w", WARM))}
    requests = [
        replace(request, request_id=RequestId(f"{name}{request.request_id}"))
        for name, sampling in samplings.items()
        for request in specs_of(sampling)
    ]
    with load_runner(config, drafters={method: record}) as runner:
        run(engine_of(runner, max_num_batched_tokens=24), *requests)  # prompts of several chunks

    [recorder] = recorders
    assert len(recorder.made) > 30
    seeds = {request.request_id: request.seed for request in requests}
    for request_id, known, drafted in recorder.made:
        drawn = keyed_choice(seeds[RequestId(request_id)], WARM.temperature)
        choose = greedy_choice if request_id.startswith("g") else drawn
        assert drafted == expected(known, len(drafted), choose)


@pytest.fixture(params=["eagle3", "eagle"])
def config_with_head(request: pytest.FixtureRequest, tmp_path: Path) -> ConfigWithHead:
    """Return a factory of the configuration of a model with a head."""

    def make(model: Path) -> RunnerConfig:
        if request.param == "eagle":
            return eagle_config_of(model, make_eagle_folder(tmp_path / "head", model))
        return config_of(model, make_head_folder(tmp_path / "head", model, num_drafted=100))

    return make


def test_answers_are_those_without_drafts(
    config_with_head: ConfigWithHead, model_folder: FolderOf
) -> None:
    model = model_folder("llama")
    requests = [
        replace(request, request_id=RequestId(f"{name} {request.request_id}"))
        for name, sampling in REQUESTED.items()
        for request in specs_of(sampling)
    ]

    drafted = answers(config_with_head(model), requests)

    assert_alike(answers(config_of(model, None), requests), drafted)
    for name in REQUESTED.keys() - {"greedy"}:
        own = zip(requests, drafted, strict=True)
        assert sum(got.num_accepted for one, got in own if one.request_id.startswith(name)) > 0


@pytest.mark.skipif(not kernels_by_variant(), reason="no C++ compiler here")
@pytest.mark.parametrize(
    ("name", "quantize"), [("llama-bf16", "none"), ("llama-bf16", "int4"), ("qwen3-bf16", "none")]
)
def test_with_native_kernels_logprobs_are_bitwise_equal(
    name: str, quantize: str, config_with_head: ConfigWithHead, model_folder: FolderOf
) -> None:
    model, requests = model_folder(name), specs_of(SEEDED)

    drafted = answers(replace(config_with_head(model), quantize=quantize), requests)

    plain = answers(replace(config_of(model, None), quantize=quantize), requests)
    assert [got.logprobs for got in drafted] == [got.logprobs for got in plain]
    assert sum(got.num_accepted for got in drafted) > 0


REFUSED: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "another architecture": ({"architectures": ["LlamaForCausalLM"]}, "must name an EAGLE-3 head"),
    "two layers": ({"num_hidden_layers": 2}, "num_hidden_layers.* must be 1"),
    "another vocabulary": ({"vocab_size": 99}, "vocab_size is 99"),
    "a missing layer": ({TAPS: [0, 7]}, "must name layers from 0 to 1"),
    "no layers named": ({TAPS: None}, "has only 2 layers"),
    "other heads": ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_head_that_does_not_fit_is_refused(
    case: str, model_folder: FolderOf, tmp_path: Path
) -> None:
    fields, message = REFUSED[case]
    model = model_folder("llama")
    head = make_head_folder(tmp_path / "head", model)
    change_config(head, fields)

    with pytest.raises(ModelError, match=message):
        load_runner(config_of(model, head))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "must name an EAGLE head"),
        ({"hidden_size": 128}, "hidden_size is 128"),
        ({"num_hidden_layers": 32}, "num_hidden_layers.* must be 1"),
    ],
)
def test_an_eagle_head_that_does_not_fit_is_refused(
    fields: Mapping[str, Any], message: str, model_folder: FolderOf, tmp_path: Path
) -> None:
    model = model_folder("llama")
    head = make_eagle_folder(tmp_path / "head", model)
    change_config(head, fields)

    with pytest.raises(ModelError, match=message):
        load_runner(eagle_config_of(model, head))


def test_heads_of_models_with_streams_are_refused(tmp_path: Path) -> None:
    model = make_model_folder(tmp_path / "model", FAMILY_VARIANTS["gemma3n"])
    head = make_head_folder(tmp_path / "head", model, {TAPS: [0, 2, 5]})

    with pytest.raises(ModelError, match="heads for models with AltUp are unsupported"):
        load_runner(config_of(model, head))


def change_config(folder: Path, fields: Mapping[str, Any]) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_a_method_and_its_folder_belong_together(model_folder: FolderOf) -> None:
    config = config_of(model_folder("llama"), None)

    with pytest.raises(InvalidConfig, match=r"--speculative-model .* needs --speculative"):
        load_runner(replace(config, speculative_model="head"))
    with pytest.raises(InvalidConfig, match="needs --speculative-model"):
        load_runner(replace(config, speculation=SPECULATION))


def draft_config_of(model: Path, draft: Path) -> RunnerConfig:
    speculation = replace(SPECULATION, method="draft")
    return replace(config_of(model, None), speculation=speculation, speculative_model=str(draft))


# Of the same heads; of others; with a window before and after layers that have none.
PAIRS = (
    ("llama", "llama-tied-mqa"),
    ("llama", "qwen3"),
    ("qwen2-window", "llama"),
    ("qwen3", "mistral-window"),
)


@pytest.mark.parametrize(("target", "drafting"), PAIRS)
def test_drafts_of_a_model_are_those_of_transformers(
    target: str, drafting: str, model_folder: FolderOf
) -> None:
    draft_folder = model_folder(drafting)
    config = draft_config_of(model_folder(target), draft_folder)

    def draft(known: list[int], number: int, choose: Choose) -> list[int]:
        tokens = list(known)
        for _ in range(number):
            logits = reference_logprobs(draft_folder, tokens)[-1]
            tokens.append(choose(logits, len(tokens)))
        return tokens[len(known) :]

    check_drafts(config, draft)

    requests = specs_of(SEEDED)
    assert_alike(
        answers(config_of(model_folder(target), None), requests), answers(config, requests)
    )


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "drawn"])
def test_all_drafts_of_the_model_itself_are_accepted(
    sampling: SamplingParams, model_folder: FolderOf
) -> None:
    model = model_folder("llama")
    request = EngineRequest(RequestId("a"), prompt_of(40), replace(sampling, max_tokens=51), seed=1)

    [got] = answers(draft_config_of(model, model), [request])

    assert got.num_accepted == 40  # 10 drafts of four tokens, after the first token


def test_a_model_with_another_vocabulary_is_refused(model_folder: FolderOf, tmp_path: Path) -> None:
    model = model_folder("llama")
    shutil.copytree(model, tmp_path / "draft")
    change_config(tmp_path / "draft", {"vocab_size": 99})

    with pytest.raises(ModelError, match="has a vocabulary of 99 tokens"):
        load_runner(draft_config_of(model, tmp_path / "draft"))


def test_a_prefix_hit_has_the_kv_of_the_head(model_folder: FolderOf, tmp_path: Path) -> None:
    """A second request drafts as the first one did, though only its last tokens are computed."""
    model = model_folder("llama")
    head = make_head_folder(tmp_path / "head", model)
    request = EngineRequest(RequestId("a"), prompt_of(70), REQUESTED["seeded"], seed=1)
    with load_runner(config_of(model, head)) as runner:
        engine = engine_of(runner)
        [first] = run(engine, request)
        [second] = run(engine, replace(request, request_id=RequestId("b")))

    assert engine.scheduler.stats().total_prefix_hit_tokens >= 64
    assert second.token_ids == first.token_ids
    assert second.num_accepted == first.num_accepted > 0


@dataclass
class Silent:
    """Proposes nothing for the sequences of one request."""

    inner: Proposer
    request_id: str

    def propose(self, rows: Iterable[DraftRow], max_tokens: int) -> Drafts:
        others = (row for row in rows if row.request_id != self.request_id)
        return self.inner.propose(others, max_tokens)

    def forget(self, rows: Mapping[RequestId, DraftRow]) -> None:
        self.inner.forget(rows)


@pytest.mark.parametrize("method", ["eagle3", "draft"])
def test_an_answer_without_drafts_leaves_the_kv_of_the_head_in_full_blocks(
    method: str, model_folder: FolderOf, tmp_path: Path
) -> None:
    """A later request that hits them drafts as if it had computed them itself."""
    model = model_folder("llama")
    config = draft_config_of(model, model)
    if method == "eagle3":
        config = config_of(model, make_head_folder(tmp_path / "head", model))
    seeded = replace(REQUESTED["seeded"], max_tokens=66)
    first = EngineRequest(RequestId("a"), prompt_of(23), seeded, seed=1)
    beside = EngineRequest(RequestId("b"), prompt_of(9), replace(WARM, max_tokens=70), seed=2)

    def silence(parts: DrafterParts) -> Drafter:
        made = DRAFTERS[method](parts)
        return made._replace(proposer=Silent(made.proposer, "a"))

    with load_runner(config, drafters={method: silence}) as runner:
        engine = engine_of(runner, max_num_batched_tokens=24)
        answer, _ = run(engine, first, beside)
        tokens = (*first.prompt_token_ids, *answer.token_ids)
        later = replace(first, request_id=RequestId("c"), prompt_token_ids=tokens)
        [hit] = run(engine, later)
        num_hit = engine.scheduler.stats().total_prefix_hit_tokens
        [computed] = run(engine_of(runner), replace(later, request_id=RequestId("d")))

    assert answer.num_accepted == 0
    assert num_hit >= 80
    assert hit.token_ids == computed.token_ids
    assert hit.num_accepted == computed.num_accepted > 0


def test_a_head_that_fails_on_answers_costs_only_drafts(
    config_with_head: ConfigWithHead, model_folder: FolderOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("the head fails")

    model, requests = model_folder("llama"), specs_of(SEEDED)
    plain = answers(config_of(model, None), requests)
    monkeypatch.setattr(HeadDrafter, "catch_up", fail)

    assert_alike(plain, answers(config_with_head(model), requests))


def test_a_prediction_is_drafted_before_the_head_is_asked(
    model_folder: FolderOf, tmp_path: Path
) -> None:
    model = model_folder("llama")
    config = config_of(model, make_head_folder(tmp_path / "head", model))
    request = EngineRequest(RequestId("a"), prompt_of(40), replace(GREEDY, max_tokens=60), seed=1)

    [plain] = answers(config, [request])
    predicted = replace(request, predicted_token_ids=tuple(plain.token_ids))
    [followed] = answers(config, [predicted])

    assert followed.token_ids == plain.token_ids
    assert plain.num_accepted < 5
    assert followed.num_accepted > 40


@pytest.mark.parametrize(("temperature", "min_accepted"), [(0.0, 3.0), (0.8, 1.8)])
def test_the_trained_head_of_the_demo_model_is_often_right(
    temperature: float, min_accepted: float
) -> None:
    """A wrong tap, norm or position would cost most of its drafts."""
    tokens = Tokenizer.from_file(str(MODELS / "demo" / "tokenizer.json")).encode(UNSEEN).ids
    sampling = replace(GREEDY, temperature=temperature, max_tokens=64)
    requests = [
        EngineRequest(RequestId(f"{length}"), tuple(tokens[:length]), sampling, seed=length)
        for length in range(40, 120, 10)
    ]
    config = replace(config_of(MODELS / "demo", MODELS / "demo-eagle3"), kv_cache_bytes=4 << 20)

    with load_runner(config) as runner:
        engine = engine_of(runner)
        run(engine, *requests)

    stats = engine.scheduler.stats()
    num_drafts = stats.total_proposed_tokens / SPECULATION.num_tokens
    assert stats.total_accepted_tokens > min_accepted * num_drafts
