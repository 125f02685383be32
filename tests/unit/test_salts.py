"""Whose cached KV a request may hit."""

from __future__ import annotations

from router.input_processing.cache_salts import own_salt, owner_of


def test_clients_are_told_apart_by_tokens_that_nobody_can_read_back() -> None:
    ann, bob = (owner_of([("authorization", f"Bearer {name}")]) for name in ("ann", "bob"))

    assert ann != bob
    assert "ann" not in ann
    assert owner_of([("x", "y"), ("authorization", "bearer  ann ")]) == ann
    assert owner_of([("authorization", b"Bearer ann")]) == ann


def test_whoever_shows_no_token_is_nobody() -> None:
    assert owner_of([]) == owner_of([("authorization", "")]) == ""


def test_a_salt_is_its_owners_and_no_salt_is_everybodys() -> None:
    assert own_salt("s", "ann") != own_salt("s", "bob") != own_salt("s", "")
    assert own_salt("", "ann") == own_salt("", "bob") == ""


def test_no_salt_of_a_client_can_spell_anothers() -> None:
    ann = owner_of([("authorization", "Bearer ann")])
    bob = owner_of([("authorization", "Bearer bob")])

    assert own_salt(own_salt("s", ann), bob) != own_salt("s", ann)
