"""Runs a batch of requests on the engine of this process, until all have ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from baton.completion import CompletionBuilder, VectorBuilder
from baton.core.ids import RequestId
from baton.core.output import Output
from baton.core.request import EngineRequest
from baton.core.structured_outputs import StructuredOutputs
from baton.engine.core import EngineCore
from baton.engine.structured_output.grammar import Grammar
from baton.interrupts import defer_interrupts
from baton.progress import generation_bar

Builder = CompletionBuilder | VectorBuilder


class BatchRunner:
    def __init__(self, engine: EngineCore) -> None:
        self._engine = engine

    def run(
        self,
        requests: Sequence[EngineRequest],
        builders: Mapping[RequestId, Builder],
        grammars: Mapping[StructuredOutputs, Grammar],
        *,
        shows_progress: bool,
    ) -> None:
        """Run requests to their ends, and give the outputs to their builders."""
        self._engine.raise_if_stopped()
        for request in requests:
            self._engine.scheduler.enqueue(request)
            structured_outputs = request.sampling.structured_outputs
            if structured_outputs is not None:
                self._engine.scheduler.add_grammar(request, grammars[structured_outputs])
        with defer_interrupts() as raise_if_interrupted:
            try:
                with generation_bar(len(builders), shows_progress) as advance:
                    self._run_steps(builders, raise_if_interrupted, advance)
            finally:
                self._abort_all(builders)

    def _run_steps(
        self,
        builders: Mapping[RequestId, Builder],
        raise_if_interrupted: Callable[[], None],
        advance: Callable[[int, int], None],
    ) -> None:
        num_unfinished = len(builders)
        while num_unfinished:
            raise_if_interrupted()
            outputs = self._engine.step()
            num_ended = sum(
                self._take_output(output, builders[output.request_id]) for output in outputs
            )
            num_unfinished -= num_ended
            advance(num_ended, sum(len(output.token_ids) for output in outputs))

    def _take_output(self, output: Output, builder: Builder) -> bool:
        """Return whether `output` ended the completion or the embedding."""
        if builder.has_ended:
            builder.take_usage(output)
            return False
        has_ended = builder.take_output(output)
        # The engine does not know stop strings.
        if has_ended and output.finish_reason is None:
            self._engine.scheduler.abort(output.request_id)
        return has_ended

    def _abort_all(self, builders: Mapping[RequestId, Builder]) -> None:
        """Abort what is unfinished and drain the engine, also after Ctrl-C."""
        if self._engine.failure is not None:
            return  # the engine cannot step, and its failure is being raised to the caller
        for request_id in builders:
            self._engine.scheduler.abort(request_id)
        while self._engine.scheduler.has_work:
            for output in self._engine.step():
                builders[output.request_id].take_usage(output)
