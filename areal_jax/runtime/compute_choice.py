"""Decides how each batch is computed, packed or over its prefix trees, and plans the batch accordingly.

What was decided is part of the batch's plan, so that all of the trainer's processes do the same; the trainer
reports it in the step's metrics, so the journal has it, and a batch that is trained again is planned by it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from areal_jax.config.tree import Config
from areal_jax.trajectories.leaf_order import Blocks
from areal_jax.trajectories.leaf_ranges import TOKENS, LeafCosts
from areal_jax.trajectories.packing import plan_batch
from areal_jax.trajectories.paths import paths_of
from areal_jax.trajectories.plan import BatchPlan
from areal_jax.trajectories.prefix_tree import Sampled
from areal_jax.trajectories.train_cost import (
    MeasuredBatch,
    TrainCosts,
    Work,
    default_costs,
    fitted_costs,
    packed_work,
    tree_work,
)
from areal_jax.types import Group

Way = Literal["packed", "tree"]

FITTED_FROM = 16
"""Number of measured batches of a way from which on its costs are fitted."""
MOST_MEASURED = 64
"""Number of newest measured batches of a way that are fitted."""
TRIED_EVERY = 16
"""A way with too few measured batches for a fit is tried once in so many batches."""
TRIED_WITHIN = 2.0
"""A way is tried only if its forecast is at most so many times the other one's."""


def plan_groups(
    config: Config, groups: Sequence[Group], takes_shared_prompts: bool, choice: Mapping[str, Any]
) -> BatchPlan:
    """Plan the row and column of each token of the groups in a batch.

    `takes_shared_prompts`: whether the learner can process a prompt once for all samples of its group.
    `choice`: what was decided about this batch (`BatchPlan.choice`). Raises PackingError if a sample is
    longer than a row.
    """
    t = config.trainer
    layout = "shared" if takes_shared_prompts else "repeated"
    if choice["compute"] == "tree":
        layout = "apart"
    plan = plan_batch(groups, t.rows, config.row_length, config.algorithm.minibatches, layout)
    return plan._replace(choice=dict(choice))


def recorded_choice(config: Config, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what was decided about a batch, from its metrics row.

    Rows of older runs do not have it; these had no way but the config's.
    """
    choice = {name: metrics[name] for name in ("compute", "tree_costs") if name in metrics}
    return {"compute": config.trainer.compute} | choice


class ComputeChoice:
    """Plans batches, each computed in the way that `trainer.compute` names or, with auto, in the faster one.

    The forecast of a way is by token-based default costs, and from FITTED_FROM measured batches of this way
    on by costs fitted to these. If the run promises equal bits, only the defaults decide, so that a second
    run decides the same. `rows`: metrics rows of the steps before this process started.
    """

    def __init__(self, config: Config, rows: Iterable[Mapping[str, Any]] = ()) -> None:
        c, a = config, config.algorithm
        self._config, self._blocks = config, Blocks(config.tree_block)
        self._devices = c.trainer.mesh.data * c.trainer.mesh.fsdp
        self._passes = int(a.proximal_form == "recompute" or a.critic.kind != "none")
        self._passes += int(a.has_reference) + int(a.teacher is not None)
        self._measured: dict[Way, deque[MeasuredBatch]] = {
            way: deque(maxlen=MOST_MEASURED) for way in ("packed", "tree")
        }
        self._untried: dict[Way, int] = dict.fromkeys(self._measured, 0)
        """Number of batches since one of this way was measured, or since the first batch."""
        for row in rows:
            self.see(row)

    def see(self, row: Mapping[str, Any]) -> None:
        """Take in the metrics row of a trained step, in the order of the steps."""
        work, seconds, way = row.get("compute_work"), row.get("update_s"), row.get("compute")
        for each in self._untried:
            self._untried[each] += 1
        # The seconds of a batch with which a program was compiled say nothing about the next batch.
        if work is None or not seconds or way not in self._measured or row.get("compiled_programs"):
            return
        self._measured[way].append(MeasuredBatch(Work(**work), seconds))
        self._untried[way] = 0

    def plan(self, groups: Sequence[Group], takes_shared_prompts: bool) -> BatchPlan:
        """Plan a batch, and decide how it is computed; raises PackingError as `plan_groups` does."""
        compute = self._config.trainer.compute
        groups = sorted(groups, key=lambda group: group.ordinal)
        way: Way = "tree" if compute == "tree" else "packed"
        plan = plan_groups(self._config, groups, takes_shared_prompts, {"compute": way})
        if compute == "packed" or (compute == "tree" and not self._cuts_by_costs):
            return plan
        leaf_costs = TOKENS
        if self._cuts_by_costs and len(self._measured["tree"]) >= FITTED_FROM:
            leaf_costs = self._costs("tree").of_leaves(self._passes)
        of_tree = self._tree_work(groups, leaf_costs)
        choice: dict[str, Any] = {"compute": way, "tree_costs": list(map(float, leaf_costs))}
        work: dict[Way, Work] = {"tree": of_tree}
        if compute == "auto":
            work["packed"] = packed_work(plan, self._config.trainer.rows, self._devices, self._passes)
            forecast: dict[Way, float] = {
                each: self._costs(each).seconds(work[each]) for each in self._measured
            }
            choice["compute"] = way = self._chosen(forecast)
            if any(self._measured.values()) and not self._config.promises_bits:
                choice["compute_forecast_s"] = forecast
        choice["compute_work"] = work[way]._asdict()
        if way == plan.choice["compute"]:
            return plan._replace(choice=choice)
        return plan_groups(self._config, groups, takes_shared_prompts, choice)

    @property
    def _cuts_by_costs(self) -> bool:
        """Whether measured costs may decide which device computes which leaves."""
        return self._devices > 1 and not self._config.promises_bits

    def _costs(self, way: Way) -> TrainCosts:
        if self._config.promises_bits:
            return default_costs(self._blocks.call_tokens, ())
        own = self._measured[way]
        # Without a measured batch of its own, a token takes as long as in the other way.
        of = own or [one for each in self._measured.values() for one in each]
        defaults = default_costs(self._blocks.call_tokens, of)
        return fitted_costs(own, defaults) if len(own) >= FITTED_FROM else defaults

    def _chosen(self, forecast: Mapping[Way, float]) -> Way:
        """Returns the way with the smaller forecast; sometimes the other one, to measure it."""
        best: Way = "tree" if forecast["tree"] < forecast["packed"] else "packed"
        other: Way = "packed" if best == "tree" else "tree"
        is_due = self._untried[other] >= TRIED_EVERY and len(self._measured[other]) < FITTED_FROM
        is_near = forecast[other] <= TRIED_WITHIN * forecast[best]
        return other if is_due and is_near and not self._config.promises_bits else best

    def _tree_work(self, groups: Sequence[Group], costs: LeafCosts) -> Work:
        a = self._config.algorithm
        sequences = [[Sampled.of(p) for one in group.trajectories for p in paths_of(one)] for group in groups]
        each = len(groups) // a.minibatches
        minibatches = [
            [one for group in sequences[start : start + each] for one in group]
            for start in range(0, len(groups), each)
        ]
        return tree_work(minibatches, self._devices, self._blocks, costs, self._passes)
