from __future__ import annotations

import pytest

from baton.core.errors import InvalidConfig
from baton.core.kv_hints import NO_HINTS
from baton.core.options import build_config
from baton.kv_transfer.tiers.file_admission import (
    AdmissionPolicy,
    FileAdmission,
)
from baton.node.kv.tiers_config import TiersConfig
from tests.support.tier_memory import name_of


def test_the_names_of_blocks_that_were_used_once_are_bounded() -> None:
    admission = FileAdmission(AdmissionPolicy.REUSE, max_names=2)
    for number in (1, 2, 3):
        assert not admission.admits_store(name_of(number), NO_HINTS)

    assert not admission.admits_use(name_of(1))
    assert admission.admits_use(name_of(2))
    assert admission.admits_store(name_of(3), NO_HINTS)


def test_a_block_is_admitted_once_by_its_use() -> None:
    admission = FileAdmission(AdmissionPolicy.REUSE)
    admission.admits_store(name_of(1), NO_HINTS)
    assert admission.admits_use(name_of(1))
    assert not admission.admits_use(name_of(1))


def test_an_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(InvalidConfig, match="--kv-tier-admission 'some': choose one of all, reuse"):
        build_config(TiersConfig, {"kv_tier_admission": "some"})
