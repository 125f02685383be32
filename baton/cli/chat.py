"""`baton chat`: a conversation in the terminal, or line by line through a pipe."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from baton.cli.connection import connect
from baton.cli.errors import tell
from baton.cli.generate import timing_line
from baton.cli.sampling import MaxTokens, StopStrings, sampling
from baton.cli.show import for_terminal
from baton.cli.signatures import split, takes_options_of
from baton.conversation import PLAIN_STOP, Conversation
from serving.errors import ServiceError

if TYPE_CHECKING:
    import asyncio

    from baton.client import AsyncClient, BatonError, Finish, Generation

CHAT_PANEL = "Chat"
CUT_OFF = "length"  # the finish reason of an answer that reached a limit
HELP = """\
/system TEXT  set the system message; without TEXT, show it
/reset        forget what was said
/exit         leave, as Ctrl-D does
//TEXT        say a TEXT that begins with a slash
Ctrl-C stops an answer; what came of it stays said."""


@takes_options_of(sampling, connect)
def chat(
    system: Annotated[
        str, typer.Option(help="The system message.", rich_help_panel=CHAT_PANEL)
    ] = "",
    plain: Annotated[
        bool,
        typer.Option(
            "--plain",
            help="Without the model's chat template: as a dialogue of User and Assistant.",
            rich_help_panel=CHAT_PANEL,
        ),
    ] = False,
    timings: Annotated[
        bool,
        typer.Option(
            "--timings",
            help="Tell after each answer how long it took and who served it.",
            rich_help_panel=CHAT_PANEL,
        ),
    ] = False,
    max_tokens: MaxTokens = 512,
    stop: StopStrings = None,
    **given: Any,
) -> None:
    """Talk with the model of a running cluster; /help tells what can be typed.

    Through a pipe, each line is one turn, and the answers alone are written.
    """
    import asyncio

    from baton.client import Generation

    for_sampling, for_connection = split(given, sampling, connect)
    chosen = sampling(max_tokens=max_tokens, **for_sampling)
    stops = (*(stop or ()), *([PLAIN_STOP] if plain else ()))
    generation = Generation(chosen, stop=stops)
    with asyncio.Runner() as runner:
        client = runner.run(_opened(for_connection))
        try:
            talk = Talk(
                runner, client, generation, max_tokens, Conversation(system), plain, timings
            )
            if sys.stdin.isatty():
                talk.in_terminal()
            else:
                talk.through_pipe()
        finally:
            runner.run(client.__aexit__(None, None, None))


async def _opened(for_connection: dict[str, Any]) -> AsyncClient:
    """A channel belongs to the loop in which it was made."""
    client: AsyncClient = connect(**for_connection)
    return client


class NoAnswer(ServiceError):
    """A question was refused or failed; the conversation is as it was before."""


@dataclass(slots=True)
class Talk:
    """One conversation with a router."""

    runner: asyncio.Runner  # turns Ctrl-C into the end of the answer that comes
    client: AsyncClient
    generation: Generation
    max_tokens: int
    conversation: Conversation
    is_plain: bool
    timings: bool

    def in_terminal(self) -> None:
        import readline  # noqa: F401  # makes `input` an editor with a history

        print("Ctrl-C stops an answer, Ctrl-D leaves, /help tells more", file=sys.stderr)
        goes_on = True
        while goes_on:
            try:
                goes_on = self._obey(input("> "))
            except NoAnswer as error:
                tell(str(error))
            except KeyboardInterrupt:
                print("\nCtrl-D or /exit leaves", file=sys.stderr)
            except EOFError:
                print(file=sys.stderr)
                goes_on = False

    def through_pipe(self) -> None:
        """A question that fails ends it: those after it may build on its answer."""
        for line in sys.stdin:
            if not self._obey(line.rstrip("\n")):
                return

    def _obey(self, line: str) -> bool:
        """False when the line asks to leave."""
        if line.startswith("/") and not line.startswith("//"):
            return self._command(line)
        if line.strip():
            self._ask(line.removeprefix("/") if line.startswith("//") else line)
        return True

    def _command(self, line: str) -> bool:
        name, _, rest = line[1:].partition(" ")
        commands: dict[str, Callable[[], None]] = {
            "help": lambda: print(HELP, file=sys.stderr),
            "reset": self.conversation.reset,
            "system": lambda: self._system(rest.strip()),
        }
        if name in ("exit", "quit"):
            return False
        if name in commands:
            commands[name]()
        else:
            tell(f"no command /{name}; /help tells which there are")
        return True

    def _system(self, text: str) -> None:
        if text:
            self.conversation.system = text
        else:
            print(self.conversation.system or "(no system message)", file=sys.stderr)

    def _ask(self, content: str) -> None:
        from baton.client import BatonError

        self.conversation.ask(content)
        try:
            answer = self._stream()
        except BatonError as error:
            self.conversation.take_back()
            raise NoAnswer(f"{error}{self._hint(error)}") from error
        self.conversation.answer(answer)

    def _stream(self) -> str:
        """The answer, shown as it comes; as much of it as came before Ctrl-C."""
        from baton.client import Answer

        asked = self.conversation
        prompt = asked.plain_text if self.is_plain else asked.messages
        answer = Answer()

        async def stream() -> None:
            async with aclosing(self.client.stream(prompt, self.generation)) as chunks:
                async for chunk in chunks:
                    answer.take(chunk)
                    print(for_terminal(chunk.text), end="", flush=True)

        try:
            self.runner.run(stream())
        except KeyboardInterrupt:
            print(" (stopped)", end="", file=sys.stderr, flush=True)
        print(flush=True)
        if answer.finish is not None:
            self._tell_end(answer.finish)
        return answer.text

    def _tell_end(self, finish: Finish) -> None:
        if finish.reason == CUT_OFF:
            print(f"({self._limit(finish)})", file=sys.stderr)
        if self.timings:
            print(timing_line(finish), file=sys.stderr)

    def _limit(self, finish: Finish) -> str:
        """Which limit cut the answer off, and what to do."""
        if finish.num_completion_tokens < self.max_tokens:
            return "cut off: the conversation has the model's whole length; /reset begins anew"
        return f"cut off after --max-tokens {self.max_tokens}; ask it to go on, or allow more"

    def _hint(self, error: BatonError) -> str:
        if error.reason != "INVALID_REQUEST":
            return ""
        if self.conversation.turns:
            return "; /reset begins anew"
        return "" if self.is_plain else "; --plain does without a chat template"
