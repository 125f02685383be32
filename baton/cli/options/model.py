"""Options of configs for the commands that take only some of them."""

from __future__ import annotations

from typing import Annotated

from baton.cli.signatures import option_of
from baton.core.options import MODEL, Option
from baton.engine.runner.config import RunnerConfig
from baton.node.kv.tiers_config import TiersConfig
from baton.node.options import NodeOptions
from baton.telemetry.options import TelemetryOptions

ModelOrDemo = Annotated[
    str,
    Option("Model folder, or a name on the Hugging Face hub. Default: the demo model.", MODEL),
]
Dtype = Annotated[str, option_of(RunnerConfig, "dtype")]
Device = Annotated[str, option_of(RunnerConfig, "device")]
ActivationDtype = Annotated[str, option_of(RunnerConfig, "activation_dtype")]
Quantize = Annotated[str, option_of(RunnerConfig, "quantize")]
Threads = Annotated[int | None, option_of(RunnerConfig, "threads")]
KvDtype = Annotated[str, option_of(RunnerConfig, "kv_cache_dtype")]
KernelChoice = Annotated[str, option_of(RunnerConfig, "kernels")]
Speculative = Annotated[str, option_of(RunnerConfig, "speculative")]
SpeculativeModel = Annotated[str, option_of(RunnerConfig, "speculative_model")]
KvFolder = Annotated[str, option_of(TiersConfig, "kv_folder")]
KvObjectStore = Annotated[str, option_of(TiersConfig, "kv_object_store")]
Host = Annotated[str, option_of(NodeOptions, "host")]
Port = Annotated[int, option_of(NodeOptions, "port")]
TraceDir = Annotated[str, option_of(TelemetryOptions, "trace_dir")]
