"""The named ablations. A new one is an entry here, and a recipe in `configs` if it needs one of its own."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from areal_jax.runtime.ablation import Ablation, Table
from areal_jax.types import ArealError

UNBOUNDED = "unbounded"
STALENESS = (0, 1, 2, 4, 8, 16, UNBOUNDED)

ORACLE_MARGIN = 0.03
"""Reward that decoupled may lose to staleness 0."""


def _decoupled_holds(table: Table) -> bool:
    oracle = table.mean(0, "decoupled")
    return all(abs(table.mean(eta, "decoupled") - oracle) <= ORACLE_MARGIN for eta in (1, 2, 4))


def _naive_earns_less(table: Table) -> bool:
    """Also of the means: no naive seed reaches the worst decoupled one."""
    return all(
        table.mean(eta, "naive") < table.mean(eta, "decoupled")
        and max(table.rewards(eta, "naive")) < min(table.rewards(eta, "decoupled"))
        for eta in STALENESS[3:]
    )


def _naive_clips_more(table: Table) -> bool:
    return all(
        table.mean(eta, "naive", "clip_share") > table.mean(eta, "decoupled", "clip_share")
        for eta in STALENESS[1:]
    )


def _unbounded_costs(table: Table) -> bool:
    return table.mean(UNBOUNDED, "decoupled") <= table.mean(4, "decoupled")


ABLATIONS: Mapping[str, Ablation] = {
    "staleness": Ablation(
        doc="how much staleness costs with the trust region around the behaviour policy (naive) and around "
        "the proximal one (decoupled); AReaL's table 2 in small (arXiv:2505.24298)",
        recipe="configs/staleness.yaml",
        key="control.max_staleness",
        values=STALENESS,
        arms={
            "naive": ("algorithm.proximal=none", "algorithm.off_policy=none"),
            "decoupled": ("algorithm.proximal=recompute",),
        },
        seeds=3,
        speed=0.6,
        claims={
            f"decoupled at staleness 1, 2, 4 is within {ORACLE_MARGIN} of staleness 0": _decoupled_holds,
            "from staleness 4 on every naive seed earns less than every decoupled one": _naive_earns_less,
            "from staleness 1 on naive clips more than decoupled": _naive_clips_more,
            "decoupled earns no more unbounded than at staleness 4": _unbounded_costs,
        },
    ),
}


def find(name: str) -> Ablation:
    """Raises ArealError for a name that is none."""
    if name not in ABLATIONS:
        near = difflib.get_close_matches(name, ABLATIONS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(ABLATIONS)}"
        raise ArealError(f"no ablation {name}; {hint}")
    return ABLATIONS[name]
