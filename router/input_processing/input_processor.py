"""Prepares calls for the nodes: tokenised prompts, final sampling parameters, checks."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import lru_cache, partial

from baton.core.errors import ContextLengthExceeded, InvalidRequest
from baton.core.ids import ANY_MODEL, ModelVariant
from baton.core.request import EmbedTask, TaskOutput
from baton.core.sampling import fit_max_tokens
from baton.router.input_processing.form_checks import FormChecks
from baton.router.input_processing.limits import (
    LogprobBudget,
    check_prompt_logprobs_fit,
    check_token_vectors_fit,
)
from baton.router.input_processing.model_profiles import ModelProfiles
from baton.router.input_processing.tokenization import LargeTexts, TextBoundary
from baton.router.request_scope import RequestContext
from baton.router.routing.node_table import NodeTable
from baton.router.values import ChatPrompt, GenerateCall, Prompt, TokenPrompt
from baton.rpc.errors import EmptyPrompt, NoNodes, UnknownModel

MAX_REMEMBERED_BAD_WORDS = 16
NO_DRAFTS = "prediction is ignored: the decode nodes run without --speculative, such as suffix:8"


class InputProcessor:
    def __init__(
        self,
        table: NodeTable,
        profiles: ModelProfiles,
        forms: FormChecks | None,  # None: only nodes check forms
    ) -> None:
        self._table = table
        self._profiles = profiles
        self._forms = forms
        # By model: many large texts to embed must not keep chats waiting.
        self._large_texts: defaultdict[str, LargeTexts] = defaultdict(LargeTexts)
        # All answers of a request look up the same words.
        self._spellings = lru_cache(MAX_REMEMBERED_BAD_WORDS)(_compute_spellings)

    async def process(self, call: GenerateCall, context: RequestContext) -> GenerateCall:
        """Return the call as nodes run it: with a TokenPrompt and final sampling parameters.

        Raises UnknownModel, NoNodes, EmptyPrompt, InvalidRequest, UnsupportedInput and QueueFull.
        """
        if call.model == ANY_MODEL:  # it may have arrived before any node did
            call = replace(call, model=self._table.find_model("", call.task))
        self.check_model(call.model)
        self._check_task(call)
        if call.task.sampling is not None:
            call = replace(call, sampling=call.task.sampling, bad_words=(), fills_context=False)
        call = await self._ban_bad_words(call, context.client)
        if call.prediction:
            call = await self._tokenize_prediction(call, context.client)
        tokenized = await self._tokenize(call, context.client)
        num_tokens = len(tokenized.prompt_token_ids)
        context.trace.note_tokenized(num_tokens)
        self._check_prompt(call, num_tokens, context.logprob_budget or LogprobBudget())
        if self._forms is not None and call.sampling.structured_outputs is not None:
            await self._forms.check(call.sampling.structured_outputs, context.client)
        return self._fit_max_tokens(self._begin_after_reasoning(tokenized), num_tokens)

    def check_model(self, model: ModelVariant) -> None:
        """Raise UnknownModel if nodes are known, none serves `model`, and no option names it.

        Raises NoNodes if no node is known, and nodes must tell whose tokenizer the name means.
        """
        if self._profiles.may_be_adapter(model):
            raise NoNodes(
                f"no node has joined this router yet, so that it does not know what model "
                f"{model.name!r} is; send the request again"
            )
        served = self._table.served
        # A request keeps an adapter that has been unloaded or replaced since its name was resolved.
        is_known = model.base in served.bases or self._profiles.is_expected(model)
        if model != ANY_MODEL and served.bases and not is_known:
            raise UnknownModel(
                f"model {model.name!r} is not served here; served: {served.listed()}"
            )

    def _check_task(self, call: GenerateCall) -> None:
        """Raise InvalidRequest if the model cannot do what the request asks for."""
        if call.model.base not in self._table.models:
            return
        served, name = self._table.served_model(call.model), call.model.name
        if call.task.is_pooling and not served.vector_size:
            raise InvalidRequest(
                f"model {name!r} does not embed: its nodes need --pooling last, mean, cls or "
                "tokens, or a model folder with modules.json",
                "model",
            )
        if not call.task.is_pooling and not served.generates:
            raise InvalidRequest(f"model {name!r} generates no text: it only embeds", "model")

    async def _tokenize(self, call: GenerateCall, client: str) -> GenerateCall:
        """Return the call with a TokenPrompt."""
        if not isinstance(call.task, EmbedTask):
            return replace(call, prompt=await self.tokenize(call.prompt, call.model, client))
        text, served = self._profiles.of(call.model).text, self._table.served_model(call.model)
        encode = partial(
            text.encode_text, call.prompt, served.max_model_len, call.max_prompt_tokens
        )
        large_texts = self._large_texts_of(call.model)
        encoded = await large_texts.run(call.prompt.num_characters, encode, client)
        if isinstance(call.prompt, TokenPrompt) and encoded.token_ids and not served.generates:
            text.check_own_tokens(encoded.token_ids)
        return replace(
            call,
            prompt=TokenPrompt(encoded.token_ids),
            task=replace(call.task, second_text_start=encoded.second_start),
            warnings=(_cut_warning(len(encoded.token_ids)),) if encoded.is_cut else (),
        )

    async def token_ids(
        self, prompt: Prompt, model: ModelVariant = ANY_MODEL, client: str = ""
    ) -> tuple[int, ...]:
        return (await self.tokenize(prompt, model, client)).token_ids

    async def tokenize(
        self, prompt: Prompt, model: ModelVariant = ANY_MODEL, client: str = ""
    ) -> TokenPrompt:
        """Tokenise a prompt. Raises ContextLengthExceeded if its text exceeds the context."""
        text = self._profiles.of(model).text
        tokenize = partial(text.tokenize, prompt, self._table.served_model(model).max_model_len)
        return await self._large_texts_of(model).run(prompt.num_characters, tokenize, client)

    async def text(
        self,
        token_ids: tuple[int, ...],
        model: ModelVariant = ANY_MODEL,
        client: str = "",
        *,
        skip_special_tokens: bool = True,
    ) -> str:
        text = self._profiles.of(model).text
        decode = partial(text.text, token_ids, skip_special_tokens=skip_special_tokens)
        return await self._large_texts_of(model).run(len(token_ids), decode, client)

    def _large_texts_of(self, model: ModelVariant) -> LargeTexts:
        # Names that are not served are the clients' own.
        return self._large_texts[model.base if model.base in self._table.models else ""]

    def _check_prompt(
        self, call: GenerateCall, num_prompt_tokens: int, budget: LogprobBudget
    ) -> None:
        """Check what depends on the number of prompt tokens."""
        if num_prompt_tokens == 0 and call.task.is_pooling:
            raise EmptyPrompt("a text has no tokens; there is nothing to embed")
        if num_prompt_tokens == 0:
            raise EmptyPrompt("the prompt has no tokens; there is nothing to continue")
        max_model_len = self._table.served_model(call.model).max_model_len
        if call.task.is_pooling:
            if max_model_len is not None and num_prompt_tokens > max_model_len:
                raise ContextLengthExceeded.of_text(num_prompt_tokens, max_model_len, "input")
            if call.task.output is TaskOutput.VECTORS:
                size = self._table.served_model(call.model).vector_size
                check_token_vectors_fit(num_prompt_tokens, size)
        elif max_model_len is not None and num_prompt_tokens >= max_model_len:
            field = "messages" if isinstance(call.prompt, ChatPrompt) else "prompt"
            raise ContextLengthExceeded.of_prompt(num_prompt_tokens, max_model_len, field)
        budget.spend(num_prompt_tokens, call.sampling.prompt_logprobs)
        check_prompt_logprobs_fit(num_prompt_tokens, call.sampling.prompt_logprobs)

    async def _ban_bad_words(self, call: GenerateCall, client: str) -> GenerateCall:
        """Replace `bad_words` by banned token sequences: nodes have no tokenizer."""
        if not call.bad_words:
            return call
        spell = partial(self._spellings, self._profiles.of(call.model).text, call.bad_words)
        size = sum(map(len, call.bad_words))
        spellings = await self._large_texts_of(call.model).run_in_turn(size, spell, client)
        banned = (*call.sampling.banned_sequences, *spellings)
        return replace(call, sampling=replace(call.sampling, banned_sequences=banned))

    async def _tokenize_prediction(self, call: GenerateCall, client: str) -> GenerateCall:
        """Replace the prediction by its tokens, up to the longest answer.

        It is left out, with a warning, if the decode nodes are known and none proposes drafts.
        """
        served, text = self._table.served_model(call.model), call.prediction
        call = replace(call, prediction="")
        if served.max_model_len is not None and not served.follows_predictions:
            return replace(call, warnings=(*call.warnings, NO_DRAFTS))
        boundary = self._profiles.of(call.model).text
        encode = partial(boundary.encode_prediction, text, served.max_model_len)
        token_ids = await self._large_texts_of(call.model).run(len(text), encode, client)
        return replace(call, predicted_token_ids=token_ids)

    def _begin_after_reasoning(self, call: GenerateCall) -> GenerateCall:
        """Let structured output begin after the reasoning, unless the prompt has ended it."""
        if call.reasoning is None or call.sampling.structured_outputs is None:
            return call
        text = self._profiles.of(call.model).text
        section = call.reasoning.section_after(text.end_of(call.prompt_token_ids))
        return replace(call, sampling=replace(call.sampling, reasoning=section))

    def _fit_max_tokens(self, call: GenerateCall, num_prompt_tokens: int) -> GenerateCall:
        """Lower `max_tokens` to what the model and the KV cache of every decode node can hold."""
        longest = self._table.served_model(call.model).max_sequence_len
        if longest is None:
            return call
        sampling, warning = fit_max_tokens(call.sampling, num_prompt_tokens, longest)
        is_unexpected = warning and not call.fills_context
        warnings = (*call.warnings, warning) if is_unexpected else call.warnings
        return replace(call, sampling=sampling, warnings=warnings)


def _cut_warning(num_tokens: int) -> str:
    return (
        f"a text was cut to {num_tokens} tokens; send shorter ones, or set truncate_prompt_tokens "
        "to the wanted length"
    )


def _compute_spellings(text: TextBoundary, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    return tuple(sorted({tokens for word in words for tokens in text.spellings(word)}))
