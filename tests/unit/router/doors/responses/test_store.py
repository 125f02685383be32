"""Store of responses: bounds by number, bytes and age."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.router.doors.responses.store import ResponseStore, StoredResponse, StoreLimits

LIMITS = StoreLimits(max_responses=3, max_bytes=100, max_total_bytes=150, max_age_s=10)


def test_the_oldest_response_of_a_tenant_is_evicted_by_number_and_by_bytes() -> None:
    store = ResponseStore(LIMITS)
    for name in "abcd":
        assert store.put("t", name, StoredResponse(b"1", b"2", 0))
    assert [store.find("t", name, 0) is not None for name in "abcd"] == [False, True, True, True]

    assert store.put("t", "large", StoredResponse(b"1" * 50, b"2" * 48, 0))
    assert [store.find("t", name, 0) is not None for name in "cd"] == [False, True]
    assert not store.put("t", "too large", StoredResponse(b"1" * 50, b"2" * 51, 0))
    assert store.num_bytes == 100


def test_responses_expire() -> None:
    store = ResponseStore(LIMITS)
    store.put("t", "a", StoredResponse(b"1", b"2", 0))
    store.put("t", "b", StoredResponse(b"1", b"2", 5))

    assert store.find("t", "a", 9.9) is not None
    assert store.find("t", "a", 10) is None
    assert (len(store), store.num_bytes) == (1, 2)


def test_tenants_do_not_see_delete_or_evict_each_others_responses() -> None:
    store = ResponseStore(LIMITS)
    store.put("t", "a", StoredResponse(b"1", b"2", 0))
    for number in range(9):
        store.put("u", f"{number}", StoredResponse(b"1", b"2", 0))

    assert store.find("u", "a", 0) is None
    assert not store.delete("u", "a", 0)
    assert store.delete("t", "a", 0)
    assert not store.delete("t", "a", 0)


def test_a_response_of_a_connection_is_seen_by_it_alone() -> None:
    store = ResponseStore(LIMITS)
    store.put("t", "a", StoredResponse(b"", b"2", 0, "mine"))
    store.put("t", "b", StoredResponse(b"1", b"2", 0))

    assert [store.find("t", "a", 0, one) is not None for one in ("", "other", "mine")] == [
        False,
        False,
        True,
    ]
    assert store.find("t", "b", 0, "mine") is not None
    assert not store.delete("t", "a", 0)
    assert store.delete("t", "a", 0, "mine")


puts = st.tuples(
    st.sampled_from("tuv"), st.integers(0, 120), st.floats(0, 6), st.sampled_from(["put", "delete"])
)


@given(st.lists(puts, max_size=40))
def test_the_bounds_hold_after_any_calls(calls: list[tuple[str, int, float, str]]) -> None:
    store, now, ids = ResponseStore(LIMITS), 0.0, {tenant: [""] for tenant in "tuv"}
    for number, (tenant, size, wait_s, what) in enumerate(calls):
        now += wait_s
        if what == "delete":
            store.delete(tenant, ids[tenant][size % len(ids[tenant])], now)
        elif store.put(tenant, f"{number}", StoredResponse(b"1" * size, b"", now)):
            ids[tenant].append(f"{number}")
            assert store.find(tenant, f"{number}", now) is not None

        kept = {
            tenant: [found for one in ids[tenant] if (found := store.find(tenant, one, now))]
            for tenant in ids
        }
        sizes = {tenant: sum(one.num_bytes for one in found) for tenant, found in kept.items()}
        assert max(map(len, kept.values())) <= LIMITS.max_responses
        assert max(sizes.values()) <= LIMITS.max_bytes
        assert sum(sizes.values()) == store.num_bytes <= LIMITS.max_total_bytes
        assert sum(map(len, kept.values())) == len(store)
        assert all(
            now - one.stored_s < LIMITS.max_age_s for found in kept.values() for one in found
        )
