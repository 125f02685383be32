"""Table of the ways in which models take images, by `model_type` of config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from baton.checkpoint.checkpoint import Checkpoint
from baton.checkpoint.json_fields import JsonFields
from baton.core.errors import ModelError
from baton.router.pictures.families.gemma3 import read_gemma3
from baton.router.pictures.families.gemma4 import read_gemma4
from baton.router.pictures.families.idefics3 import read_idefics3
from baton.router.pictures.families.pixtral import read_pixtral
from baton.router.pictures.families.qwen_vl import read_qwen_vl
from baton.router.pictures.plan import PictureFormat

FORMATS: Mapping[str, Callable[[JsonFields, JsonFields], PictureFormat]] = {
    "gemma3": read_gemma3,
    "gemma4": read_gemma4,
    "gemma4_unified": read_gemma4,
    "idefics3": read_idefics3,
    "mistral3": read_pixtral,
    "qwen2_vl": read_qwen_vl,
    "qwen2_5_vl": read_qwen_vl,
    "qwen3_vl": read_qwen_vl,
    "qwen3_vl_moe": read_qwen_vl,
    "qwen3_5": read_qwen_vl,
    "qwen3_5_moe": read_qwen_vl,
    "smolvlm": read_idefics3,
}


def read_format(checkpoint: Checkpoint) -> PictureFormat | None:
    """Return how a model takes images, or None for a model of text alone.

    Raises ModelError for a model whose images Baton cannot prepare; its text can be served.
    """
    config = checkpoint.read_config()
    if not config.has("vision_config"):
        return None
    read = FORMATS.get(str(config.get("model_type")))
    if read is None:
        raise config.wrong("model_type", f"must be one of {', '.join(FORMATS)} to take images")
    processor = checkpoint.read_image_processor()
    if processor is None:
        raise ModelError(
            f"{checkpoint.path} has no preprocessor_config.json, which says how the model takes "
            "images; fetch it again"
        )
    return read(config, processor)
