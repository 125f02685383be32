"""Profiles of models: which tokenizer a request gets."""

from __future__ import annotations

import pytest

from baton.core.ids import ANY_MODEL, AdapterRef, ModelVariant
from baton.core.legs import LegKind
from baton.router.input_processing.model_profiles import ModelProfile, ModelProfiles
from baton.router.input_processing.tokenization import TextBoundary
from baton.router.routing.node_table import NodeTable
from baton.router.values import Parsing, TextPrompt
from baton.rpc.errors import UnsupportedInput
from tests.support.node_calls import a_node_of, an_embedder, reported_adapters

CHAT = ModelProfile(TextBoundary(), "chat")
EMBEDDER = ModelProfile(TextBoundary(), "embedder")
FOLDER = ModelProfile(TextBoundary(), "folder", is_name_assumed=True)


def a_table_of(*models: str) -> NodeTable:
    """Return a table with a decode node of each model; those with `embed` only embed."""
    table = NodeTable()
    for model in models:
        node = an_embedder(model) if "embed" in model else a_node_of(model, LegKind.DECODE)
        table.join(node.address, node.card)
    return table


def profile_for(name: str, table: NodeTable, *profiles: ModelProfile) -> ModelProfile | None:
    """Return the profile of a model; None for one without a tokenizer."""
    found = ModelProfiles(table, profiles).of(ModelVariant(name))
    return found if found in profiles else None


def test_each_model_has_its_own_profile_and_adapters_that_of_their_base() -> None:
    profiles = ModelProfiles(a_table_of("chat", "embedder"), (CHAT, EMBEDDER))

    assert profiles.of(ModelVariant("chat")) is CHAT
    assert profiles.of(ModelVariant("chat", AdapterRef("adapter", "1"))) is CHAT
    assert profiles.of(ModelVariant("embedder")) is EMBEDDER


def test_a_model_without_a_profile_accepts_token_ids_only() -> None:
    profiles = ModelProfiles(a_table_of("chat", "other"), (CHAT,), Parsing("hermes"))

    found = profiles.of(ModelVariant("other"))

    assert (found.root, found.parsing) == ("", Parsing("hermes"))
    with pytest.raises(UnsupportedInput, match=r"model .other.: .* --model other=FOLDER"):
        found.text.token_ids(TextPrompt("a"))


@pytest.mark.parametrize(
    ("served", "model"),
    [
        ((), "chat"),  # no node is known yet
        (("chat",), "chat"),
        (("embedder",), "embedder"),
        (("chat", "embedder"), "chat"),  # a node that joins must not take a tokenizer away
    ],
)
def test_an_assumed_name_fits_the_only_model_that_generates(
    served: tuple[str, ...], model: str
) -> None:
    assert profile_for(model, a_table_of(*served), FOLDER) is FOLDER
    other = ModelProfile(TextBoundary(), "other", is_name_assumed=True)
    assert profile_for(model, a_table_of(*served), FOLDER, other) is None


@pytest.mark.parametrize(
    ("served", "model", "profile"),
    [
        (("chat", "embedder"), "embedder", FOLDER),
        (("chat", "more"), "chat", FOLDER),  # two could be meant
        (("chat", "folder"), "chat", FOLDER),  # the other one has the name
        (("more",), "more", CHAT),  # the name was given
    ],
)
def test_a_tokenizer_is_never_used_for_a_model_that_may_have_another(
    served: tuple[str, ...], model: str, profile: ModelProfile
) -> None:
    assert profile_for(model, a_table_of(*served), profile) is None


def test_an_adapter_with_the_name_of_a_folder_takes_no_tokenizer_away() -> None:
    table = a_table_of("chat")
    adapter = AdapterRef(FOLDER.name, "1")
    for node in table.nodes:
        table.note_adapters(node.address, reported_adapters(adapter))

    assert profile_for("chat", table, FOLDER) is FOLDER


def test_before_any_node_is_known_a_request_without_a_model_has_the_only_profile() -> None:
    assert ModelProfiles(NodeTable(), (CHAT,)).of(ANY_MODEL) is CHAT
