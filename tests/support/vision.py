"""Small models with vision towers, random pictures, and encodings by transformers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from baton.core.media import Picture
from baton.core.request import EngineRequest
from tests.support.families import (
    DENSE,
    QWEN_VISION,
    RECURRENT_WRAPPED,
    VISION,
    WRAPPED,
    WRAPPED_PLAIN,
)
from tests.support.models import (
    Variant,
    import_transformers,
    make_model_folder,
    reference,
    save_tokenizer,
)

SMALL = {**VISION, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3}
SIGLIP = {**SMALL, "image_size": 64, "patch_size": 8}
GEMMA4 = {
    **SMALL,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "patch_size": 8,
    "pooling_kernel_size": 2,
    "position_embedding_size": 100,
}
QWEN = {**QWEN_VISION, "hidden_size": 32, "intermediate_size": 40, "depth": 4}
GRID = {"num_position_embeddings": 25, "deepstack_visual_indexes": [0, 2]}
VISION_VARIANTS: Mapping[str, Variant] = {
    **WRAPPED_PLAIN,
    "mistral3": Variant(
        "Mistral3",
        WRAPPED["mistral3"].settings,
        vision={**SMALL, "model_type": "pixtral", "head_dim": 16, "patch_size": 14},
    ),
    # The window is shorter than a picture, and the scale is the one that llama.cpp assumes.
    "gemma3": Variant(
        "Gemma3",
        {
            **WRAPPED["gemma3-vision"].settings,
            "sliding_window": 10,
            "query_pre_attn_scalar": 32,
        },
        vision=SIGLIP,
    ),
    "gemma4": Variant(
        "Gemma4",
        WRAPPED["gemma4-vision"].settings,
        vision={**GEMMA4, "use_clipped_linears": True},
    ),
    # As in the larger models, a picture's tokens see each other in layers with windows.
    "gemma4-large": Variant(
        "Gemma4",
        {
            **DENSE["gemma4-k-eq-v"].settings,
            "use_bidirectional_attention": "vision",
            "sliding_window": 10,
        },
        vision={**GEMMA4, "standardize": True},
    ),
    "gemma4-unified": WRAPPED["gemma4-unified"],
    "qwen2.5-vl": Variant(
        "Qwen2_5_VL",
        WRAPPED["qwen2.5-vl"].settings,
        vision={**QWEN, "window_size": 56, "fullatt_block_indexes": [1, 3]},
    ),
    "qwen3-vl": Variant("Qwen3VL", WRAPPED["qwen3-vl"].settings, vision={**QWEN, **GRID}),
    "qwen3.5-vl": Variant(
        "Qwen3_5",
        RECURRENT_WRAPPED["qwen3.5-vl"].settings,
        vision={**QWEN, "num_position_embeddings": 25},
    ),
}
# Of pictures, in pixels: several, some of odd aspect ratios, where the tower takes them.
PICTURE_SIZES: Mapping[str, tuple[tuple[int, int], ...]] = {
    "smolvlm": ((64, 64), (48, 48), (96, 96), (64, 64), (70, 70)),
    "idefics3": ((64, 64), (80, 80)),
    "mistral3": ((28, 56), (56, 140), (196, 28), (28, 56)),
    "gemma3": ((64, 64), (64, 64)),
    "gemma4": ((64, 64), (32, 112), (160, 16), (64, 64)),
    "gemma4-large": ((64, 64), (48, 80)),
    "gemma4-unified": ((32, 32), (16, 56), (128, 8)),
    "qwen2-vl": ((56, 56), (84, 196)),
    "qwen2.5-vl": ((56, 56), (84, 196), (196, 28), (112, 168)),
    "qwen3-vl": ((64, 64), (32, 160), (224, 96), (64, 64)),
    "qwen3.5": ((64, 64), (32, 160), (96, 96)),
    "qwen3.5-vl": ((64, 64), (32, 96)),
}


def make_vision_folder(folder: Path, name: str) -> Path:
    """Write a small model and the settings of its image processor."""
    make_model_folder(folder, VISION_VARIANTS[name])
    _make_all_numbers_count(folder / "model.safetensors")
    if name == "gemma3":
        _edit_config(folder, mm_tokens_per_image=16)
    _write_processor(folder, {"do_normalize": not name.startswith("gemma4")})
    return folder


TOWERS = ("visual.", "vision_", "connector.", "projector.")
BOUNDS = ("_min", "_max")  # of the numbers that linear layers take and give
MEAN, DEVIATION = [0.4, 0.5, 0.45], [0.3, 0.25, 0.28]


def _make_all_numbers_count(path: Path) -> None:
    # Norms start as ones, biases and a projection as zeros, and would not show mistakes.
    generator = torch.Generator().manual_seed(3)
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if name.endswith(BOUNDS):
            tensor.copy_((0.4 + 0.4 * torch.rand((), generator=generator)).copysign(tensor))
        elif any(part in name for part in TOWERS):
            tensor += 0.1 * torch.randn(tensor.shape, generator=generator)
    save_file(tensors, path, {"format": "pt"})


def _edit_config(folder: Path, **fields: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def a_picture(height: int, width: int, seed: int = 0) -> Picture:
    """Return random colours, in areas of several pixels."""
    generator = np.random.default_rng([height, width, seed])
    coarse = generator.integers(0, 256, (height // 4 + 1, width // 4 + 1, 3))
    pixels = np.repeat(np.repeat(coarse, 4, 0), 4, 1)[:height, :width]
    pixels = (pixels + generator.integers(0, 30, pixels.shape)).clip(0, 255).astype(np.uint8)
    rgb = np.ascontiguousarray(pixels).tobytes()
    return Picture(hashlib.sha256(rgb).digest(), height, width, rgb)


def reference_encoding(folder: Path, picture: Picture) -> Tensor:
    """Return the encoding by transformers, with the levels of DeepStack as further columns."""
    model, pixels = reference(folder), _scaled_pixels(picture)
    kind = model.config.model_type
    inputs: dict[str, Any] = {"pixel_values": pixels[None]}
    if kind in ("smolvlm", "idefics3"):
        inputs["pixel_values"] = pixels[None, None]
    elif kind == "mistral3":
        inputs["image_sizes"] = torch.tensor([[picture.height, picture.width]])
    elif kind.startswith("gemma4"):
        inputs = _gemma4_inputs(model.config.vision_config, picture)
    elif kind.startswith("qwen"):
        inputs = _qwen_inputs(model.config.vision_config, pixels)
    with torch.inference_mode():
        found = model.get_image_features(**inputs, return_dict=True)
    levels = getattr(found, "deepstack_features", None) or []
    parts = [found.pooler_output, *levels]
    return torch.cat([torch.cat(list(part)) for part in parts], dim=1)


def _scaled_pixels(picture: Picture) -> Tensor:
    """Return the pixels as the PIL processors of transformers scale them, channels first."""
    transforms = import_transformers().image_transforms
    pixels = np.frombuffer(picture.rgb, np.uint8).reshape(picture.height, picture.width, 3)
    scaled = transforms.rescale(pixels.transpose(2, 0, 1), 1 / 255)
    return torch.from_numpy(transforms.normalize(scaled, MEAN, DEVIATION))


def _gemma4_inputs(config: Any, picture: Picture) -> dict[str, Any]:
    """Return the patches, whose pixels are from 0 to 1, and the column and row of each."""
    size = getattr(config, "model_patch_size", config.patch_size)
    rows, columns = picture.height // size, picture.width // size
    pixels = np.frombuffer(picture.rgb, np.uint8).reshape(rows, size, columns, size, 3)
    patches = torch.from_numpy(pixels.copy()).permute(0, 2, 1, 3, 4).reshape(rows * columns, -1)
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    return {
        "pixel_values": patches[None] / 255,
        "image_position_ids": torch.stack((column, row), dim=-1).flatten(0, 1)[None],
    }


def _qwen_inputs(config: Any, pixels: Tensor) -> dict[str, Any]:
    """Return the patches, each twice in time, in squares of those that are merged."""
    size, merge = config.patch_size, config.spatial_merge_size
    rows, columns = (side // size for side in pixels.shape[1:])
    shape = (3, rows // merge, merge, size, columns // merge, merge, size)
    squares = pixels.reshape(shape).permute(1, 4, 2, 5, 0, 3, 6)
    twice = squares.flatten(0, 3)[:, :, None].expand(-1, -1, 2, -1, -1)
    return {
        "pixel_values": twice.flatten(1),
        "image_grid_thw": torch.tensor([[1, rows, columns]]),
    }


def generated_with_pictures(folder: Path, request: EngineRequest) -> list[int]:
    """Return the tokens that transformers generates greedily after a prompt with pictures.

    Its encodings are put in place of the placeholders here, since not every model takes pictures
    of several sizes.
    """
    model = reference(folder)
    by_digest = {picture.digest: picture for picture in request.pictures}
    token_ids, num_tokens = torch.tensor([request.prompt_token_ids]), request.sampling.max_tokens
    levels: list[Sequence[Tensor]] = []
    if model.config.model_type.startswith("gemma4"):  # whose layers have inputs of the tokens, too
        pictures = [by_digest[segment.digest] for segment in request.media]
        encodings = [reference_encoding(folder, picture) for picture in pictures]
        return _generated_from_ids(model, request, encodings)
    with torch.inference_mode():
        embeddings = model.get_input_embeddings()(token_ids)
        for segment in request.media:
            end = segment.start + segment.num_tokens
            encoding = reference_encoding(folder, by_digest[segment.digest])
            embeddings[0, segment.start : end], *its = encoding.split(embeddings.shape[2], dim=1)
            levels.append(its)
        if model.config.model_type.startswith("qwen"):
            whole = [torch.cat(level) for level in zip(*levels, strict=True)]
            return _generated_at(model, embeddings, request, whole)
        if model.config.model_type == "gemma3":  # whose `generate` takes no embeddings
            return _generated_in_sight(model, embeddings, request)
        answer = model.generate(
            inputs_embeds=embeddings,
            attention_mask=torch.ones_like(token_ids),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
        )
    return [int(token_id) for token_id in answer[0][-num_tokens:]]


def _kinds(request: EngineRequest) -> Tensor:
    """Return 1 for each placeholder, and 0 for text."""
    kinds = torch.zeros(1, len(request.prompt_token_ids), dtype=torch.int64)
    for segment in request.media:
        kinds[0, segment.start : segment.start + segment.num_tokens] = 1
    return kinds


def _generated_from_ids(
    model: Any, request: EngineRequest, encodings: Sequence[Tensor]
) -> list[int]:
    """Return greedy tokens, from the ids of all tokens and the encodings of the pictures."""
    answer, kinds = list[int](), _kinds(request)
    prompt = torch.tensor([request.prompt_token_ids])
    token_ids = torch.where(kinds == 1, model.config.image_token_id, prompt)
    encoded = {"image": SimpleNamespace(pooler_output=encodings)}
    with torch.inference_mode():
        for _ in range(request.sampling.max_tokens):
            logits = model(
                token_ids, mm_token_type_ids=kinds, mm_encoder_outputs=encoded, use_cache=False
            ).logits
            answer.append(int(logits[0, -1].argmax()))
            token_ids = functional.pad(token_ids, (0, 1), value=answer[-1])
            kinds = functional.pad(kinds, (0, 1))
    return answer


def _generated_in_sight(model: Any, embeddings: Tensor, request: EngineRequest) -> list[int]:
    """Return greedy tokens, where the tokens of a picture attend to each other."""
    answer, kinds = list[int](), _kinds(request)
    for _ in range(request.sampling.max_tokens):
        logits = model(inputs_embeds=embeddings, token_type_ids=kinds, use_cache=False).logits
        answer.append(int(logits[0, -1].argmax()))
        own = model.get_input_embeddings()(torch.tensor([[answer[-1]]]))
        embeddings, kinds = torch.cat((embeddings, own), dim=1), functional.pad(kinds, (0, 1))
    return answer


def _grid_positions(model: Any, request: EngineRequest) -> Tensor:
    """Return the positions that transformers gives the tokens, [3, 1, tokens]."""
    by_digest = {picture.digest: picture for picture in request.pictures}
    grids = []
    for segment in request.media:
        picture, size = by_digest[segment.digest], model.config.vision_config.patch_size
        grids.append([1, picture.height // size, picture.width // size])
    token_ids = torch.tensor([request.prompt_token_ids])
    found = model.model.get_rope_index(
        token_ids, _kinds(request), image_grid_thw=torch.tensor(grids)
    )
    positions: Tensor = found[0]
    return positions


def _generated_at(
    model: Any, embeddings: Tensor, request: EngineRequest, levels: Sequence[Tensor]
) -> list[int]:
    """Return greedy tokens, for each of which all tokens before are computed again."""
    positions, answer = _grid_positions(model, request), list[int]()
    is_placeholder = _kinds(request).bool()
    for _ in range(request.sampling.max_tokens):
        rest = torch.zeros(1, len(answer), dtype=torch.bool)
        seen = torch.cat((is_placeholder, rest), dim=1)
        more = {"visual_pos_masks": seen, "deepstack_visual_embeds": levels} if levels else {}
        found = model.model.language_model(
            inputs_embeds=embeddings, position_ids=positions, use_cache=False, **more
        )
        logits = model.lm_head(found.last_hidden_state)
        answer.append(int(logits[0, -1].argmax()))
        own = model.get_input_embeddings()(torch.tensor([[answer[-1]]]))
        embeddings = torch.cat((embeddings, own), dim=1)
        next_position = positions.amax() + 1
        positions = torch.cat((positions, next_position.expand(3, 1, 1)), dim=2)
    return answer


CHAT_WITH_IMAGES = (
    "{% for message in messages %}{{ message.role }}: {% for part in message.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
TILE_MARKS = tuple(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2))
IMAGE_MARKS = ("<image>", "<fake_token_around_image>", "<global-img>", *TILE_MARKS)


def make_chat_folder(folder: Path) -> Path:
    """Write a small SmolVLM with tokenizer and chat template, which takes images in chats."""
    make_vision_folder(folder, "smolvlm")
    save_tokenizer(folder, IMAGE_MARKS)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": CHAT_WITH_IMAGES}))
    write_image_settings(folder)
    return folder


def write_image_settings(folder: Path) -> None:
    """Write how the small SmolVLM takes images: in at most four tiles."""
    edges = {"max_image_size": {"longest_edge": 64}, "size": {"longest_edge": 128}}
    _write_processor(folder, edges)


def _write_processor(folder: Path, settings: Mapping[str, Any]) -> None:
    processor = {"rescale_factor": 1 / 255, "image_mean": MEAN, "image_std": DEVIATION, **settings}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
