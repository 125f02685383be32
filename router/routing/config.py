"""Settings of routing. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Annotated

from baton.core.options import ROUTING, Option, check_options


class RoutingPolicy(Enum):
    ROUND_ROBIN = "round_robin"
    LEAST_LOADED = "least_loaded"
    POWER_OF_TWO = "power_of_two"  # the less loaded of two random nodes
    PREFIX_AWARE = "prefix_aware"  # fewest tokens to compute or move, including queued requests


@dataclass(frozen=True, slots=True)
class Routing:
    policy: Annotated[
        RoutingPolicy,
        Option("Routing policy: prefix_aware, least_loaded, power_of_two or round_robin.", ROUTING),
    ] = RoutingPolicy.PREFIX_AWARE
    # Missing tokens of other such prompts under way on the decode node count, too. 0: off.
    local_prefill_below: Annotated[
        int,
        Option(
            "Compute the uncached part of a prompt on the decode node, in small chunks between "
            "decode steps, if it has fewer tokens than this and the prefill node would have to "
            "compute at least twice as many; 0: never.",
            ROUTING,
            default=256,
            at_least=0,
            is_setting=True,
        ),
    ] = 0
    seed: int = 0  # of the random draws
    kv_pulls: Annotated[
        bool,
        Option(
            "Name a node that has more of a prompt's KV than the node that computes it, which "
            "then pulls the KV from there.",
            ROUTING,
            is_setting=True,
        ),
    ] = True

    def __post_init__(self) -> None:
        check_options(self)
