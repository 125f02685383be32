"""Profiles of models for routers in tests."""

from __future__ import annotations

from baton.router.input_processing.model_profiles import ModelProfile, ModelProfiles
from baton.router.input_processing.tokenization import TextBoundary
from baton.router.pictures.plan import PictureFormat
from baton.router.routing.node_table import NodeTable
from baton.router.values import NO_PARSING, Parsing


def profiles_of(
    table: NodeTable,
    text: TextBoundary | None = None,
    parsing: Parsing = NO_PARSING,
    images: PictureFormat | None = None,
) -> ModelProfiles:
    """Return the profile of the only model, whatever its name."""
    profile = ModelProfile(
        text or TextBoundary(), is_name_assumed=True, parsing=parsing, images=images
    )
    return ModelProfiles(table, (profile,))
