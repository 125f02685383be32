"""Properties of models that the router has from its own options: tokenizers, formats, origins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.core.errors import InvalidRequest
from baton.core.ids import ModelVariant
from baton.router.input_processing.tokenization import TextBoundary
from baton.router.pictures.plan import PictureFormat
from baton.router.routing.node_table import NodeTable
from baton.router.values import NO_PARSING, Parsing


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """Tokenizer of a model, the formats of its answers, and where it comes from."""

    text: TextBoundary
    name: str = ""  # that its nodes serve
    # The name is that of a folder, and nodes may serve the model by another one.
    is_name_assumed: bool = False
    parsing: Parsing = NO_PARSING
    images: PictureFormat | None = None  # None: the model takes text alone
    root: str = ""  # folder or hub name; empty: the router has no files of it


class ModelProfiles:
    """Finds the profile of a request's model. All adapters of a base have that of the base."""

    def __init__(
        self,
        table: NodeTable,
        profiles: Sequence[ModelProfile] = (),
        default_parsing: Parsing = NO_PARSING,
    ) -> None:
        """`default_parsing` is for models without a profile, which nodes alone know."""
        self._table = table
        self._by_name = {profile.name: profile for profile in profiles}
        self._default_parsing = default_parsing

    def of(self, model: ModelVariant) -> ModelProfile:
        name = model.base
        found = self._find(name)
        return found or ModelProfile(TextBoundary(name), name, parsing=self._default_parsing)

    def may_be_adapter(self, model: ModelVariant) -> bool:
        """Return whether a name, while no node is known, can be that of an adapter of a profile."""
        is_known = self._find(model.base) is not None
        return bool(self._by_name) and not is_known and not self._table.models

    def is_expected(self, model: ModelVariant) -> bool:
        """Return whether nodes of a model are expected, though none may serve it at the moment.

        The name of a single model can be an assumption.
        """
        profile = self._by_name.get(model.base)
        is_sure = len(self._by_name) > 1 or not (profile is None or profile.is_name_assumed)
        return profile is not None and is_sure

    @property
    def names(self) -> list[str]:
        """Names of the models with a profile."""
        return sorted(self._by_name)

    def _find(self, name: str) -> ModelProfile | None:
        found = self._by_name.get(name)
        if found is None and len(self._by_name) == 1:
            [only] = self._by_name.values()
            if not name or (only.is_name_assumed and self._is_of_only_model(name, only)):
                return only
        return found

    def _is_of_only_model(self, name: str, only: ModelProfile) -> bool:
        """Return whether no other model could have the profile: a request to any means it."""
        served = self._table.served
        if not served.names:
            return True
        if only.name in served.bases:
            return False
        try:
            return served.find("").name == name
        except InvalidRequest:
            return False
