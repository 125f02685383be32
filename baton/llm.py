"""Offline inference with an engine in this process: no servers, no hand-off."""

from __future__ import annotations

import itertools
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

from baton import openmp  # before what imports torch
from baton.batch_runner import BatchRunner
from baton.checkpoint.hub import open_checkpoint
from baton.checkpoint.peft_folder import PeftFolder
from baton.checkpoint.tokenizer import EncodedText, Message, Tokenizer
from baton.completion import Completion, CompletionBuilder, VectorBuilder
from baton.core.errors import InvalidConfig, InvalidRequest
from baton.core.ids import AdapterRef, RequestId
from baton.core.output import RAW_LOGPROBS
from baton.core.request import EMBED, TOKEN_EMBED, UNSAMPLED, EmbedTask, EngineRequest, TaskOutput
from baton.core.sampling import SamplingParams, fit_max_tokens
from baton.core.stop_strings import StopRule
from baton.core.structured_outputs import StructuredOutputs
from baton.core.units import AUTO, parse_kv_memory
from baton.core.vectors import Floats, check_dimensions, scaled, shorten
from baton.engine.config import EngineOptions
from baton.engine.factory import build_engine, build_grammars
from baton.engine.runner.config import WEIGHT_CACHE_VARIABLE, RunnerConfig, weight_cache_folder
from baton.engine.runner.open_runner import open_runner
from baton.engine.scheduler.config import SchedulerConfig
from baton.engine.scheduler.validation import max_sequence_length
from baton.engine.spec_decode.config import parse_speculation
from baton.engine.structured_output.grammar import Grammar
from baton.kernels import build_missing_kernels
from baton.progress import loading_bar
from baton.router.pictures.formats import find_format
from baton.text_encoder import TextEncoder

if TYPE_CHECKING:
    from rich.console import Console

    from baton.prompt_images import AnyImage, ImagePrompts

Prompt = str | Sequence[int]
Chat = Sequence[Message]


class LLM:
    """A loaded model that generates completions in this process.

    >>> with LLM("models/demo") as llm:
    ...     [completion] = llm.generate("import os\\n", SamplingParams(max_tokens=20))

    Raises ModelError for a faulty model folder and InvalidConfig for invalid settings.
    """

    def __init__(
        self,
        model: str,
        *,
        mmproj: str = "",  # of a GGUF model's vision tower, if it is not next to it
        dtype: str = "auto",
        device: str = "cpu",
        kv_cache_memory: int | str | None = None,
        block_size: int = 16,
        kv_cache_dtype: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 128,
        max_num_batched_tokens: int = 2048,
        enable_prefix_caching: bool = True,
        num_threads: int | None = None,  # of each process
        tensor_parallel_size: int = 1,  # processes, each with a part of every layer
        enable_expert_parallel: bool = False,  # each of them with some of the experts
        kernels: str = "auto",
        batch_invariant: bool = False,
        enforce_eager: bool = False,
        quantize: str = "none",
        quantize_importance: str = "",
        activation_dtype: str = "auto",
        pooling: str = "auto",
        lora: Mapping[str, str] | None = None,  # folders of adapters, by name
        max_lora_rank: int = 64,
        speculative: str = "",
        speculative_model: str = "",
        logprobs_mode: str = RAW_LOGPROBS,
        weight_cache_dir: str = "",  # as weight-cache-dir
        show_progress: bool | None = None,
        tokenizer: Tokenizer | None = None,  # None: that of the model folder
    ) -> None:
        self._shows_progress = sys.stderr.isatty() if show_progress is None else show_progress
        config = RunnerConfig(
            model=model,
            mmproj=mmproj,
            dtype=dtype,
            device=device,
            block_size=block_size,
            kv_cache_dtype=kv_cache_dtype,
            kv_cache_bytes=parse_kv_memory(AUTO if kv_cache_memory is None else kv_cache_memory),
            nodes_per_machine=1,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            num_threads=num_threads,
            tensor_parallel_size=tensor_parallel_size,
            enable_expert_parallel=enable_expert_parallel,
            kernels=kernels,
            batch_invariant=batch_invariant,
            enforce_eager=enforce_eager,
            quantize=quantize,
            quantize_importance=quantize_importance,
            activation_dtype=activation_dtype,
            pooling=pooling,
            max_loras=len(lora or ()),
            max_lora_rank=max_lora_rank,
            weight_cache_dir=weight_cache_folder(
                weight_cache_dir or os.environ.get(WEIGHT_CACHE_VARIABLE, "")
            ),
            speculation=parse_speculation(speculative),
            speculative_model=speculative_model,
            logprobs_mode=logprobs_mode,
        )
        scheduling = SchedulerConfig(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens
        )
        self._request_numbers = itertools.count()
        self._lifetime = ExitStack()
        if device == "cpu":
            openmp.warn_if_threads_spin()
        checkpoint = open_checkpoint(model, mmproj=mmproj)
        self.tokenizer = tokenizer or checkpoint.load_tokenizer()  # before what takes longer
        build_missing_kernels(config, checkpoint, self._open_screen)
        with loading_bar(self._shows_progress) as on_progress:
            runner = self._lifetime.enter_context(open_runner(config, on_progress))
        self._runner = runner
        self.info = runner.info
        self.kv_memory = runner.kv_memory
        self.engine = build_engine(runner, EngineOptions(scheduling, enable_prefix_caching))
        self._batches = BatchRunner(self.engine)
        self._grammars = build_grammars(runner)
        self._adapters = {name: self._load_adapter(folder) for name, folder in (lora or {}).items()}

    def _open_screen(self) -> Console:
        from rich.console import Console

        return Console(stderr=True, quiet=not self._shows_progress)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the memory. The LLM cannot be used afterwards."""
        self._lifetime.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stop: str | Sequence[str] = (),
        include_stop_in_output: bool = False,
        lora: str | Sequence[str] = "",
        images: Sequence[Sequence[AnyImage]] = (),
        on_text: Callable[[int, str], object] | None = None,
    ) -> list[Completion]:
        """Return a completion for each prompt, in order. The prompts are batched.

        `on_text` is called with the index of a prompt and each new piece of its completion's text.
        There is no progress bar then.

        `images` are those of each prompt, for its marks of images in turn, such as `<image>`: names
        of files, their bytes, or images of Pillow.
        `lora` names the adapter of all prompts, or that of each; empty: none.

        A completion ends at the first of the `stop` strings that it contains.

        Raises InvalidRequest, before anything runs, if one of the prompts can never be served.
        An exception that ends the engine is raised unchanged; later calls raise EngineStopped.
        """
        requests = self._with_adapters(self._requests(_as_list(prompts), sampling), lora)
        if images:
            requests = self._with_images(_as_list(prompts), requests, images)
        fitted = [self._fit(index, request) for index, request in enumerate(requests)]
        stop_strings = (stop,) if isinstance(stop, str) else tuple(stop)
        rule = StopRule(tuple(filter(None, stop_strings)), include_stop_in_output)
        completions = self._complete([request for request, _ in fitted], rule, on_text)
        for completion, (_, warning) in zip(completions, fitted, strict=True):
            completion.warnings += [warning] if warning else []
        return completions

    def chat(
        self,
        chats: Chat | Sequence[Chat],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stop: str | Sequence[str] = (),
        template_variables: Mapping[str, object] | None = None,
        lora: str | Sequence[str] = "",
        on_text: Callable[[int, str], object] | None = None,
    ) -> list[Completion]:
        """Return the model's answer to each chat, in order. The chats are batched.

        A chat is a list of messages, such as `{"role": "user", "content": "Hello"}`. The model's
        chat template gets `template_variables`, such as `{"enable_thinking": False}`. Answers are
        as the model writes them: reasoning and tool calls are not separated. `on_text`
        is that of `generate`.

        Raises InvalidRequest for a model without a template, and as `generate` does.
        """
        prompts: list[Sequence[int]] = []
        for index, chat in enumerate(_as_chats(chats)):
            with _naming("chat", index):
                prompts.append(self.tokenizer.encode_chat(chat, template_variables))
        return self.generate(prompts, sampling, stop=stop, lora=lora, on_text=on_text)

    def embed(
        self,
        texts: Prompt | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        truncate_prompt_tokens: int | None = None,
        lora: str | Sequence[str] = "",
    ) -> list[Floats]:
        """Return the embedding of each text, in order. The texts are batched.

        `lora` names the adapter of all texts, or that of each; empty: none.
        `dimensions` keeps the first ones of models that were trained for it (Matryoshka).
        `truncate_prompt_tokens` cuts longer texts at their ends; -1: to what the model takes.

        Raises InvalidRequest, before anything runs, if the model does not embed or a text is too
        long, and EmbeddingFailed if the model computed no finite numbers.
        """
        return self._embed(texts, EMBED, dimensions, truncate_prompt_tokens, lora)

    def embed_tokens(
        self,
        texts: Prompt | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        truncate_prompt_tokens: int | None = None,
        lora: str | Sequence[str] = "",
    ) -> list[Floats]:
        """Return a matrix for each text, in order, with a vector of each of its tokens.

        Arguments and errors are those of `embed`.
        """
        return self._embed(texts, TOKEN_EMBED, dimensions, truncate_prompt_tokens, lora)

    def _embed(
        self,
        texts: Prompt | Sequence[Prompt],
        task: EmbedTask,
        dimensions: int | None,
        truncate_prompt_tokens: int | None,
        lora: str | Sequence[str],
    ) -> list[Floats]:
        check_dimensions(dimensions, self.info.vector_size or self.info.hidden_size)
        encoder = self._text_encoder(truncate_prompt_tokens)
        encoded = [encoder.text(text) for text in _as_list(texts)]
        return [shorten(vector, dimensions) for vector in self._pool(encoded, lora, task)]

    def score(
        self,
        query: str,
        documents: str | Sequence[str],
        *,
        truncate_prompt_tokens: int | None = None,
    ) -> list[float]:
        """Return a score for each document, higher for those that fit the query better.

        Rerankers score pairs of query and document; of embedders it is the cosine similarity.
        Raises what `embed` does, and InvalidRequest for a classifier of several labels.
        """
        documents = [documents] if isinstance(documents, str) else documents
        encoder = self._text_encoder(truncate_prompt_tokens)
        pooling = self.info.pooling
        if pooling is None or not pooling.num_labels:
            vectors = self._pool([encoder.text(text) for text in (query, *documents)])
            first, *others = map(scaled, vectors)
            return [float(first @ other) for other in others]
        if pooling.num_labels > 1:
            raise InvalidRequest(
                f"this model gives {pooling.num_labels} scores for a text; a reranker gives one"
            )
        pairs = [encoder.pair(query, document) for document in documents]
        return [float(vector[0]) for vector in self._pool(pairs)]

    def _text_encoder(self, truncate_prompt_tokens: int | None) -> TextEncoder:
        return TextEncoder(self.tokenizer, self.info.max_model_len, truncate_prompt_tokens)

    def _pool(
        self, texts: Sequence[EncodedText], lora: str | Sequence[str] = "", task: EmbedTask = EMBED
    ) -> list[Floats]:
        """Return the vectors of texts, or a matrix of those of its tokens for each."""
        plain = [
            replace(
                self._make_request(text.token_ids, UNSAMPLED),
                task=replace(task, second_text_start=text.second_start),
            )
            for text in texts
        ]
        requests = self._with_adapters(plain, lora)
        for index, request in enumerate(requests):
            with _naming("prompt", index):
                self.engine.scheduler.validate(request)
        builders = {request.request_id: VectorBuilder() for request in requests}
        self._batches.run(requests, builders, {}, shows_progress=self._shows_progress)
        vectors = [builder.finish(index) for index, builder in enumerate(builders.values())]
        if task.output is TaskOutput.VECTOR:
            return vectors
        num_tokens = [len(text.token_ids) for text in texts]
        return [each.reshape(count, -1) for each, count in zip(vectors, num_tokens, strict=True)]

    def _load_adapter(self, folder: str) -> str:
        """Load an adapter and return its id."""
        table = self._runner.adapters
        if table is None:
            raise InvalidConfig("this model takes no adapters: leave out lora")
        files = PeftFolder(Path(folder), table.limits)
        adapter_id = files.digest()
        table.add(adapter_id, table.load(files))
        self.engine.scheduler.adapters.add(adapter_id)
        return adapter_id

    def _with_adapters(
        self, requests: list[EngineRequest], lora: str | Sequence[str]
    ) -> list[EngineRequest]:
        names = [lora] * len(requests) if isinstance(lora, str) else lora
        if len(names) != len(requests):
            raise InvalidRequest(f"lora names {len(names)} adapters for {len(requests)} prompts")
        for name in {*names} - {""} - self._adapters.keys():
            raise InvalidRequest(f"there is no adapter {name!r}: pass its folder in LLM(lora=)")
        return [
            replace(request, adapter=AdapterRef(name, self._adapters[name])) if name else request
            for request, name in zip(requests, names, strict=True)
        ]

    def _requests(
        self, prompts: list[Prompt], sampling: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[EngineRequest]:
        if not isinstance(sampling, Sequence):
            sampling = [sampling or self.info.defaults.sampling.params()] * len(prompts)
        if len(sampling) != len(prompts):
            raise InvalidRequest(
                f"{len(prompts)} prompts, but {len(sampling)} sampling params: "
                "pass one for all prompts, or one for each"
            )
        return [
            self._make_request(prompt, each) for prompt, each in zip(prompts, sampling, strict=True)
        ]

    def _make_request(self, prompt: Prompt, sampling: SamplingParams) -> EngineRequest:
        token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        return EngineRequest(
            request_id=RequestId(str(next(self._request_numbers))),
            prompt_token_ids=tuple(token_ids),
            sampling=sampling,
            seed=secrets.randbits(63) if sampling.seed is None else sampling.seed,
            arrival_s=time.monotonic(),
        )

    def _with_images(
        self,
        prompts: Sequence[Prompt],
        requests: Sequence[EngineRequest],
        images: Sequence[Sequence[AnyImage]],
    ) -> list[EngineRequest]:
        if len(images) != len(prompts):
            raise InvalidRequest(
                f"{len(prompts)} prompts, but {len(images)} lists of images: pass one for each"
            )
        found: list[EngineRequest] = []
        for index, (text, request, its) in enumerate(zip(prompts, requests, images, strict=True)):
            with _naming("prompt", index):
                found.append(self._with_its_images(text, request, its) if its else request)
        return found

    def _with_its_images(
        self, text: Prompt, request: EngineRequest, images: Sequence[AnyImage]
    ) -> EngineRequest:
        if not isinstance(text, str):
            raise InvalidRequest("images need a text with a mark for each, not token ids")
        if self._image_prompts is None:
            raise InvalidRequest("this model takes no images: leave them out")
        return self._image_prompts.add_to(request, text, images)

    @cached_property
    def _image_prompts(self) -> ImagePrompts | None:
        from baton.prompt_images import ImagePrompts  # imports readers of pictures

        images_as = find_format(self.info.checkpoint) if self.info.encodes_pictures else None
        return None if images_as is None else ImagePrompts(self.tokenizer, images_as)

    def _fit(self, index: int, request: EngineRequest) -> tuple[EngineRequest, str]:
        """Return the request as it can be served, and a warning if that is less than requested."""
        scheduler = self.engine.scheduler
        longest = max_sequence_length(scheduler.config, scheduler.cache_config)
        with _naming("prompt", index):
            sampling, warning = fit_max_tokens(
                request.sampling, len(request.prompt_token_ids), longest
            )
            fitted = replace(request, sampling=sampling)
            scheduler.validate(fitted)
        return fitted, warning

    def _compile_grammars(self, requests: list[EngineRequest]) -> dict[StructuredOutputs, Grammar]:
        """Compile the structured outputs of all requests, each once."""
        formats = {request.sampling.structured_outputs for request in requests}
        return {each: self._grammars.compile(each) for each in formats if each is not None}

    def _complete(
        self,
        requests: list[EngineRequest],
        stop: StopRule,
        on_text: Callable[[int, str], object] | None,
    ) -> list[Completion]:
        self.engine.raise_if_stopped()
        grammars = self._compile_grammars(requests)
        builders = {
            request.request_id: self._new_builder(
                request, stop, on_text and partial(on_text, index)
            )
            for index, request in enumerate(requests)
        }
        shows_bar = self._shows_progress and on_text is None
        self._batches.run(requests, builders, grammars, shows_progress=shows_bar)
        return [builder.completion for builder in builders.values()]

    def _new_builder(
        self, request: EngineRequest, stop: StopRule, on_text: Callable[[str], object] | None
    ) -> CompletionBuilder:
        rule = replace(stop, min_tokens=request.sampling.min_tokens)
        return CompletionBuilder(request, self.tokenizer.detokenizer(), rule, on_text)


@contextmanager
def _naming(what: str, index: int) -> Iterator[None]:
    """Name the prompt or chat in an InvalidRequest."""
    try:
        yield
    except InvalidRequest as error:
        raise InvalidRequest(f"{what} {index}: {error}") from None


def _as_chats(chats: Chat | Sequence[Chat]) -> Sequence[Chat]:
    return [chats] if chats and isinstance(chats[0], Mapping) else chats  # type: ignore[list-item,return-value]


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if prompts and all(isinstance(item, int) for item in prompts):
        return [prompts]  # type: ignore[list-item]  # a single prompt of token ids
    return list(prompts)  # type: ignore[arg-type]
