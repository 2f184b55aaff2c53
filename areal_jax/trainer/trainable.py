"""Which leaves are trained: a tree split by their paths, and made whole again.

The trained part keeps the tree's form with None for what is frozen, which jax and optax take for nothing: no
gradient, no moments, no weight decay. The reference policy and a critic's trunk are stored as trained parts
too, and share the frozen leaves of the policy.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import Any

import jax

from areal_jax.models.model import Model, Params
from areal_jax.models.quantize import CODES, SCALE
from areal_jax.types import ArealError


@dataclass(frozen=True)
class Trainable:
    """Leaves whose whole path `pattern` matches; None: all."""

    pattern: str | None = None

    def of(self, tree: Params) -> Params:
        """The trained part of a tree over the parameters' paths."""
        if self.pattern is None:
            return tree
        pattern = re.compile(self.pattern)

        def one(path: Any, leaf: Any) -> Any:
            return leaf if pattern.fullmatch(_name(path)) else None

        return jax.tree_util.tree_map_with_path(one, tree)

    def whole(self, trained: Params, tree: Params) -> Params:
        """`tree` with its trained part replaced."""
        if self.pattern is None:
            return trained
        return jax.tree.map(
            lambda new, old: old if new is None else new, trained, tree, is_leaf=lambda leaf: leaf is None
        )

    def require(self, model: Model) -> None:
        """Raises ArealError where the pattern matches no leaf of the model, with the nearest paths.

        Also where it matches a leaf of a quantised matrix, whose codes have no gradient.
        """
        trained, names = _names(self.of(model.abstract_params)), _names(model.abstract_params)
        quantised = [name for name in trained if name.endswith((f".{CODES}", f".{SCALE}"))]
        if quantised:
            raise ArealError(
                f"model.quantize={model.config.quantize} with trainer.trainable="
                f"{self.pattern or 'everything'}: {quantised[0]} would be trained, and only frozen matrices "
                "can be quantised; set model.lora.rank, a narrower trainer.trainable, or model.quantize=none"
            )
        if trained:
            return
        near = difflib.get_close_matches(self.pattern or "", names, n=4, cutoff=0) or names
        raise ArealError(
            f"trainer.trainable={self.pattern} matches no whole path of the model's leaves; the nearest are: "
            + ", ".join(near)
        )

    def count(self, model: Model) -> int:
        """Trained parameters."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.of(model.abstract_params)))


ALL = Trainable()


def _names(tree: Any) -> list[str]:
    return [_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")
