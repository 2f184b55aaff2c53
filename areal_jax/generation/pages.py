"""Which page of KV belongs to whom: a block table and a count of users, as pure functions on the device.

A page may stand in several slots' tables: the prompt that a group shares. It is free once nobody names it.
Shapes: N slots, M places in a slot's table, P pages beside page 0, which is scratch and never free.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int

NONE = 0
"""In a table: no page yet. Writing there writes into the scratch page."""


class PageTable(struct.PyTreeNode):
    table: Int[Array, "N M"]
    users: Int[Array, " pages"]
    """Table entries that name each page; page 0 counts one that never goes."""

    @classmethod
    def empty(cls, slots: int, places: int, pages: int) -> PageTable:
        return cls(jnp.full((slots, places), NONE, jnp.int32), jnp.zeros(pages + 1, jnp.int32).at[0].set(1))

    @property
    def free_count(self) -> Int[Array, ""]:
        return (self.users == 0).sum()

    def released(self, slots: Bool[Array, " N"]) -> PageTable:
        """The table without the pages of these slots; those that nobody else names are free."""
        gone = slots[:, None] & (self.table != NONE)
        users = self.users.at[jnp.where(gone, self.table, 0)].add(-gone.astype(jnp.int32))
        return PageTable(jnp.where(slots[:, None], NONE, self.table), users)

    def sharing(self, slot: Int[Array, ""], sibling: Int[Array, ""], count: Int[Array, ""]) -> PageTable:
        """The first `count` pages of `sibling` stand in the empty table of `slot` too."""
        is_shared = jnp.arange(self.table.shape[1]) < count
        shared = jnp.where(is_shared, self.table[sibling], NONE)
        table = self.table.at[slot].set(jnp.where(is_shared, shared, self.table[slot]))
        return PageTable(table, self.users.at[shared].add((shared != NONE).astype(jnp.int32)))

    def with_pages(self, wanted: Bool[Array, "N M"]) -> tuple[PageTable, Bool[Array, " N"]]:
        """A free page at every wanted place that has none. A slot gets all that it wants, or none.

        Second: the slots that got all, in the order of slots, as far as free pages last.
        """
        wanted = wanted & (self.table == NONE)
        order = jnp.cumsum(wanted.ravel()).reshape(wanted.shape)
        free = jnp.cumsum(self.users == 0)
        is_served = order[:, -1] <= free[-1]
        given = wanted & is_served[:, None]
        page = jnp.where(given, jnp.searchsorted(free, order), NONE)
        users = self.users.at[page].add(given.astype(jnp.int32))
        return PageTable(jnp.where(given, page, self.table), users), is_served
