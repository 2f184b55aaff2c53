"""The three functions of an algorithm: its loss, its advantage estimator and its off-policy weight."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from jaxtyping import Array

from areal_jax.algorithms.advantages import ADVANTAGES, Estimate
from areal_jax.algorithms.losses import LOSSES, Loss
from areal_jax.algorithms.off_policy import OFF_POLICY
from areal_jax.config.presets import OWN_RATIO
from areal_jax.config.sections import AlgorithmConfig
from areal_jax.plugin import check_settings, load_object
from areal_jax.types import ArealError


class Functions(NamedTuple):
    """The three functions that an algorithm's config names, loaded; they accept the config's settings."""

    loss: Loss
    advantage: Callable[..., Array | Estimate]
    off_policy: Callable[..., tuple[Array, Array]]
    """Called as `off_policy(batch, *, settings)`; the argument `minibatches`, if any, is preset."""

    @classmethod
    def of(cls, a: AlgorithmConfig) -> Functions:
        """Returns the functions that the config `a` names.

        Raises ArealError if a name is unknown, a setting is wrong, or the off-policy weight cannot be
        combined with the loss or with `a.proximal` (`fitting`).
        """

        def load(key: str, builtin: Any, what: str) -> Any:
            function = load_object(getattr(a, key), builtin, what)
            check_settings(function, getattr(a, f"{key}_settings"), f"algorithm.{key}_settings")
            return function

        loss = load("loss", LOSSES, "loss")
        advantage = load("advantage", ADVANTAGES, "advantage estimator")
        return cls(loss, advantage, fitting(loss, load("off_policy", OFF_POLICY, "off-policy weight"), a))


def fitting(
    loss: Callable[..., Any], off_policy: Callable[..., Any], a: AlgorithmConfig
) -> Callable[..., Any]:
    """Returns the off-policy weight as a function `(batch, *, settings)`, if the config `a` allows it.

    A parameter `minibatches` of `off_policy` is bound to `a.minibatches`. Raises ArealError if the loss
    corrects for the behaviour policy itself and so requires another off-policy weight, or if `off_policy` has
    the parameter `minibatches` and the proximal policy is not recomputed.
    """
    wanted = "none" if a.loss in OWN_RATIO else getattr(loss, "off_policy", a.off_policy)
    if a.off_policy != wanted:
        raise ArealError(
            f"algorithm.loss={a.loss} with algorithm.off_policy={a.off_policy}: this loss already corrects "
            "for the behaviour policy, so each token would be corrected twice; set "
            f"algorithm.off_policy={wanted}"
        )
    if "minibatches" not in inspect.signature(off_policy).parameters:
        return off_policy
    if a.proximal_form != "recompute":
        raise ArealError(
            f"algorithm.off_policy={a.off_policy} with algorithm.proximal={a.proximal}: this off-policy "
            "weight needs the proximal log-probs of a whole minibatch before the update on it; set "
            "algorithm.proximal=recompute"
        )
    return partial(off_policy, minibatches=a.minibatches)
