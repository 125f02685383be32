"""Settings of a low-rank adapter (LoRA), as PEFT saves them."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from baton.checkpoint.json_fields import JsonFields

CONFIG = "adapter_config.json"
MAX_CONFIG_BYTES = 1 << 20
MAX_NUMBER = sys.float_info.max
MAX_PATTERNS, MAX_PATTERN_CHARACTERS = 4096, 256
MAX_MODULE_CHARACTERS = 100  # of a module that is matched: one of the model
# Of matching a module with all patterns, by backtracking. Meanwhile no other thread runs.
MAX_STEPS = 1 << 20
ESCAPES_AND_CLASSES = re.compile(r"\\.|\[[^\]]*\]")
NESTED = re.compile(r"\)[*+{]|\(\?(?!:)")  # repeated groups, lookarounds, flags and comments
# Settings that change the weights or the computation, and the values that Baton supports.
SUPPORTED: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "use_dora": (None, False),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, []),
    "layer_replication": (None, []),
    "fan_in_fan_out": (None, False),
    "lora_bias": (None, False),
    "bias": (None, "none"),
    "use_qalora": (None, False),
    "alora_invocation_tokens": (None, []),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "monteclora_config": (None,),
    "use_bdlora": (None,),
}
# They initialise the adapter by changing the base model, which must then be saved with it.
CHANGES_BASE = ("pissa", "olora", "loftq", "corda", "lora_ga")


@dataclass(frozen=True, slots=True)
class PeftAdapterConfig:
    """Ranks and scales of an adapter's matrices."""

    rank: int
    alpha: float
    uses_rank_root: bool  # rsLoRA: alpha is divided by the root of the rank
    rank_pattern: Mapping[str, float]
    alpha_pattern: Mapping[str, float]
    target_parameters: Sequence[str] = ()

    @classmethod
    def read(cls, folder: Path) -> PeftAdapterConfig:
        """Raises ModelError for what is not supported."""
        fields = JsonFields.read(folder / CONFIG, MAX_CONFIG_BYTES)
        for name, values in SUPPORTED.items():
            if fields.get(name) not in values:
                expected = " or ".join(map(repr, values))
                raise fields.wrong(name, f"must be {expected}: other adapters are not supported")
        how = fields.get("init_lora_weights")
        if isinstance(how, str) and how.lower().startswith(CHANGES_BASE):
            raise fields.wrong(
                "init_lora_weights", "must leave the base model as it is: convert the adapter"
            )
        return cls(
            rank=fields.positive_int("r"),
            alpha=fields.number("lora_alpha", 8),
            uses_rank_root=fields.flag("use_rslora", False),
            rank_pattern=_pattern(fields, "rank_pattern"),
            alpha_pattern=_pattern(fields, "alpha_pattern"),
            target_parameters=_names(fields, "target_parameters"),
        )

    def targets_parameter(self, name: str) -> bool:
        """Return whether a parameter is changed that is no weight of a linear layer."""
        return any(name == each or name.endswith(f".{each}") for each in self.target_parameters)

    def scale(self, module: str, rank: int) -> float:
        """Return the factor of a module's product."""
        alpha = _matching(self.alpha_pattern, module, self.alpha)
        return alpha / (rank**0.5 if self.uses_rank_root else rank)

    def rank_of(self, module: str) -> int:
        return int(_matching(self.rank_pattern, module, self.rank))


def _pattern(fields: JsonFields, name: str) -> Mapping[str, float]:
    found = fields.get(name)
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(
        type(number) in (int, float) and 0 < number <= MAX_NUMBER for number in found.values()
    ):
        raise fields.wrong(name, "must map modules to positive numbers")
    if len(found) > MAX_PATTERNS or sum(map(_num_steps, found)) > MAX_STEPS:
        raise fields.wrong(
            name,
            f"must have at most {MAX_PATTERNS} patterns, of at most {MAX_PATTERN_CHARACTERS} "
            "characters, that match fast: without repeated groups, and with few repetitions and "
            "alternatives",
        )
    return {str(module): number for module, number in found.items()}


def _num_steps(pattern: str) -> float:
    """Return an upper bound of the steps of matching a module."""
    plain = ESCAPES_AND_CLASSES.sub("x", pattern)
    if len(pattern) > MAX_PATTERN_CHARACTERS or NESTED.search(plain):
        return math.inf
    num_repetitions = sum(map(plain.count, "*+{"))
    num_choices = sum(map(plain.count, "?|"))
    bits = num_repetitions * math.log2(MAX_MODULE_CHARACTERS) + num_choices
    return math.inf if bits > MAX_PATTERN_CHARACTERS else 2.0**bits


def _names(fields: JsonFields, name: str) -> Sequence[str]:
    found = fields.get(name) or []
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise fields.wrong(name, "must be a list of names")
    return tuple(found)


def _matching(pattern: Mapping[str, float], module: str, default: float) -> float:
    """Return the number of the first pattern, a regular expression, that a module ends with."""
    for key, number in pattern.items():
        if module == key or module.endswith(f".{key}") or _matches(key, module):
            return number
    return default


def _matches(key: str, module: str) -> bool:
    pattern = _compile(key)
    return pattern is not None and pattern.fullmatch(module) is not None


@lru_cache(MAX_PATTERNS)
def _compile(key: str) -> re.Pattern[str] | None:
    try:
        return re.compile(rf"(.*\.)?({key})")
    except (re.error, OverflowError):
        return None
