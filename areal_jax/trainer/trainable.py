"""Selects the leaves to train by their paths: takes the trained part out of a tree and puts it back.

The trained part has the tree's structure, with None for frozen leaves: jax and optax skip None, so a frozen
leaf has no gradient, no moments and no weight decay. The reference policy and a critic's trunk store only the
trained part, too, because their frozen leaves equal the policy's.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

import jax

from areal_jax.models.model import Model, Params
from areal_jax.models.quantize import CODES, SCALE
from areal_jax.types import ArealError
from areal_jax.weights.digest import to_plain


@dataclass(frozen=True)
class Trainable:
    """Selects the leaves with a path that the regular expression `pattern` matches in full; None: all."""

    pattern: str | None = None

    def of(self, tree: Params) -> Params:
        """Returns `tree`, which has the parameters' structure, with None in place of each frozen leaf."""
        pattern = re.compile(self.pattern or ".*")
        kept = [leaf if pattern.fullmatch(name) else None for name, leaf in to_plain(tree).items()]
        return jax.tree.unflatten(jax.tree.structure(tree), kept)

    def whole(self, trained: Params, tree: Params) -> Params:
        """Returns `tree`, with its trained leaves replaced by the leaves of `trained`, a result of `of`."""
        return jax.tree.map(
            lambda new, old: old if new is None else new, trained, tree, is_leaf=lambda leaf: leaf is None
        )

    def require(self, model: Model) -> None:
        """Raise ArealError if the pattern matches no leaf of the model, or matches a quantised matrix.

        A quantised matrix cannot be trained, because integer codes have no gradient. If nothing matches, the
        message lists the most similar paths.
        """
        names, trained = list(to_plain(model.abstract_params)), list(to_plain(self.of(model.abstract_params)))
        quantised = [name for name in trained if name.endswith((f".{CODES}", f".{SCALE}"))]
        if quantised:
            raise ArealError(
                f"model.quantize={model.config.quantize} with trainer.trainable="
                f"{self.pattern or 'everything'}: {quantised[0]} would be trained, but only frozen matrices "
                "can be quantised; set model.lora.rank to train adapters instead, set trainer.trainable to "
                "match no quantised matrix, or set model.quantize=none"
            )
        if trained:
            return
        near = difflib.get_close_matches(self.pattern or "", names, n=4, cutoff=0) or names
        raise ArealError(
            f"trainer.trainable={self.pattern} matches no complete path of a model parameter; choose a "
            f"regular expression that matches some; the most similar paths are: " + ", ".join(near)
        )

    def count(self, model: Model) -> int:
        """Returns the number of the model's parameters that are trained."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.of(model.abstract_params)))
