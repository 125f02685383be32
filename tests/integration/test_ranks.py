"""Nodes of several processes: real ranks with real weights, and how they end.

The ranks of engines in this process are forks. Those of nodes are started as everywhere.
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.client import Client, Generation
from baton.cluster import ClusterOptions, LocalCluster
from baton.core.errors import InvalidConfig
from baton.core.sampling import SamplingParams
from baton.engine.errors import EngineStopped, RunnerLost
from baton.engine.runner.ranks import leading, processes
from baton.llm import LLM
from benchmarks.chaos.ranks import is_running, ranks_of
from tests.support.families import FAMILY_VARIANTS, RECURRENT
from tests.support.forked_ranks import fork_ranks
from tests.support.models import VARIANTS, Variant, make_model_folder, prompt_of
from tests.support.open_files import open_files
from tests.support.peft_adapters import save_adapter
from tests.support.scaled_kv import grown_folder
from tests.support.waits import await_value

LOGPROBS = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=3)
# Sums of float32 in another order.
TOLERANCE = 1e-4
BFLOAT16_TOLERANCE = 0.1
PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def _forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    fork_ranks(monkeypatch.setattr)


def variant_of(name: str) -> Variant:
    return {**VARIANTS, **FAMILY_VARIANTS, **RECURRENT}[name]


@pytest.fixture
def open_llm(tmp_path: Path) -> Iterator[Callable[..., LLM]]:
    with ExitStack() as stack:

        def make(name: str, num_ranks: int, dtype: str = "float32", **settings: Any) -> LLM:
            folder = tmp_path / name
            if not folder.exists():
                make_model_folder(folder, replace(variant_of(name), dtype=dtype))
            llm = LLM(
                str(folder),
                tensor_parallel_size=num_ranks,
                kv_cache_memory="1MiB",
                num_threads=1,
                max_num_seqs=8,
                max_num_batched_tokens=32,  # chunks
                show_progress=False,
                **settings,
            )
            return stack.enter_context(llm)

        yield make


@pytest.mark.parametrize(("name", "num_ranks"), [("llama", 2), ("llama", 4), ("gemma3", 2)])
def test_ranks_generate_what_one_process_does_until_one_is_killed(
    open_llm: Callable[..., LLM], name: str, num_ranks: int
) -> None:
    prompts = [prompt_of(length, seed=length) for length in (1, 17, 90)]
    prompts.append((*prompts[-1][:64], 5))  # hits blocks
    sampling = replace(LOGPROBS, prompt_logprobs=1)
    one, several = (open_llm(name, size) for size in (1, num_ranks))

    for prompt in prompts:
        [wanted], [found] = (llm.generate([prompt], sampling) for llm in (one, several))

        assert found.token_ids == wanted.token_ids
        assert found.num_cached_tokens == wanted.num_cached_tokens
        for own, others in zip(found.logprobs, wanted.logprobs, strict=True):
            assert own.logprob == pytest.approx(others.logprob, abs=TOLERANCE)
        pairs = zip(found.prompt_logprobs, wanted.prompt_logprobs, strict=True)
        for of_prompt, of_wanted in pairs:
            if of_prompt is not None and of_wanted is not None:
                assert of_prompt.logprob == pytest.approx(of_wanted.logprob, abs=TOLERANCE)

    os.kill(ranks_of(os.getpid())[-1], signal.SIGKILL)
    with pytest.raises(RunnerLost, match=r"rank . of this node"):
        several.generate([prompts[0]], LOGPROBS)
    several.close()
    assert ranks_of(os.getpid()) == []


@pytest.mark.parametrize(("name", "has_whole_experts"), [("qwen3", False), ("qwen2-moe", True)])
def test_native_ranks_give_the_same_bits_in_any_batch_and_leave_nothing(
    open_llm: Callable[..., LLM], name: str, has_whole_experts: bool
) -> None:
    before, maps = open_files(), mapped_memory()
    prompts = [prompt_of(length, seed=length) for length in (3, 40, 61)]
    experts = {"enable_expert_parallel": has_whole_experts}
    llm = open_llm(name, 2, "bfloat16", kernels="native", **experts)

    together = llm.generate(prompts, LOGPROBS)
    alone = [llm.generate([prompt], LOGPROBS)[0] for prompt in prompts]

    assert [each.token_ids for each in alone] == [each.token_ids for each in together]
    assert [each.logprobs for each in alone] == [each.logprobs for each in together]
    llm.close()
    gc.collect()
    await_value(open_files, lambda now: now <= before, what="files are left open")
    assert mapped_memory() <= maps


ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


@pytest.mark.parametrize(
    ("name", "num_ranks", "settings", "lora"),
    [
        ("llama", 2, {}, {"target_modules": "all-linear"}),
        ("gemma3", 4, {"kernels": "native", "dtype": "bfloat16"}, {"target_modules": "all-linear"}),
        ("phi3", 2, {}, {"target_modules": "all-linear"}),  # fused matrices
        ("qwen3-moe", 2, {}, {"target_modules": "all-linear"}),
        ("qwen3-moe", 2, {"enable_expert_parallel": True}, {"target_modules": "all-linear"}),
        (
            "qwen3-moe",
            2,
            {"enable_expert_parallel": True, "kernels": "native", "dtype": "bfloat16"},
            {"target_modules": "all-linear"},
        ),
        ("qwen2-moe", 2, {}, {"target_modules": "all-linear"}),  # shared experts
        (
            "gpt-oss",
            2,
            {},
            {
                "target_modules": ATTENTION,
                "target_parameters": ["experts.gate_up_proj", "1.mlp.experts.down_proj"],
            },
        ),
        ("deepseek-v3", 2, {}, {"target_modules": "all-linear"}),
        ("gemma3n", 2, {}, {"target_modules": [*ATTENTION, "gate_proj", "up_proj", "down_proj"]}),
    ],
)
def test_ranks_generate_with_adapters_what_one_process_does(
    open_llm: Callable[..., LLM],
    tmp_path: Path,
    name: str,
    num_ranks: int,
    settings: dict[str, Any],
    lora: dict[str, Any],
) -> None:
    is_exact = "dtype" not in settings  # float32
    variant = replace(variant_of(name), dtype=settings.get("dtype", "float32"))
    base = make_model_folder(tmp_path / name, variant)
    first = save_adapter(base, tmp_path / "first", r=4, **lora)
    second = save_adapter(base, tmp_path / "second", r=2, target_modules=["o_proj"])
    adapters = {"first": str(first), "second": str(second)}
    prompts = [prompt_of(length, seed=length) for length in (3, 40, 40, 17)]
    names = ["first", "first", "", "second"]
    one_settings = {**settings, "enable_expert_parallel": False}

    wanted = open_llm(name, 1, lora=adapters, **one_settings).generate(
        prompts, LOGPROBS, lora=names
    )
    llm = open_llm(name, num_ranks, lora=adapters, **settings)
    found = llm.generate(prompts, LOGPROBS, lora=names)
    alone = [llm.generate([p], LOGPROBS, lora=n)[0] for p, n in zip(prompts, names, strict=True)]

    for one, several in zip(wanted, found, strict=True):
        if is_exact:
            assert several.token_ids == one.token_ids
        # Later tokens of bfloat16 can differ by rounding.
        rows = list(zip(one.logprobs, several.logprobs, strict=True))[: None if is_exact else 1]
        for own, others in rows:
            tolerance = TOLERANCE if is_exact else BFLOAT16_TOLERANCE
            assert own.logprob == pytest.approx(dict(others.top)[own.token_id], abs=tolerance)
    assert found[1].token_ids != found[2].token_ids
    assert [each.token_ids for each in alone] == [each.token_ids for each in found]
    if not is_exact:  # native kernels
        assert [each.logprobs for each in alone] == [each.logprobs for each in found]


def test_a_rank_that_hangs_ends_the_engine(
    open_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leading, "PATIENCE_S", 0.5)
    llm = open_llm("llama", 2)
    [rank] = ranks_of(os.getpid())

    os.kill(rank, signal.SIGSTOP)

    with pytest.raises(RunnerLost, match="rank 1 of this node hangs"):
        llm.generate([prompt_of(20)], LOGPROBS)
    with pytest.raises(EngineStopped):
        llm.generate([prompt_of(20)], LOGPROBS)
    llm.close()
    assert ranks_of(os.getpid()) == []


def test_a_rank_that_hangs_while_its_engine_is_idle_is_found(
    open_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leading, "PATIENCE_S", 1.0)
    monkeypatch.setattr(processes, "WATCH_EVERY_S", 0.1)
    llm = open_llm("llama", 2)
    [rank] = ranks_of(os.getpid())
    llm.generate([prompt_of(20)], LOGPROBS)

    os.kill(rank, signal.SIGSTOP)

    await_value(lambda: not is_running(rank))
    with pytest.raises(RunnerLost, match="rank 1 of this node"):
        llm.generate([prompt_of(20)], LOGPROBS)
    llm.close()


def mapped_memory() -> set[str]:
    """Return the maps of memory that ranks share, by address."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    return {line.split()[0] for line in maps.splitlines() if "memfd:baton" in line}


@pytest.mark.parametrize(("kernels", "dtype"), [("torch", "float32"), ("native", "bfloat16")])
def test_ranks_have_the_scales_of_their_heads(tmp_path: Path, kernels: str, dtype: str) -> None:
    """Powers of two: the stored numbers are the same, and so is every bit of the results."""
    by_head = torch.tensor([512.0, 4096.0])
    scales = {"k_scale": by_head, "v_scale": by_head}
    folders = [
        make_model_folder(tmp_path / "plain", VARIANTS["llama"]),
        grown_folder(tmp_path / "grown", by_head, scales),
    ]
    answers = []
    for folder in folders:
        with LLM(
            str(folder),
            tensor_parallel_size=2,
            kv_cache_memory="1MiB",
            kv_cache_dtype="fp8",
            kernels=kernels,
            dtype=dtype,
            num_threads=1,
            show_progress=False,
        ) as llm:
            answers.append(llm.generate([prompt_of(40)], LOGPROBS)[0])

    assert answers[0].token_ids == answers[1].token_ids
    assert answers[0].logprobs == answers[1].logprobs


def test_what_cannot_be_divided_is_refused_by_name(open_llm: Callable[..., LLM]) -> None:
    with pytest.raises(InvalidConfig, match="4 heads"):
        open_llm("llama", 3)
    with pytest.raises(InvalidConfig, match="recurrent layers cannot be divided"):
        open_llm("qwen3-next", 2)
    assert ranks_of(os.getpid()) == []


def test_kv_is_handed_off_between_nodes_of_unlike_numbers_of_ranks(
    cluster_options: Callable[..., ClusterOptions], local: LLM
) -> None:
    options = replace(
        cluster_options(),
        prefill_arguments=("--tensor-parallel-size=2", "--dtype=float32"),
        decode_arguments=("--tensor-parallel-size=4", "--dtype=float32"),
    )
    with LocalCluster(options) as cluster, Client(cluster.address) as client:
        for length in (20, 50, 50):
            prompt = prompt_of(length, seed=length)
            [expected] = local.generate([prompt], LOGPROBS)
            answer = client.generate(prompt, Generation(LOGPROBS))
            assert answer.token_ids == expected.token_ids
            assert answer.finish is not None
            assert answer.finish.served.is_prefill_remote
        [prefill], [decode] = cluster.prefills, cluster.decodes
        [rank], ranks = (ranks_of(node.process.pid) for node in (prefill, decode))
        assert len(ranks) == 3
        os.kill(rank, signal.SIGKILL)
        assert prefill.process.wait(PATIENCE_S) != 0
        decode.process.kill()
        await_value(lambda: not any(map(is_running, ranks)))
