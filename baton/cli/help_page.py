"""Help pages: plain text; of commands with many options the most used ones first."""

from __future__ import annotations

import textwrap
from typing import Any

import typer

OF_NODES = (
    "model", "host", "port", "node_id", "threads", "cpus",
    "kv_cache_memory", "max_num_seqs", "max_model_len", "quantize", "metrics_port",
)  # fmt: skip
# Options on the first page of a command. Commands that are not here show all of theirs.
FIRST_OPTIONS = {
    "up": (
        "model", "embed", "prefill", "decode", "restart", "port", "http_port",
        "kv_cache_memory", "kv_host_memory", "kv_folder", "max_model_len", "quantize",
    ),
    "serve prefill": OF_NODES,
    "serve decode": OF_NODES,
    "serve encode": OF_NODES,
    "serve router": (
        "model", "prefill_nodes", "decode_nodes", "host", "port", "http_port", "policy",
        "token_file", "tls_cert", "tls_key", "metrics_port",
    ),
    "run": (
        "model", "max_tokens", "temperature", "top_p", "stop", "seed", "json_schema",
        "threads", "kv_cache_memory", "speculative",
    ),
    "generate": (
        "address", "token_file", "max_tokens", "temperature", "top_p", "stop", "seed",
        "json_schema", "n", "as_json", "timings",
    ),
    "chat": (
        "system", "address", "token_file", "max_tokens", "temperature", "top_p", "stop", "seed",
        "timings",
    ),
    "bench serve": (
        "address", "model", "requests", "rates", "prompt_tokens", "output_tokens", "compare",
        "plots", "json_file", "seed",
    ),
}  # fmt: skip
ALWAYS = ("help", "config")  # on each first page
SHOWS_ALL = "baton.help_all"
SETTINGS_LINE = "--show-config also lists settings, which only files and the environment set."
MAX_NAME_WIDTH = 28  # of an option; a longer one has its own line


def show_help_all(context: typer.Context, is_wanted: bool) -> None:
    """Print the help page with all options, then end the command."""
    if is_wanted and not context.resilient_parsing:
        context.meta[SHOWS_ALL] = True
        print(context.get_help())
        raise typer.Exit


def write_options(context: Any, formatter: Any, command: str) -> None:
    """Write the arguments and options of `command`; all of them after --help-all."""
    params = context.command.get_params(context)
    arguments = [one for one in params if one.param_type_name == "argument"]
    options = [one for one in params if one.param_type_name == "option" and not one.hidden]
    _write_params(context, formatter, "Arguments", arguments)
    if command not in FIRST_OPTIONS or context.meta.get(SHOWS_ALL):
        for panel in dict.fromkeys(map(_panel, options)):
            in_panel = [one for one in options if _panel(one) == panel]
            _write_params(context, formatter, panel, in_panel)
        if any(one.hidden and not one.is_eager for one in params):
            formatter.write(f"\n  {SETTINGS_LINE}\n")
        return
    by_name = {one.name: one for one in options}
    first = [by_name[name] for name in (*FIRST_OPTIONS[command], *ALWAYS)]
    _write_params(context, formatter, "Options", first)
    num_more = len(options) - len(first)
    formatter.write(f"\n  {context.command_path} --help-all shows {num_more} more options.\n")


def write_commands(context: Any, formatter: Any) -> None:
    """Write the commands of a group with their summaries."""
    commands = context.command.commands.items()
    _write_rows(formatter, "Commands", [(name, one.help.split("\n")[0]) for name, one in commands])


def _panel(option: Any) -> str:
    return option.rich_help_panel or "Options"


def _write_params(context: Any, formatter: Any, title: str, params: list[Any]) -> None:
    _write_rows(formatter, title, [one.get_help_record(context) for one in params])


def _write_rows(formatter: Any, title: str, rows: list[tuple[str, str]]) -> None:
    """Write names with their texts. No name is cut or wrapped, within texts neither."""
    if not rows:
        return
    formatter.write(f"\n{title}:\n")
    indent = min(MAX_NAME_WIDTH, max(len(name) for name, _ in rows)) + 4
    for name, text in rows:
        lines = textwrap.wrap(
            text, formatter.width - indent, break_on_hyphens=False, break_long_words=False
        )
        if len(name) + 4 > indent:
            lines = ["", *lines]
        first, *more = lines
        formatter.write(f"{f'  {name}'.ljust(indent)}{first}".rstrip() + "\n")
        formatter.write("".join(f"{' ' * indent}{line}\n" for line in more))
