"""Options of model and machine."""

from __future__ import annotations

from typing import Annotated

import typer

MODEL_PANEL = "Model"
MACHINE_PANEL = "Machine"

Model = Annotated[
    str,
    typer.Option(
        help="Model folder, or a name on the Hugging Face hub.", rich_help_panel=MODEL_PANEL
    ),
]
ModelOrDemo = Annotated[
    str,
    typer.Option(
        help="Model folder, or a name on the Hugging Face hub. Default: the demo model.",
        rich_help_panel=MODEL_PANEL,
    ),
]
Dtype = Annotated[
    str,
    typer.Option(help="auto, float32, bfloat16 or float16.", rich_help_panel=MODEL_PANEL),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        help="Maximum context length: tokens of prompt and answer together.",
        rich_help_panel=MODEL_PANEL,
    ),
]
ModelName = Annotated[
    str,
    typer.Option(
        help="Name that clients use for the model. Default: the last name of the folder's path, or "
        "the name on the hub.",
        rich_help_panel=MODEL_PANEL,
    ),
]
Device = Annotated[str, typer.Option(help="cpu, cuda or cuda:N.", rich_help_panel=MACHINE_PANEL)]
Kernels = Annotated[
    str,
    typer.Option(
        help="auto, native or torch; native kernels compute bfloat16 on the CPU.",
        rich_help_panel=MODEL_PANEL,
    ),
]
Quantize = Annotated[
    str,
    typer.Option(
        help="Weight quantization at load: none, int8 or int4.",
        rich_help_panel=MODEL_PANEL,
    ),
]
Threads = Annotated[
    int | None, typer.Option(min=1, help="Number of torch threads.", rich_help_panel=MACHINE_PANEL)
]
Cpus = Annotated[
    str,
    typer.Option(
        help="CPU cores to pin the process to, such as 0-3,6.", rich_help_panel=MACHINE_PANEL
    ),
]
ToolParser = Annotated[
    str,
    typer.Option(
        help="Parser of tool calls for the OpenAI API: hermes (also for Qwen) or llama3_json. "
        "Default: tool calls stay text.",
        rich_help_panel=MODEL_PANEL,
    ),
]
ReasoningParser = Annotated[
    str,
    typer.Option(
        help="Parser of reasoning for the OpenAI API: qwen3, or deepseek_r1 if the chat template "
        "opens the reasoning. Default: reasoning stays text.",
        rich_help_panel=MODEL_PANEL,
    ),
]
