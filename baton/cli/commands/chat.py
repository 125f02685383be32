"""`baton chat`: a conversation in the terminal, or line by line through a pipe."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from baton.cli.commands.generate import timing_line
from baton.cli.errors import print_error
from baton.cli.options.connection import connect
from baton.cli.options.sampling import MaxTokens, StopStrings, sampling
from baton.cli.show import for_terminal
from baton.cli.signatures import inherit_options, make
from baton.core.errors import NamedError
from baton.core.options import Option

if TYPE_CHECKING:
    import asyncio

    from baton.client import AsyncClient, BatonError, Finish, Generation

Message = Mapping[str, Any]  # role, content and images

NAMES = {"user": "User", "assistant": "Assistant"}
# Stop string for models without a chat template, which would go on with the user's turn.
PLAIN_STOP = "\nUser:"
CHAT = "Chat"
CUT_OFF = "length"
HELP = """\
/system TEXT  set the system message; without TEXT, show it
/image FILE   send an image with the next question
/reset        clear the conversation
/exit         quit, like Ctrl-D
//TEXT        send a TEXT that begins with a slash
Ctrl-C stops an answer; its text so far stays in the conversation."""


@inherit_options(sampling, connect)
def chat(
    system: Annotated[str, Option("The system message.", CHAT)] = "",
    plain: Annotated[
        bool,
        Option(
            "Do not use the model's chat template but a dialogue of User and Assistant.",
            CHAT,
            flags=("--plain",),
        ),
    ] = False,
    timings: Annotated[
        bool,
        Option(
            "Print timings and the serving nodes after each answer.", CHAT, flags=("--timings",)
        ),
    ] = False,
    model: Annotated[str, Option("Model to use. Default: the only one that generates.", CHAT)] = "",
    max_tokens: MaxTokens = 512,
    stop: StopStrings = None,
    **given: Any,
) -> None:
    """Chat with the model of a running cluster; /help lists the commands.

    From a pipe, each line is one turn, and only the answers are printed.
    """
    from baton.cli.event_loop import interruptible_runner
    from baton.client import Generation

    stops = (*(stop or ()), *([PLAIN_STOP] if plain else ()))
    chosen = make(sampling, given | {"max_tokens": max_tokens})
    generation = Generation(chosen, model=model, stop=stops)
    with interruptible_runner() as runner:
        client = runner.run(_open_client(given))
        try:
            talk = ChatSession(
                runner, client, generation, max_tokens, ChatHistory(system), plain, timings
            )
            if sys.stdin.isatty():
                talk.in_terminal()
            else:
                talk.through_pipe()
        finally:
            runner.run(client.__aexit__(None, None, None))


async def _open_client(given: dict[str, Any]) -> AsyncClient:
    """Open the client inside the event loop: a gRPC channel belongs to the loop that made it."""
    client: AsyncClient = make(connect, given)
    return client


@dataclass(slots=True)
class ChatHistory:
    system: str = ""
    turns: list[Message] = field(default_factory=list)
    images: list[bytes] = field(default_factory=list)  # of the next question

    @property
    def messages(self) -> list[Message]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.turns]

    @property
    def plain_text(self) -> str:
        """The chat as a plain text dialogue, for models without a chat template."""
        lines = [f"{NAMES[turn['role']]}: {turn['content'].strip()}" for turn in self.turns]
        return "\n".join(([self.system, ""] if self.system else []) + lines) + "\nAssistant:"

    def ask(self, content: str) -> None:
        images = {"images": self.images} if self.images else {}
        self.turns.append({"role": "user", "content": content, **images})
        self.images = []

    def answer(self, content: str) -> None:
        """Append the answer of the model, which may be incomplete."""
        self.turns.append({"role": "assistant", "content": content})

    def remove_question(self) -> None:
        """Remove a question without an answer, and its images: templates want alternating roles."""
        self.turns.pop()

    def reset(self) -> None:
        self.turns.clear()
        self.images.clear()


class TurnFailed(NamedError):
    """A turn was refused or failed; the conversation is unchanged."""


@dataclass(slots=True)
class ChatSession:
    """One conversation with a router."""

    runner: asyncio.Runner  # turns Ctrl-C into the end of the current answer
    client: AsyncClient
    generation: Generation
    max_tokens: int
    conversation: ChatHistory
    is_plain: bool
    timings: bool

    def in_terminal(self) -> None:
        import readline  # noqa: F401  # makes `input` an editor with a history

        print("Ctrl-C stops an answer, Ctrl-D quits, /help lists the commands", file=sys.stderr)
        is_open = True
        while is_open:
            try:
                is_open = self._handle_line(input("> "))
            except TurnFailed as error:
                print_error(str(error))
            except KeyboardInterrupt:
                print("\nCtrl-D or /exit quits", file=sys.stderr)
            except EOFError:
                print(file=sys.stderr)
                is_open = False

    def through_pipe(self) -> None:
        """Run one turn per line until one fails: later lines may build on its answer."""
        for line in sys.stdin:
            if not self._handle_line(line.rstrip("\n")):
                return

    def _handle_line(self, line: str) -> bool:
        """Run a command or a turn. Return False if the line quits."""
        if line.startswith("/") and not line.startswith("//"):
            return self._run_command(line)
        if line.strip():
            self._run_turn(line.removeprefix("/") if line.startswith("//") else line)
        return True

    def _run_command(self, line: str) -> bool:
        name, _, rest = line[1:].partition(" ")
        commands: dict[str, Callable[[], None]] = {
            "help": lambda: print(HELP, file=sys.stderr),
            "reset": self.conversation.reset,
            "system": lambda: self._set_system(rest.strip()),
            "image": lambda: self._add_image(rest.strip()),
        }
        if name in ("exit", "quit"):
            return False
        if name in commands:
            commands[name]()
        else:
            print_error(f"no command /{name}; /help lists them")
        return True

    def _add_image(self, name: str) -> None:
        if not name:
            print_error("name the file of an image: /image FILE")
            return
        try:
            self.conversation.images.append(Path(name).expanduser().read_bytes())
        except OSError as error:
            print_error(f"{name}: {error.strerror}")

    def _set_system(self, text: str) -> None:
        if text:
            self.conversation.system = text
        else:
            print(self.conversation.system or "(no system message)", file=sys.stderr)

    def _run_turn(self, content: str) -> None:
        from baton.client import BatonError

        self.conversation.ask(content)
        try:
            answer = self._stream()
        except BatonError as error:
            self.conversation.remove_question()
            raise TurnFailed(f"{error}{self._hint(error)}") from error
        self.conversation.answer(answer)

    def _stream(self) -> str:
        """Stream the answer to the terminal and return its text, up to Ctrl-C."""
        from baton.client import Answer

        conversation = self.conversation
        prompt = conversation.plain_text if self.is_plain else conversation.messages
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
            self._print_finish(answer.finish)
        return answer.text

    def _print_finish(self, finish: Finish) -> None:
        if finish.reason == CUT_OFF:
            print(f"({self._explain_limit(finish)})", file=sys.stderr)
        if self.timings:
            print(timing_line(finish), file=sys.stderr)

    def _explain_limit(self, finish: Finish) -> str:
        """Name the limit that cut the answer off, and the remedy."""
        if finish.num_completion_tokens < self.max_tokens:
            return "cut off: the conversation fills the model's context; /reset starts over"
        return f"cut off after --max-tokens {self.max_tokens}; ask it to go on, or allow more"

    def _hint(self, error: BatonError) -> str:
        if error.reason != "INVALID_REQUEST":
            return ""
        if self.conversation.turns:
            return "; /reset starts over"
        return "" if self.is_plain else "; --plain needs no chat template"
