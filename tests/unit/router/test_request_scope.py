"""Prefix-cache salts: bound to the client's token, so that tenants share no KV."""

from __future__ import annotations

from dataclasses import replace

from baton.core.foreign_kv import ForeignKv
from baton.core.kv_hints import KvHints
from baton.core.sampling import SamplingParams
from baton.router.request_scope import RequestScopes, bind_salt, host_of_peer, token_digest
from baton.router.values import GenerateCall, TokenPrompt


def test_clients_are_distinguished_by_hashes_of_their_tokens() -> None:
    ann, bob = (token_digest([("authorization", f"Bearer {name}")]) for name in ("ann", "bob"))

    assert ann != bob
    assert "ann" not in ann
    assert token_digest([("x", "y"), ("authorization", "bearer  ann ")]) == ann
    assert token_digest([("authorization", b"Bearer ann")]) == ann


def test_a_missing_token_has_an_empty_digest() -> None:
    assert token_digest([]) == token_digest([("authorization", "")]) == ""


def test_a_salt_is_bound_to_its_client_and_no_salt_is_shared() -> None:
    assert bind_salt("s", "ann") != bind_salt("s", "bob") != bind_salt("s", "")
    assert bind_salt("", "ann") == bind_salt("", "bob") == ""


def test_all_salts_of_a_client_have_one_tenant() -> None:
    ann = [("authorization", "Bearer ann")]
    scope = RequestScopes(by_token=True).begin("id", ann)
    calls = [
        GenerateCall("id", TokenPrompt((1,)), SamplingParams(), cache_salt=salt)
        for salt in ("a", "b", "")
    ]

    tenants = []
    for call in calls:
        with scope.answering(call) as bound:
            tenants.append(bound.tenant)

    assert tenants == [token_digest(ann), token_digest(ann), ""]


def test_a_client_is_known_by_its_token_else_its_salt_else_the_host_that_calls() -> None:
    def client(token: str = "", salt: str = "", peer: str = "ipv4:10.0.0.1:50001") -> str:
        headers = [("authorization", f"Bearer {token}")] if token else []
        scope = RequestScopes(by_token=True).begin("id", headers, address=host_of_peer(peer))
        call = GenerateCall("id", TokenPrompt((1,)), SamplingParams(), cache_salt=salt)
        with scope.answering(call) as bound:
            return bound.client

    assert client("ann") == client("ann", "s", "ipv4:10.0.0.2:1") != client("bob")
    assert client("", "s") == client("", "s", "ipv4:10.0.0.2:1") != client("", "t")
    assert client() == client(peer="ipv4:10.0.0.1:50002") != client(peer="ipv4:10.0.0.2:50001")
    assert len({client("x"), client("", "x"), client("", "", "x:1")}) == 3
    assert "ann" not in client("ann")
    assert len(client("ann")) == 16


def test_clients_take_turns_by_their_token_else_by_the_host_that_calls() -> None:
    def client(token: str, host: str) -> str:
        headers = [("authorization", f"Bearer {token}")] if token else []
        scope = RequestScopes(by_token=True).begin("id", headers, address=host)
        assert scope.client == scope.context.client == scope.begin_child("id.1").client
        return scope.client

    assert client("ann", "10.0.0.1") == client("ann", "10.0.0.2") != client("bob", "10.0.0.1")
    assert client("", "10.0.0.1") != client("", "10.0.0.2")
    assert client("", "") == ""


def test_kv_that_a_client_names_is_shared_with_no_other_request() -> None:
    kv = ForeignKv("vllm", 5600, "engine", "cmpl-1", (7,), 16)
    call = GenerateCall("id", TokenPrompt((1,)), SamplingParams(), foreign_kv=kv)
    salts = []
    for salt in ("", "", "s"):
        scope = RequestScopes().begin("id", None)
        with scope.answering(replace(call, cache_salt=salt)) as bound:
            salts.append(bound.cache_salt)

    assert len(set(salts)) == 3
    assert all(len(salt) > 16 for salt in salts)


def test_kv_that_no_other_request_can_hit_is_not_stored() -> None:
    kv = ForeignKv("vllm", 5600, "engine", "cmpl-1", (7,), 16)
    call = GenerateCall("id", TokenPrompt((1,)), SamplingParams(), kv_hints=KvHints(retain_s=60.0))
    scope = RequestScopes().begin("id", None)

    with scope.answering(replace(call, foreign_kv=kv)) as private, scope.answering(call) as shared:
        assert private.kv_hints.block_hints("").is_released
        assert shared.kv_hints == call.kv_hints


def test_no_salt_of_a_client_equals_that_of_another() -> None:
    ann = token_digest([("authorization", "Bearer ann")])
    bob = token_digest([("authorization", "Bearer bob")])

    assert bind_salt(bind_salt("s", ann), bob) != bind_salt("s", ann)


def test_no_salt_without_a_token_equals_a_bound_salt() -> None:
    """Routers with and without authentication can share nodes."""
    ann = token_digest([("authorization", "Bearer ann")])
    bound = bind_salt("s", ann)

    assert bind_salt(bound, "") != bound
    assert bind_salt(ann, "") != ann  # the tenant of a salt without an owner is the salt
