"""The engine in this process, for scripts and notebooks: no servers, no hand-off."""

from __future__ import annotations

import itertools
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType

from baton.completion import Completion, Writer
from baton.interrupts import interrupts_wait
from baton.progress import generation_bar, loading_bar
from baton.stops import StopRule
from baton.text import Tokenizer
from baton.units import AUTO, parse_kv_memory
from engine.assembly import EngineOptions, build_engine, build_grammars
from engine.errors import InvalidRequest
from engine.grammar import Grammar
from engine.request import Output, RequestId, RequestSpec
from engine.runner.load import RunnerConfig, load_runner
from engine.sampling import SamplingParams
from engine.scheduler_config import SchedulerConfig
from engine.speculation import parse_speculation
from engine.structured_outputs import StructuredOutputs

Prompt = str | Sequence[int]


class LLM:
    """A loaded model that answers prompts.

    >>> with LLM("models/demo") as llm:
    ...     [answer] = llm.generate("import os\\n", SamplingParams(max_tokens=20))

    Raises ModelError for faults of the model folder and InvalidConfig for settings.
    """

    def __init__(
        self,
        model: str,
        *,
        dtype: str = "auto",
        device: str = "cpu",
        kv_cache_memory: int | str | None = None,
        block_size: int = 16,
        max_model_len: int | None = None,
        max_num_seqs: int = 128,
        max_num_batched_tokens: int = 2048,
        enable_prefix_caching: bool = True,
        num_threads: int | None = None,
        kernels: str = "auto",
        quantize: str = "none",
        speculative: str = "",
        show_progress: bool | None = None,
    ) -> None:
        self._shows_progress = sys.stderr.isatty() if show_progress is None else show_progress
        config = RunnerConfig(
            model=model,
            dtype=dtype,
            device=device,
            block_size=block_size,
            kv_cache_bytes=parse_kv_memory(AUTO if kv_cache_memory is None else kv_cache_memory),
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            num_threads=num_threads,
            kernels=kernels,
            quantize=quantize,
            speculation=parse_speculation(speculative),
        )
        scheduling = SchedulerConfig(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens
        )
        self._numbers = itertools.count()
        self._lifetime = ExitStack()
        with loading_bar(self._shows_progress) as on_progress:
            runner = self._lifetime.enter_context(load_runner(config, on_progress))
        self.info = runner.info
        self.kv_memory = runner.kv_memory
        self.tokenizer = Tokenizer.from_folder(runner.info.folder)
        self.engine = build_engine(runner, EngineOptions(scheduling, enable_prefix_caching))
        self._grammars = build_grammars(runner)

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the memory back. The LLM cannot be used any more."""
        self._lifetime.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stop: str | Sequence[str] = (),
        include_stop_in_output: bool = False,
    ) -> list[Completion]:
        """Answers in the order of the prompts, which share a batch as far as there is room.

        An answer ends where one of the texts in `stop` is complete in it.

        Raises InvalidRequest, before anything runs, if one of the prompts can never be served.
        A bug that ends the engine is raised as it is; from then on there is EngineStopped.
        """
        specs = self._specs(_as_list(prompts), sampling)
        for place, spec in enumerate(specs):
            self._check(place, spec)
        strings = (stop,) if isinstance(stop, str) else tuple(stop)
        return self._run(specs, StopRule(tuple(filter(None, strings)), include_stop_in_output))

    def _specs(
        self, prompts: list[Prompt], sampling: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[RequestSpec]:
        if not isinstance(sampling, Sequence):
            sampling = [sampling or self.info.defaults.sampling.params()] * len(prompts)
        if len(sampling) != len(prompts):
            raise InvalidRequest(
                f"{len(prompts)} prompts came with {len(sampling)} sampling params: "
                "give one for all, or one for each"
            )
        return [self._spec(prompt, one) for prompt, one in zip(prompts, sampling, strict=True)]

    def _spec(self, prompt: Prompt, sampling: SamplingParams) -> RequestSpec:
        token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        return RequestSpec(
            request_id=RequestId(str(next(self._numbers))),
            prompt_token_ids=tuple(token_ids),
            sampling=sampling,
            seed=secrets.randbits(63) if sampling.seed is None else sampling.seed,
            arrival_s=time.monotonic(),
        )

    def _check(self, place: int, spec: RequestSpec) -> None:
        try:
            self.engine.scheduler.validate(spec)
        except InvalidRequest as refusal:
            raise InvalidRequest(f"prompt {place}: {refusal}") from None

    def _compiled(self, specs: list[RequestSpec]) -> dict[StructuredOutputs, Grammar]:
        """The forms that they ask for, each one time."""
        forms = [spec.sampling.structured_outputs for spec in specs]
        return {form: self._grammars.compile(form) for form in set(forms) if form is not None}

    def _run(self, specs: list[RequestSpec], stop: StopRule) -> list[Completion]:
        self.engine.raise_if_stopped()
        grammars = self._compiled(specs)
        answers = {spec.request_id: self._writer(spec, stop) for spec in specs}
        for spec in specs:
            self.engine.scheduler.add(spec)
            form = spec.sampling.structured_outputs
            if form is not None:
                self.engine.scheduler.grammar_came(spec, grammars[form])
        with interrupts_wait() as stop_here:
            try:
                self._answer(answers, stop_here)
            finally:
                self._leave_nothing(answers)
        return [answer.completion for answer in answers.values()]

    def _writer(self, spec: RequestSpec, stop: StopRule) -> Writer:
        rule = replace(stop, min_tokens=spec.sampling.min_tokens)
        return Writer(spec.prompt_token_ids, self.tokenizer.detokenizer(), rule)

    def _answer(self, answers: dict[RequestId, Writer], stop_here: Callable[[], None]) -> None:
        num_unfinished = len(answers)
        with generation_bar(num_unfinished, self._shows_progress) as advance:
            while num_unfinished:
                stop_here()
                outputs = self._step()
                num_ended = sum(self._take(one, answers[one.request_id]) for one in outputs)
                num_unfinished -= num_ended
                advance(num_ended, sum(len(one.token_ids) for one in outputs))

    def _take(self, output: Output, answer: Writer) -> bool:
        """Whether the answer ended with this."""
        if answer.has_ended:
            answer.take_account(output)
            return False
        has_ended = answer.take(output)
        if has_ended and output.finish_reason is None:  # by a stop string: the engine knows none
            self.engine.scheduler.abort(output.request_id)
        return has_ended

    def _step(self) -> list[Output]:
        by_client = self.engine.step().by_client
        return [output for outputs in by_client.values() for output in outputs]

    def _leave_nothing(self, answers: Mapping[RequestId, Writer]) -> None:
        """After Ctrl-C, too, the engine is as it was before; those that ended do not mind."""
        if self.engine.failure is not None:
            return  # no step can follow, and the failure is on its way to the caller
        for request_id in answers:
            self.engine.scheduler.abort(request_id)
        while self.engine.scheduler.has_work:
            for output in self._step():
                answers[output.request_id].take_account(output)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if prompts and all(isinstance(one, int) for one in prompts):
        return [prompts]  # type: ignore[list-item]  # one prompt of token ids
    return list(prompts)  # type: ignore[arg-type]
