"""Decides how each batch is computed, packed or over its prefix trees, and plans the batch accordingly.

What was decided is part of the batch's plan, so that all of the trainer's processes do the same; the trainer
reports it in the step's metrics, so the journal has it, and a batch that is trained again is planned by it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from areal_jax.config.tree import Config
from areal_jax.trajectories.leaf_order import Blocks
from areal_jax.trajectories.packing import plan_batch
from areal_jax.trajectories.paths import paths_of
from areal_jax.trajectories.plan import BatchPlan
from areal_jax.trajectories.prefix_tree import Sampled
from areal_jax.trajectories.train_cost import packed_work, tree_work
from areal_jax.types import Group

Way = Literal["packed", "tree"]


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

    Rows of older runs do not have it; these had no way but the config's. `tree_costs` is of runs that cut
    leaves over devices by measured costs, which no run does any more.
    """
    choice = {name: metrics[name] for name in ("compute", "tree_costs") if name in metrics}
    return {"compute": config.trainer.compute} | choice


def plan_new(config: Config, groups: Sequence[Group], takes_shared_prompts: bool) -> BatchPlan:
    """Plan a batch that is trained for the first time, in the way that `trainer.compute` names.

    With auto, in the way that costs fewer tokens (`train_cost.Work`), which the batch and the config decide
    alone. Raises PackingError as `plan_groups` does.
    """
    groups = sorted(groups, key=lambda group: group.ordinal)
    compute = config.trainer.compute
    if compute != "auto":
        return plan_groups(config, groups, takes_shared_prompts, {"compute": compute})
    plan = plan_groups(config, groups, takes_shared_prompts, {"compute": "packed"})
    tokens = _tokens(config, groups, plan)
    way = cheaper(tokens)
    choice = {"compute": way, "compute_tokens": tokens}
    if way == "packed":
        return plan._replace(choice=choice)
    return plan_groups(config, groups, takes_shared_prompts, choice)


def cheaper(tokens: Mapping[Way, float]) -> Way:
    """Returns the way that costs fewer tokens; packed if both cost the same."""
    return "tree" if tokens["tree"] < tokens["packed"] else "packed"


def _tokens(config: Config, groups: Sequence[Group], packed: BatchPlan) -> dict[Way, float]:
    """Returns what each way costs a device, in tokens without gradients."""
    a, mesh, blocks = config.algorithm, config.trainer.mesh, Blocks(config.tree_block)
    devices = mesh.row_parts
    passes = int(a.proximal_form == "recompute" or a.critic.kind != "none")
    passes += int(a.has_reference) + int(a.teacher is not None)
    sequences = [[Sampled.of(p) for one in group.trajectories for p in paths_of(one)] for group in groups]
    each = len(groups) // a.minibatches
    minibatches = [
        [one for group in sequences[start : start + each] for one in group]
        for start in range(0, len(groups), each)
    ]
    of_rows = packed_work(packed, config.trainer.rows, devices, passes)
    of_tree = tree_work(minibatches, devices, blocks, passes)
    return {"packed": of_rows.tokens(blocks.call_tokens), "tree": of_tree.tokens(blocks.call_tokens)}
