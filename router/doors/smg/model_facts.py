"""Facts about a model that SMG's GetModelInfo reports, from its files."""

from __future__ import annotations

import json
from dataclasses import dataclass

from baton.checkpoint.hub import model_root, open_checkpoint
from baton.checkpoint.json_fields import JsonFields
from baton.core.sampling import SamplingDefaults


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts from the files of a model. The defaults are those of a process without the files."""

    path: str = ""
    model_type: str = ""
    architectures: tuple[str, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int = 0
    bos_token_id: int = 0


def read_model_facts(model: str) -> ModelFacts:
    """Read the facts of a folder or a name of the hub; empty: no files. Raises ModelError."""
    if not model:
        return ModelFacts()
    checkpoint = open_checkpoint(model)
    config = checkpoint.read_config()
    model_type, architectures = config.get("model_type"), config.get("architectures")
    return ModelFacts(
        path=model_root(model),
        model_type=model_type if isinstance(model_type, str) else "",
        architectures=tuple(map(str, architectures)) if isinstance(architectures, list) else (),
        eos_token_ids=checkpoint.read_generation_defaults().eos_token_ids,
        pad_token_id=_token_id(config, "pad_token_id"),
        bos_token_id=_token_id(config, "bos_token_id"),
    )


def sampling_defaults_json(defaults: SamplingDefaults) -> str:
    """Return the model's defaults, which the gateway applies to requests; empty without any."""
    return json.dumps(defaults.given) if defaults.given else ""


def _token_id(config: JsonFields, name: str) -> int:
    found = config.get(name)
    return found if type(found) is int and found >= 0 else 0
