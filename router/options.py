"""Options of the router. The command line is parsed once, into `RouterOptions`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from baton.core.errors import InvalidConfig
from baton.core.options import MODEL, NETWORK, SECURITY, Option, check_options
from baton.router.admission.admission_queue import AdmissionQueueConfig
from baton.router.admission.rate_limits import NO_RATE_LIMITS, RateLimitConfig
from baton.router.discovery.sources import (
    NodeSource,
    PrefillSource,
    VllmServer,
    check_single_role,
    parse_prefill_sources,
    parse_sources,
)
from baton.router.dispatch.retries import DispatchConfig
from baton.router.http.config import NO_CORS, CorsConfig
from baton.router.model_options import ModelOptions
from baton.router.pictures.image_hosts import NO_IMAGE_HOSTS, ImageHosts
from baton.rpc.listening import MAX_PORT, ListenHost, ListenPort
from baton.rpc.process_end import DRAIN_TIMEOUT_S, DrainTimeout
from baton.rpc.security.tls import PLAIN, TlsConfig
from baton.rpc.security.token import AcceptedTokens, Operators, OperatorTokens, read_tokens
from baton.telemetry.options import TelemetryOptions

NODES_HELP = (
    "Comma-separated node addresses: host:port, dns:///name:port (each address behind "
    "the name is a node) or file:///path (a list of host:port lines)."
)


def _read_client_tokens(path: Path | None) -> AcceptedTokens | None:
    return None if path is None else AcceptedTokens(read_tokens(path))


@dataclass(frozen=True, slots=True)
class RouterOptions:
    decode_nodes: Annotated[
        tuple[NodeSource, ...], Option(NODES_HELP, NETWORK, parse=parse_sources)
    ]
    prefill_nodes: Annotated[
        tuple[PrefillSource, ...],
        Option(
            f"{NODES_HELP} Also vllm://host:port: a vLLM server with NixlConnector, whose KV "
            "decode nodes read (--kv-sources); used for models without another prefill node.",
            NETWORK,
            default="",
            parse=parse_prefill_sources,
        ),
    ] = ()
    encode_nodes: Annotated[
        tuple[NodeSource, ...], Option(NODES_HELP, NETWORK, default="", parse=parse_sources)
    ] = ()
    find_every_s: Annotated[
        float,
        Option(
            "Seconds between two resolutions of names and reads of lists.",
            NETWORK,
            above=0,
            is_setting=True,
        ),
    ] = 5.0
    drain_timeout_s: DrainTimeout = DRAIN_TIMEOUT_S
    models: ModelOptions = ModelOptions()
    host: ListenHost = "127.0.0.1"
    port: ListenPort = 50051
    http_port: Annotated[
        int | None,
        Option(
            "Port of the HTTP APIs (OpenAI, Anthropic); 0 takes a free port. Default: no HTTP.",
            NETWORK,
            at_least=0,
            at_most=MAX_PORT,
        ),
    ] = None
    http_host: Annotated[
        str, Option("Address to serve HTTP on. Default: that of --host.", NETWORK, is_setting=True)
    ] = ""
    cors: CorsConfig = NO_CORS
    embed_truncate: Annotated[
        bool,
        Option(
            "Over HTTP, cut texts that exceed what a model takes, with a warning in the answer, if "
            "it generates no text; otherwise they are refused.",
            MODEL,
            is_setting=True,
        ),
    ] = True
    enable_prompt_embeds: Annotated[
        bool,
        Option(
            "Take prompt_embeds in completions, embeddings in place of a prompt's tokens, for "
            "nodes with --enable-prompt-embeds.",
            MODEL,
        ),
    ] = False
    smg: Annotated[
        bool,
        Option(
            "Serve the gRPC service of SMG's vLLM workers on --port, so that an SMG gateway can "
            "use this router as a worker.",
            NETWORK,
        ),
    ] = False
    dispatch: DispatchConfig = field(default_factory=DispatchConfig)
    admission_queue: AdmissionQueueConfig = field(default_factory=AdmissionQueueConfig)
    rate_limits: RateLimitConfig = NO_RATE_LIMITS
    image_hosts: ImageHosts = NO_IMAGE_HOSTS
    tokens: Annotated[  # None: no authentication
        AcceptedTokens | None,
        Option(
            "File of accepted client tokens, one per line.",
            SECURITY,
            name="token_file",
            kind=Path | None,
            parse=_read_client_tokens,
        ),
    ] = None
    operator_tokens: OperatorTokens = None  # for resets; None: no operators
    tls: TlsConfig = PLAIN
    telemetry: TelemetryOptions = TelemetryOptions()

    def __post_init__(self) -> None:
        check_options(self)
        if self.smg and len(self.models.folders) > 1:
            raise InvalidConfig(
                "--smg is for one --model: requests of an SMG gateway name none. Start a router "
                "for each model"
            )
        if not self.decode_nodes:
            raise InvalidConfig("no decode node is named; give --decode-nodes host:port")
        check_single_role(
            prefill=self.prefill_nodes, decode=self.decode_nodes, encode=self.encode_nodes
        )

    @property
    def baton_prefill_nodes(self) -> tuple[NodeSource, ...]:
        return tuple(each for each in self.prefill_nodes if not isinstance(each, VllmServer))

    @property
    def vllm_servers(self) -> tuple[VllmServer, ...]:
        return tuple(each for each in self.prefill_nodes if isinstance(each, VllmServer))

    @property
    def operators(self) -> Operators:
        return Operators(self.operator_tokens, is_open=self.tokens is None)

    @property
    def client_tokens(self) -> AcceptedTokens | None:
        """Tokens for all calls but those of operators, who may do what clients may."""
        return None if self.tokens is None else self.tokens.and_those_of(self.operator_tokens)
