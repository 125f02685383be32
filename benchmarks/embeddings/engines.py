"""Engines that embed texts in this process: Baton, and those of its peers that are installed."""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

from baton.core.vectors import Floats
from baton.llm import LLM

Embed = Callable[[Sequence[str]], Floats]  # → [texts, size]
WHOLE_CONTEXT = -1
BATON = "baton"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class PeerMissing(Exception):
    """A peer is not installed, or cannot embed with this model."""


@contextmanager
def baton_engine(model: Path, dtype: str, num_threads: int) -> Iterator[Embed]:
    """Without a prefix cache: the same texts are embedded in each round."""
    with LLM(
        str(model),
        dtype=dtype,
        num_threads=num_threads,
        enable_prefix_caching=False,
        show_progress=False,
    ) as llm:
        yield lambda texts: np.array(llm.embed(texts, truncate_prompt_tokens=WHOLE_CONTEXT))


@contextmanager
def sentence_transformers_engine(model: Path, dtype: str, _num_threads: int) -> Iterator[Embed]:
    """Torch, whose number of threads was set for the whole process."""
    module = _import("sentence_transformers")
    made = module.SentenceTransformer(
        str(model), device="cpu", model_kwargs={"dtype": DTYPES[dtype]}
    )
    yield lambda texts: np.asarray(
        made.encode(list(texts), show_progress_bar=False, convert_to_numpy=True), np.float32
    )


@contextmanager
def fastembed_engine(model: Path, dtype: str, num_threads: int) -> Iterator[Embed]:
    """ONNX Runtime, with a BERT that is exported and fused here."""
    fastembed = _import("fastembed")
    if dtype != "float32":
        raise PeerMissing("fastembed: only float32 is exported")
    with tempfile.TemporaryDirectory() as folder:
        size = _export_onnx(model, Path(folder))
        fastembed.TextEmbedding.add_custom_model(
            model="local/exported",
            pooling=import_module("fastembed.common.model_description").PoolingType.MEAN,
            normalization=True,
            sources=import_module("fastembed.common.model_description").ModelSource(hf="local"),
            dim=size,
            model_file="model.onnx",
        )
        made = fastembed.TextEmbedding(
            "local/exported", specific_model_path=folder, threads=num_threads
        )
        yield lambda texts: np.array(list(made.embed(list(texts))), np.float32)


@contextmanager
def infinity_engine(model: Path, dtype: str, _num_threads: int) -> Iterator[Embed]:
    """Engine of a server of embeddings, without its HTTP: it batches what callers wait for."""
    module = _import("infinity_emb")
    arguments = module.EngineArgs(
        model_name_or_path=str(model),
        engine="torch",
        device="cpu",
        dtype=dtype,
        bettertransformer=False,  # optimum no longer has it
        model_warmup=False,
    )
    made = module.AsyncEmbeddingEngine.from_args(arguments)
    with asyncio.Runner() as runner:
        runner.run(made.astart())
        try:
            yield lambda texts: np.array(runner.run(made.embed(list(texts)))[0], dtype=np.float32)
        finally:
            runner.run(made.astop())


PEERS: Mapping[str, Any] = {
    "sentence-transformers": sentence_transformers_engine,
    "fastembed": fastembed_engine,
    "infinity": infinity_engine,
}


@contextmanager
def engines(
    model: Path,
    dtype: str,
    num_threads: int,
    peers: Sequence[str],
    on_missing: Callable[[str], None],
) -> Iterator[dict[str, Embed]]:
    """Open Baton and the peers that can embed with this model."""
    torch.set_num_threads(num_threads)
    with ExitStack() as stack:
        opened = {BATON: stack.enter_context(baton_engine(model, dtype, num_threads))}
        for name in peers:
            try:
                opened[name] = stack.enter_context(PEERS[name](model, dtype, num_threads))
            except PeerMissing as missing:
                on_missing(str(missing))
        yield opened


def _import(name: str) -> Any:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return import_module(name)
    except ImportError as error:
        raise PeerMissing(f"{name} is not installed: {error}") from error


def _export_onnx(model: Path, folder: Path) -> int:
    """Write an encoder as ONNX, with the fused operators of ONNX Runtime; return its size."""
    transformers = _import("transformers")
    config = transformers.AutoConfig.from_pretrained(model)
    if config.model_type != "bert":
        raise PeerMissing(f"fastembed: only BERT is exported, not {config.model_type}")
    bert = transformers.AutoModel.from_pretrained(model, attn_implementation="eager").eval()
    names = ["input_ids", "attention_mask", "token_type_ids"]
    inputs = tuple(torch.ones(2, 8, dtype=torch.int64) for _ in names)
    axes = {name: {0: "texts", 1: "tokens"} for name in (*names, "last_hidden_state")}
    plain = folder / "plain.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            _HiddenStates(bert),
            inputs,
            str(plain),
            input_names=names,
            output_names=["last_hidden_state"],
            dynamic_axes=axes,
            dynamo=False,
        )
    logging.getLogger("onnxruntime.transformers").setLevel(logging.ERROR)
    optimizer = import_module("onnxruntime.transformers.optimizer")
    fused = optimizer.optimize_model(
        str(plain),
        model_type="bert",
        num_heads=config.num_attention_heads,
        hidden_size=config.hidden_size,
    )
    fused.save_model_to_file(str(folder / "model.onnx"))
    for path in model.glob("*.json"):
        (folder / path.name).write_bytes(path.read_bytes())
    return int(config.hidden_size)


class _HiddenStates(torch.nn.Module):
    """Model whose only output is the hidden states of the last layer."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Any, mask: Any, types: Any) -> Any:
        return self.model(
            input_ids=ids, attention_mask=mask, token_type_ids=types
        ).last_hidden_state
