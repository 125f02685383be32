"""A draft head learns, is stored in the published format, and computes what the reference does."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.eagle3_reference import Eagle3Reference
from tools.draft_head import (
    DraftHead,
    default_tap_ids,
    head_config,
    load_head,
    save_head,
)
from tools.draft_texts import Library
from tools.train_draft_head import (
    UNROLLED,
    Acceptance,
    Recipe,
    StoredStates,
    Target,
    Trainer,
    TrainingState,
    draft_losses,
    load_tokenizer,
    make_head,
    measure,
)

VOCAB, DRAFTED, NUM_DRAFTS = 61, 40, 4


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        initializer_range=0.3,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
    )
    return Target(LlamaForCausalLM(config))


@pytest.fixture(scope="module")
def texts(target: Target) -> Tensor:
    torch.manual_seed(1)
    written: Tensor = target.model.generate(
        torch.randint(2, VOCAB, (24, 2)),
        min_new_tokens=18,
        max_new_tokens=18,
        do_sample=True,
        temperature=0.5,
        top_k=0,
    )
    return written


def a_head(target: Target) -> DraftHead:
    torch.manual_seed(8)
    config = head_config(target.config, draft_vocab_size=DRAFTED)
    head = DraftHead(config, torch.randperm(VOCAB)[:DRAFTED].sort().values)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.3)
    return head


def a_trainer(target: Target, texts: Tensor, folder: Path) -> Trainer:
    recipe = Recipe(draft_vocab_size=DRAFTED, num_steps=25, batch=8)
    torch.manual_seed(9)
    head = make_head(target, texts, recipe)
    return Trainer(head, target, texts, StoredStates(folder / "states", target, texts), recipe)


def test_a_head_learns_what_its_target_says_next(
    target: Target, texts: Tensor, tmp_path: Path
) -> None:
    trainer = a_trainer(target, texts, tmp_path)

    losses = [trainer.step(place) for place in range(trainer.recipe.num_steps)]

    for first, last in zip(losses[0], losses[-1], strict=True):
        assert last < 0.9 * first


def test_a_draft_is_compared_with_what_the_target_says_at_its_place(
    target: Target, texts: Tensor
) -> None:
    head, text, place = a_head(target), texts[:1], 9
    taps, last = target.read(text)
    even = torch.zeros_like(last)
    changed = even.index_copy(1, torch.tensor([place]), last[:, [place]])
    embeddings = functional.embedding(text, target.embeddings)
    unrolled = [*head.unroll(taps, embeddings, UNROLLED)]
    rows = target.output_rows[head.draft_token_ids]

    losses = [draft_losses(head, target, text, taps, each) for each in (even, changed)]

    for step, (before, after) in enumerate(zip(*losses, strict=True)):
        # Drafts from position 8 are of the tokens after 9, 10 and 11.
        drafted = unrolled[step][0, place - 1 - step]
        due = [(rows @ each[0, place]).softmax(dim=0) for each in (even, changed)]
        first, second = (functional.cross_entropy(drafted, each) for each in due)
        num_drafts = text.shape[1] - 1 - step
        assert torch.isclose((after - before) * num_drafts, second - first, atol=1e-4)


def test_a_resumed_run_learns_as_an_uninterrupted_one(
    target: Target, texts: Tensor, tmp_path: Path
) -> None:
    trainer = a_trainer(target, texts, tmp_path)
    trainer.step(0)
    trainer.save(tmp_path / "checkpoint.pt", TrainingState(steps=1, duration_s=2.0))
    losses = trainer.step(1)

    resumed = a_trainer(target, texts, tmp_path)
    assert resumed.load(tmp_path / "checkpoint.pt") == TrainingState(1, 2.0)
    assert resumed.step(1) == losses


def test_a_resumed_run_may_have_another_number_of_steps_only(
    target: Target, texts: Tensor, tmp_path: Path
) -> None:
    trainer = a_trainer(target, texts, tmp_path)
    trainer.save(tmp_path / "checkpoint.pt", TrainingState(steps=1, duration_s=2.0))

    trainer.recipe = replace(trainer.recipe, num_steps=30)
    assert trainer.load(tmp_path / "checkpoint.pt").steps == 1
    trainer.recipe = replace(trainer.recipe, batch=7)
    with pytest.raises(SystemExit, match="batch=8"):
        trainer.load(tmp_path / "checkpoint.pt")


def test_a_resumed_run_reads_the_states_that_are_stored(
    target: Target, texts: Tensor, tmp_path: Path
) -> None:
    rows = torch.tensor([3, 5])
    stored = StoredStates(tmp_path / "states", target, texts).read(rows)
    without_target: Any = SimpleNamespace(config=target.config, tap_ids=target.tap_ids)

    states = StoredStates(tmp_path / "states", without_target, texts, resumes=True)

    assert all(map(torch.equal, states.read(rows), stored))
    with pytest.raises(AttributeError, match="read"):
        states.read(torch.tensor([4]))


def test_a_folder_has_the_published_format(target: Target, tmp_path: Path) -> None:
    head = a_head(target)
    save_head(head, tmp_path)

    config = json.loads((tmp_path / "config.json").read_text())
    shapes = {
        name: tuple(each.shape) for name, each in load_file(tmp_path / "model.safetensors").items()
    }
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["draft_vocab_size"] == DRAFTED
    assert config["vocab_size"] == VOCAB
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert shapes == {
        "fc.weight": (32, 96),
        "midlayer.hidden_norm.weight": (32,),
        "midlayer.input_layernorm.weight": (32,),
        "midlayer.mlp.down_proj.weight": (32, 48),
        "midlayer.mlp.gate_proj.weight": (48, 32),
        "midlayer.mlp.up_proj.weight": (48, 32),
        "midlayer.post_attention_layernorm.weight": (32,),
        "midlayer.self_attn.k_proj.weight": (32, 64),
        "midlayer.self_attn.o_proj.weight": (32, 64),
        "midlayer.self_attn.q_proj.weight": (64, 64),
        "midlayer.self_attn.v_proj.weight": (32, 64),
        "norm.weight": (32,),
        "lm_head.weight": (DRAFTED, 32),
        "d2t": (DRAFTED,),
        "t2d": (VOCAB,),
    }
    assert torch.equal(load_head(tmp_path).draft_token_ids, head.draft_token_ids)


def test_layers_are_tapped_where_published_heads_do() -> None:
    assert default_tap_ids(32) == (2, 16, 29)
    assert default_tap_ids(4) == (1, 2, 3)
    assert default_tap_ids(2) == (0, 1)


def test_a_head_computes_what_the_reference_does(
    target: Target, texts: Tensor, tmp_path: Path
) -> None:
    save_head(a_head(target), tmp_path)
    head, reference = load_head(tmp_path), Eagle3Reference.read(tmp_path, target.embeddings)
    [text], taps = texts[:1], target.read(texts[:1])[0]
    embeddings = functional.embedding(texts[:1], target.embeddings)
    unrolled = torch.stack([*head.unroll(taps, embeddings, NUM_DRAFTS)])[:, 0]

    for position in range(len(text) - NUM_DRAFTS - 1):
        found: list[Tensor] = []

        def choose(logits: Tensor, place: int, found: list[Tensor] = found) -> int:
            found.append(logits[head.draft_token_ids])
            return int(text[place])

        known = taps[0, : position + 1].chunk(3, dim=-1)
        reference.draft(known, text[: position + 2].tolist(), NUM_DRAFTS, choose)
        assert torch.allclose(torch.stack(found), unrolled[:, position], atol=1e-4)


def test_acceptance_is_that_of_the_engine_by_place() -> None:
    files = Path("models/demo"), Path("models/demo-eagle3")
    args = argparse.Namespace(target=files[0], out=files[1], threads=1)
    library = Library(load_tokenizer(files[0]), is_held_out=True)

    found = measure(args, library.excerpts(3, 40, seed=1), temperature=0.8)

    assert len(found.rates) == 4
    assert list(found.rates) == sorted(found.rates, reverse=True)
    assert 0.4 < found.rates[0] < 1
    assert found.mean_length == 1 + sum(found.rates)


def test_acceptance_is_the_share_of_the_drafts_that_reach_a_place() -> None:
    found = Acceptance(num_proposed=(4, 2, 1), num_accepted=(3, 1))

    assert found.rates == (0.75, 0.5, 0.0)
    assert found.mean_length == 2.25
