"""The allocator against a plain model of it: sets of pages, and who names them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_jax.generation.programs import NONE, PageTable

SLOTS, PLACES, PAGES = 4, 3, 7

take = jax.jit(PageTable.with_pages)
share = jax.jit(PageTable.sharing)
release = jax.jit(PageTable.released)

ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.lists(st.integers(0, PLACES), min_size=SLOTS, max_size=SLOTS)),
        st.tuples(
            st.just("share"), st.integers(0, SLOTS - 1), st.integers(0, SLOTS - 1), st.integers(0, PLACES)
        ),
        st.tuples(st.just("release"), st.sets(st.integers(0, SLOTS - 1))),
    ),
    max_size=12,
)


def held(model: list[list[int]]) -> set[int]:
    return {page for pages in model for page in pages}


@settings(max_examples=60, deadline=None)
@given(ACTIONS)
def test_pages_are_never_lost_nor_given_twice(actions):
    pages = PageTable.empty(SLOTS, PLACES, PAGES)
    model: list[list[int]] = [[] for _ in range(SLOTS)]  # a slot's pages, from its first place on
    for action in actions:
        if action[0] == "take":
            upto = np.array(action[1])
            pages, served = take(pages, jnp.arange(PLACES)[None] < upto[:, None])
            table, asked, left = np.array(pages.table), 0, PAGES - len(held(model))
            for slot in range(SLOTS):
                need = max(0, upto[slot] - len(model[slot]))
                asked += need
                assert bool(served[slot]) == (asked <= left)
                if served[slot] and need:
                    fresh = table[slot, len(model[slot]) : upto[slot]].tolist()
                    assert NONE not in fresh and not set(fresh) & held(model)
                    model[slot] += fresh
        elif action[0] == "share":
            _, slot, sibling, count = action
            if model[slot] or slot == sibling:
                continue
            pages = share(pages, slot, sibling, count)
            model[slot] = model[sibling][:count]
        else:
            gone = np.isin(np.arange(SLOTS), list(action[1]))
            pages = release(pages, gone)
            model = [[] if gone[slot] else own for slot, own in enumerate(model)]
        for slot, own in enumerate(model):
            assert np.array(pages.table)[slot].tolist() == own + [NONE] * (PLACES - len(own))
        named = [page for own in model for page in own]
        assert np.array(pages.users)[1:].tolist() == [named.count(page) for page in range(1, PAGES + 1)]
        assert pages.users[0] == 1 and int(pages.free_beside(0)) == PAGES - len(held(model))
