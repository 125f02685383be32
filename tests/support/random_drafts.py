"""Random requests on random deployments that speculate, each answer equal to that without drafts.

    python -m tests.support.random_drafts eagle3 --seed 0 --count 2000

runs so many requests and prints what they covered. A deployment and its requests are those of a
seed, in any run. Answers must have the tokens and logprobs of `baton.LLM` without speculation:
the same bits with native kernels, and within a tolerance in float32, which torch computes.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory

from safetensors.torch import load_file, save_file

from baton.client import Answer, AsyncClient
from baton.cluster import Child, ClusterOptions, LocalCluster
from baton.engine.runner.load import RunnerConfig, load_runner
from baton.engine.spec_decode.config import parse_speculation
from baton.llm import LLM
from tests.support.adapters import write_adapter
from tests.support.draft_heads import make_eagle_folder
from tests.support.families import FAMILY_VARIANTS
from tests.support.mtp_heads import WEIGHTS, make_mtp_folder
from tests.support.random_requests import (
    RandomRequest,
    RequestWorld,
    answers_alone,
    difference,
    draw_requests,
)
from tests.support.scrapes import Scrape

MODELS = Path(__file__).parents[2] / "models"
MAX_MODEL_LEN = 512
ANSWERS_PER_KILL = 8
KILLS = 4  # in some deployments
REQUESTS_PER_DEPLOYMENT = 250
FLOAT32_TOLERANCE = 1e-3
RANDOM_HEAD = "random"
NUM_LAYERS = 2  # of models with a layer for MTP
ADAPTED = ("q_proj", "v_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Method:
    """Method of drafting, and the model that it drafts for."""

    name: str
    mtp_variant: str = ""  # a small model with random weights; empty: the demo model
    speculative_model: str = ""  # or RANDOM_HEAD
    predicts: float = 0.1  # share of the requests that have a prediction


METHODS: Mapping[str, Method] = {
    "ngram": Method("ngram"),
    "suffix": Method("suffix"),
    "prediction": Method("suffix", predicts=1.0),
    "eagle": Method("eagle", speculative_model=RANDOM_HEAD),
    "eagle3": Method("eagle3", speculative_model=str(MODELS / "demo-eagle3")),
    "draft": Method("draft", speculative_model=str(MODELS / "demo")),
    "mtp": Method("mtp", "glm4-moe"),
    "mtp-latent": Method("mtp", "deepseek-v3"),
    "mtp-recurrent": Method("mtp", "qwen3.5"),
}


@dataclass(frozen=True, slots=True)
class Deployment:
    """A cluster, and how it is used."""

    num_prefill: int  # 0: one node does both
    num_decode: int
    is_float32: bool
    speculative: str
    block_size: int
    num_cached: float  # longest requests that a KV cache holds
    num_clients: int
    num_kills: int
    arguments: tuple[str, ...]

    @classmethod
    def draw(cls, method: Method, seed: int) -> Deployment:
        draw = random.Random(seed)
        layout = draw.choice([(0, 1), (1, 1), (1, 1), (2, 2)])
        is_fixed = draw.random() < 0.7
        max_num_seqs = draw.randint(1, 32)
        arguments = [
            f"--max-num-seqs={max_num_seqs}",
            f"--max-num-batched-tokens={max(max_num_seqs, draw.choice([16, 24, 61, 128, 500]))}",
        ]
        if draw.random() < 0.3:
            arguments.append("--async-scheduling")
        return cls(
            *layout,
            is_float32=draw.random() < 0.25,
            speculative=f"{method.name}:{draw.randint(1, 6)}{':fixed' if is_fixed else ''}",
            block_size=draw.choice([8, 16, 16, 32]),
            num_cached=draw.choice([1.1, 1.1, 2.0, 8.0]),
            num_clients=draw.randint(1, 32),
            num_kills=KILLS if layout == (2, 2) and draw.random() < 0.5 else 0,
            arguments=tuple(arguments),
        )


class MethodWorld:
    """Model of a method with its adapter, and the engines that answer without drafts."""

    def __init__(self, method: Method, folder: Path, lifetime: ExitStack) -> None:
        self.method = method
        self.speculative_model = method.speculative_model
        self._lifetime = lifetime
        self._llms: dict[str, LLM] = {}
        self.model = MODELS / "demo"
        tokens = range(300, 2000)
        if method.mtp_variant:
            variant = replace(FAMILY_VARIANTS[method.mtp_variant], dtype="bfloat16")
            self.model = make_mtp_folder(folder / "model", variant, num_layers=NUM_LAYERS)
            tokens = range(4, 320)
        if method.speculative_model == RANDOM_HEAD:
            self.speculative_model = str(make_eagle_folder(folder / "head", self.model))
        adapted = _without_mtp(self.model, folder / "base") if method.mtp_variant else self.model
        adapter = write_adapter(adapted, folder / "adapter", names=ADAPTED)
        self.adapters = {"adapted": str(adapter)}
        self.requests = RequestWorld(MAX_MODEL_LEN, tokens, tuple(self.adapters), 200)

    def llm(self, dtype: str) -> LLM:
        if dtype not in self._llms:
            llm = LLM(
                str(self.model),
                dtype=dtype,
                kv_cache_memory="64MiB",
                max_model_len=MAX_MODEL_LEN,
                num_threads=1,
                show_progress=False,
                lora=self.adapters,
            )
            self._llms[dtype] = self._lifetime.enter_context(llm)
        return self._llms[dtype]

    def cluster_options(self, deployment: Deployment) -> ClusterOptions:
        speculative = (
            f"--speculative={deployment.speculative}",
            f"--speculative-model={self.speculative_model}",
        )
        return ClusterOptions(
            str(self.model),
            deployment.num_prefill,
            deployment.num_decode,
            is_colocated=not deployment.num_prefill,
            node_arguments=(
                *speculative,
                *deployment.arguments,
                *(f"--lora={name}={folder}" for name, folder in self.adapters.items()),
                f"--dtype={'float32' if deployment.is_float32 else 'auto'}",
                f"--block-size={deployment.block_size}",
                f"--kv-cache-memory={self._cache_bytes(deployment)}",
                f"--max-model-len={MAX_MODEL_LEN}",
                *("--threads=1", "--kv-host-memory=0", "--metrics-port=0"),
            ),
        )

    def _cache_bytes(self, deployment: Deployment) -> int:
        config = RunnerConfig(
            str(self.model),
            dtype="float32" if deployment.is_float32 else "auto",
            block_size=deployment.block_size,
            max_model_len=MAX_MODEL_LEN,
            kv_cache_bytes=64 << 20,
            max_num_seqs=1,
            speculation=parse_speculation(deployment.speculative),
            speculative_model=self.speculative_model,
        )
        with load_runner(config) as runner:
            memory = runner.kv_memory
            num_blocks = MAX_MODEL_LEN // deployment.block_size + memory.layout.num_state_blocks * 4
            return int(deployment.num_cached * num_blocks * memory.block_bytes)


def _without_mtp(model: Path, folder: Path) -> Path:
    """Write the tensors that adapters can change: not those of the layer for MTP."""
    tensors = load_file(model / WEIGHTS)
    after_last = (f"model.layers.{NUM_LAYERS}.", "mtp.")
    folder.mkdir()
    kept = {name: each for name, each in tensors.items() if not name.startswith(after_last)}
    save_file(kept, folder / WEIGHTS)
    return folder


@contextmanager
def method_world(name: str) -> Iterator[MethodWorld]:
    with TemporaryDirectory() as folder, ExitStack() as lifetime:
        yield MethodWorld(METHODS[name], Path(folder), lifetime)


@dataclass(slots=True)
class Covered:
    """Counts of what the requests of one or more deployments have used."""

    counts: Counter[str]
    wrong: list[str]


def run_deployment(world: MethodWorld, seed: int, count: int) -> Covered:
    """Answer random requests on a random deployment, and compare them with those alone."""
    deployment = Deployment.draw(world.method, seed)
    draw, requests = random.Random(seed), draw_requests(world.requests, seed, count)
    expected = answers_alone(world.llm("float32" if deployment.is_float32 else "auto"), requests)
    requests = [
        request.predicting(right[0].text) if draw.random() < world.method.predicts else request
        for request, right in zip(requests, expected, strict=True)
    ]
    with LocalCluster(world.cluster_options(deployment)) as cluster:
        answers = asyncio.run(
            answer_all(cluster, requests, deployment.num_clients, num_kills=deployment.num_kills)
        )
        nodes = [*cluster.prefills, *cluster.decodes]
        num_preempted = sum(Scrape(node).total("baton_preemptions_total") for node in nodes)
    counts = _counts(requests, answers)
    counts += Counter(deployments=1, kills=deployment.num_kills, preemptions=int(num_preempted))
    tolerance = FLOAT32_TOLERANCE if deployment.is_float32 else 0.0
    wrong = [
        f"seed {seed}, request {place}: {found}\n{requests[place]}\n{deployment}"
        for place, pair in enumerate(zip(answers, expected, strict=True))
        if (found := difference(*pair, tolerance))
    ]
    return Covered(counts, wrong)


def _counts(requests: Sequence[RandomRequest], answers: Sequence[Sequence[Answer]]) -> Counter[str]:
    counts: Counter[str] = Counter(requests=len(requests))
    for request, its in zip(requests, answers, strict=True):
        counts += Counter(_used_by(request))
        for answer in its:
            assert answer.finish is not None
            served = answer.finish.served
            counts += Counter(
                {
                    "answers": 1,
                    "tokens": len(answer.token_ids),
                    "logprobs": len(answer.logprobs),
                    "drafted tokens": served.tokens_proposed,
                    "accepted tokens": served.tokens_accepted,
                    "handed over": served.is_prefill_remote,
                    "retried or migrated": served.attempts > 1,
                    "prompt tokens cached": served.prompt_tokens_cached_on_decode
                    + (served.prompt_tokens_cached_on_prefill or 0),
                }
            )
    return counts


def _used_by(request: RandomRequest) -> Iterator[str]:
    generation, sampling = request.generation, request.samplings[0]
    used = {
        "greedy": sampling.is_greedy,
        "grammar": sampling.structured_outputs is not None,
        "penalties": sampling.has_penalty,
        "bans": sampling.banned_token_ids or sampling.banned_sequences,
        "allowed tokens": sampling.allowed_token_ids,
        "logit bias": sampling.logit_bias,
        "stop strings": generation.stop,
        "stop tokens": sampling.stop_token_ids,
        "min tokens": sampling.min_tokens,
        "adapter": generation.model,
        "n > 1": generation.n > 1,
        "prediction": generation.prediction,
        "logprobs of tokens": sampling.logprobs is not None,
    }
    return (name for name, is_used in used.items() if is_used)


async def answer_all(
    cluster: LocalCluster, requests: Sequence[RandomRequest], num_clients: int, *, num_kills: int
) -> list[list[Answer]]:
    """Return the answers in the order of `requests`. Nodes are killed and restarted meanwhile."""
    answers: dict[int, list[Answer]] = {}
    places, in_flight = iter(range(len(requests))), set[int]()
    has_answered = asyncio.Condition()

    async def send_on(client: AsyncClient) -> None:
        for place in places:
            request = requests[place]
            in_flight.add(place)
            answers[place] = await client.generate_all(request.prompt, request.generation)
            in_flight.remove(place)
            async with has_answered:
                has_answered.notify_all()

    async def kill_in_turn() -> None:
        """Kill and restart one node after another, each time after some more answers.

        Those to requests of the kill before are among them: a request that several nodes in a row
        die with counts as the cause.
        """
        for i, siblings in zip(range(num_kills), cycle((cluster.decodes, cluster.prefills))):
            killed_with, num_wanted = set(in_flight), len(answers) + ANSWERS_PER_KILL
            async with has_answered:
                while len(answers) < len(requests) and not (
                    killed_with <= answers.keys() and len(answers) >= num_wanted
                ):
                    await has_answered.wait()
            await asyncio.to_thread(_kill_and_restart, cluster, siblings[i // 2 % len(siblings)])

    async with AsyncClient(cluster.address, timeout_s=240) as client, asyncio.TaskGroup() as tasks:
        clients = [tasks.create_task(send_on(client)) for _ in range(num_clients)]
        await kill_in_turn()
        await asyncio.gather(*clients)
    return [answers[place] for place in range(len(requests))]


def _kill_and_restart(cluster: LocalCluster, node: Child) -> None:
    node.process.kill()
    node.process.wait()
    cluster.restart(node)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.random_drafts")
    parser.add_argument("method", choices=METHODS)
    parser.add_argument("--seed", type=int, default=0, help="of the first deployment")
    parser.add_argument("--count", type=int, default=2000, help="of requests")
    arguments = parser.parse_args()
    total = Covered(Counter(), [])
    with method_world(arguments.method) as world:
        seed = arguments.seed
        while total.counts["requests"] < arguments.count:
            left = arguments.count - total.counts["requests"]
            covered = run_deployment(world, seed, min(left, REQUESTS_PER_DEPLOYMENT))
            total.counts.update(covered.counts)
            for line in covered.wrong:
                print(line, file=sys.stderr)
            total.wrong += covered.wrong
            print(f"seed {seed}: {covered.counts['answers']} answers", file=sys.stderr)
            seed += 1
    seeds = f"seeds {arguments.seed} to {seed - 1}"
    print(f"{arguments.method}, {seeds}: {len(total.wrong)} wrong; {dict(total.counts)}")
    return 1 if total.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
