"""The mathematics of an update: pure functions of parameters and a packed batch.

The objective, which is minimised, is the sum over loss tokens of weights x (off-policy weight x loss + KL -
entropy + value loss). The weights are computed over the whole minibatch, so the minibatch's gradient is the
sum of its micro-batches' gradients, however the minibatch is split. Shapes: R rows of T tokens a micro-batch,
B rows a batch, S sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from areal_jax.algorithms import masked
from areal_jax.algorithms.advantages import Estimate, whitened, with_overlong_penalty
from areal_jax.algorithms.functions import Functions
from areal_jax.algorithms.kl import kl_loss, kl_reward
from areal_jax.algorithms.logprobs import TokenStats
from areal_jax.algorithms.losses import LOSSES
from areal_jax.algorithms.proximal import mixed_logp, proximal_mix
from areal_jax.algorithms.reduction import reduction_weights
from areal_jax.algorithms.shapes import check_batch, check_result, empty_batch
from areal_jax.config.sections import AlgorithmConfig
from areal_jax.models.experts import RouterSums
from areal_jax.models.model import Model, Params
from areal_jax.trainer.critic import Critic, at_end, before, value_loss
from areal_jax.trainer.forward import Forward, asked_tokens
from areal_jax.trainer.state import KLControl, kl_coef
from areal_jax.trainer.trainable import Trainable
from areal_jax.trainer.update_metrics import Sums, token_sums, value_sums
from areal_jax.types import ArealError, Batch, PolicyOutputs, PreparedBatch


@dataclass(frozen=True, kw_only=True)
class Objective:
    """The objective of one algorithm over one model.

    The methods' arguments `params` and `critic` are the parameters of policy and critic. `control` holds the
    KL's adaptive coefficient; None: the coefficient is the config's.
    """

    forward: Forward
    algorithm: AlgorithmConfig
    functions: Functions
    critic: Critic | None
    max_tokens: float
    """Maximum length of a turn, in tokens; a sample without a workflow has one turn."""
    trainable: Trainable

    @classmethod
    def of(
        cls,
        forward: Callable[..., Forward],
        model: Model,
        algorithm: AlgorithmConfig,
        max_tokens: float,
        critic: Critic | None,
        trainable: Trainable,
    ) -> Objective:
        """Returns the objective; `forward(model, has_entropy_gradient=...)` makes the forward pass."""
        # A loss from outside this package may differentiate the entropy.
        has_entropy_gradient = algorithm.entropy_coef > 0 or algorithm.loss not in LOSSES
        return cls(
            forward=forward(model, has_entropy_gradient=has_entropy_gradient),
            algorithm=algorithm,
            functions=Functions.of(algorithm),
            critic=critic,
            max_tokens=max_tokens,
            trainable=trainable,
        )

    # --- once per batch -------------------------------------------------------------------------------------

    @property
    def on_arrival(self) -> tuple[str, ...]:
        """Names of the scores that `arrive` computes: proximal_logp, values_after, both or none."""
        recomputed = ("proximal_logp",) if self.algorithm.proximal_form == "recompute" else ()
        return recomputed + (("values_after",) if self.critic else ())

    def arrive(self, params: Params, critic: Params | None, micro: Batch) -> dict[str, Array]:
        """Returns a micro-batch's scores (see `on_arrival`), (R, T) each, before the batch's first update."""
        # The compiler drops what nothing reads.
        stats, values_after = self.outputs(params, critic, micro)
        out = {}
        if "proximal_logp" in self.on_arrival:
            out["proximal_logp"] = masked.keep(stats.logp, micro.loss_mask)
        return out if values_after is None else out | {"values_after": values_after}

    def finish(
        self, packed: Batch, version: Array, control: KLControl | None, scores: Mapping[str, Array]
    ) -> PreparedBatch:
        """Returns the batch ready for the update: with the final loss mask, ages, advantages and weights.

        Ages, advantages and weights are 0 off the loss mask. `version` is the trainer's version. `scores` are
        (B, T) arrays: proximal_logp, ref_logp, teacher_logp and values_after, as far as the algorithm uses
        them. If the update interpolates the proximal log-probs, the batch gets `proximal_mix` in their place.
        """
        a, sequences = self.algorithm, packed.reward.shape[0]
        check_batch(packed, *scores.values())
        batch = self._with_scores(packed, version, control, scores)
        mask, rewards = batch.loss_mask, batch.reward
        if a.truncation == "soft_penalty":
            rewards = with_overlong_penalty(batch, self.max_tokens, a.overlong_margin or self.max_tokens / 5)
        estimate = self.functions.advantage(rewards, batch, **a.advantage_settings)
        check_result(estimate, batch, f"algorithm.advantage={a.advantage}")
        if isinstance(estimate, Estimate):
            batch = batch._replace(returns=masked.keep(estimate.returns, mask))
            estimate = estimate.advantages
        advantages = masked.keep(estimate, mask)
        if a.whiten == "tokens":
            advantages = whitened(advantages, mask)
        weights = reduction_weights(
            mask,
            batch.segment_ids,
            sequences=sequences,
            minibatches=a.minibatches,
            reduction=a.reduction,
            constant=a.reduction_constant or self.max_tokens,
            sample_ids=batch.sample_ids,
        )
        batch = batch._replace(advantages=advantages, loss_weights=weights)
        if batch.proximal_logp is None:
            return batch._replace(proximal_mix=proximal_mix(batch.ages, a.minibatches, a.proximal_form))
        return self._with_off_policy(batch)

    def _with_scores(
        self, packed: Batch, version: Array, control: KLControl | None, scores: Mapping[str, Array]
    ) -> PreparedBatch:
        a, batch, mask = self.algorithm, PreparedBatch(*packed), packed.loss_mask
        if a.truncation == "mask":
            mask = mask & (masked.per_token(batch.truncated.astype(float), batch.segment_ids) == 0)
        kept = {name: masked.keep(x, mask) for name, x in scores.items() if name in PreparedBatch._fields}
        batch = batch._replace(
            loss_mask=mask,
            ages=jnp.where(mask & (batch.versions >= 0), version - batch.versions, 0),
            behavior_logp=masked.keep(batch.behavior_logp, mask),
            **kept,
        )
        if a.proximal_form == "none":
            batch = batch._replace(proximal_logp=batch.behavior_logp)
        if a.has_reference and a.kl.place == "reward":
            kl = kl_reward(batch.behavior_logp, batch.ref_logp, a.kl.estimator)
            batch = batch._replace(token_rewards=masked.keep(-kl_coef(a, control) * kl, mask))
        if self.critic is not None:
            after = scores["values_after"]
            ends = at_end(after, batch.segment_ids, batch.reward.shape[0])
            batch = batch._replace(
                values=masked.keep(before(after, batch.previous), mask),
                bootstrap=masked.keep(ends, batch.truncated),
            )
        return batch

    def _with_off_policy(self, batch: PreparedBatch) -> PreparedBatch:
        """Returns the batch with its off-policy weights, 1 off the loss mask, and whether each was cut."""
        a = self.algorithm
        weight, is_cut = self.functions.off_policy(batch, **a.off_policy_settings)
        check_result((weight, is_cut), batch, f"algorithm.off_policy={a.off_policy}")
        return batch._replace(
            off_policy_weight=jnp.where(batch.loss_mask, weight, 1.0), off_policy_cut=is_cut & batch.loss_mask
        )

    # --- once per micro-batch -------------------------------------------------------------------------------

    def gradient(
        self, params: Params, critic: Params | None, micro: PreparedBatch, control: KLControl | None
    ) -> tuple[tuple[Params, Params | None], Sums]:
        """Returns the micro-batch's gradient for (trained leaves, critic), and its metric sums.

        The sum of the gradients of a minibatch's micro-batches is the minibatch's gradient.
        """

        def value(trained: tuple[Params, Params | None]) -> tuple[Array, Sums]:
            whole = self.trainable.whole(trained[0], params)
            stats, values_after, routers = self._outputs(whole, trained[1], micro)
            total, sums = self.loss(stats, values_after, micro, control)
            return total, sums | self._of_routers(routers)

        return jax.grad(value, has_aux=True)((self.trainable.of(params), critic))

    def outputs(
        self, params: Params, critic: Params | None, micro: Batch | PreparedBatch
    ) -> tuple[TokenStats, Float[Array, "R T"] | None]:
        """Returns the statistics of the micro-batch's loss tokens, and the values of the states after tokens.

        The values are None if `critic` is.
        """
        return self._outputs(params, critic, micro)[:2]

    def _outputs(
        self, params: Params, critic: Params | None, micro: Batch | PreparedBatch
    ) -> tuple[TokenStats, Float[Array, "R T"] | None, RouterSums | None]:
        """Returns the results of `outputs`, and what the routers did with all of the micro-batch's tokens."""
        if self.algorithm.routes == "replay" and micro.experts is None:
            raise ArealError(
                "algorithm.routes=replay, but the batch names no experts; sample it by hosts with the same "
                "setting, or set algorithm.routes=own"
            )
        hidden, routers = self.forward.routed(params, micro)
        stats = self.forward.stats(params, hidden, asked_tokens(micro))
        if critic is None or self.critic is None:
            return stats, None, routers
        of_trunk = lambda forward, trunk: forward.hidden(trunk, micro)  # noqa: E731
        return stats, self.critic.values(critic, params, self.forward, hidden, of_trunk), routers

    def loss(
        self,
        stats: TokenStats,
        values_after: Array | None,
        micro: PreparedBatch,
        control: KLControl | None = None,
    ) -> tuple[Float[Array, ""], Sums]:
        """Returns the micro-batch's term of the minibatch's objective, and the micro-batch's metric sums.

        The objective is the sum of these terms, without a value loss if `values_after` is None. The arguments
        are the results of `outputs`; those of a token may come from any forward pass over its prefix.
        """
        value = None
        if values_after is not None:
            value = masked.keep(before(values_after, micro.previous), micro.loss_mask)
        objective, metrics = self._terms(stats, value, micro, control)
        total = masked.total(micro.loss_weights * objective, micro.loss_mask)
        return total, jax.lax.stop_gradient(metrics | {"loss": total})

    def _terms(
        self, stats: TokenStats, value: Array | None, micro: PreparedBatch, control: KLControl | None
    ) -> tuple[Float[Array, "R T"], Sums]:
        """Returns each token's term of the objective, not yet multiplied by its weight, and the metric sums.

        `value`: the critic's value of the state before each token; None without a critic.
        """
        a, mask = self.algorithm, micro.loss_mask
        now = PolicyOutputs(masked.keep(stats.logp, mask), masked.keep(stats.entropy, mask), value)
        if micro.proximal_logp is None:
            proximal = mixed_logp(micro.behavior_logp, now.logp, micro.proximal_mix)
            micro = self._with_off_policy(micro._replace(proximal_logp=proximal))
        loss, own = self.functions.loss(now, micro, **a.loss_settings)
        check_result((loss, own), micro, f"algorithm.loss={a.loss}")
        objective = micro.off_policy_weight * loss
        if a.has_reference and a.kl.place == "loss":
            kl = kl_loss(now.logp, micro.ref_logp, micro.behavior_logp, a.kl.estimator)
            objective += kl_coef(a, control) * kl
            own = own | {"kl": kl}
        elif a.has_reference:
            own = own | {"kl": kl_reward(micro.behavior_logp, micro.ref_logp, a.kl.estimator)}
        if a.teacher is not None:
            own = own | {"teacher_kl": kl_reward(micro.behavior_logp, micro.teacher_logp)}
        if a.entropy_coef:
            objective -= a.entropy_coef * now.entropy
        metrics = token_sums(micro, stats, own, a.proximal_form == "recompute")
        if value is not None:
            of_critic, is_clipped = value_loss(value, micro.values, micro.returns, a.critic.clip)
            objective += a.critic.coef * of_critic
            metrics |= {"values": value_sums(of_critic, is_clipped, micro.values, micro.returns, mask)}
        return objective, metrics

    def _of_routers(self, routers: RouterSums | None) -> Sums:
        return {} if routers is None else {"routers": routers}

    def no_metrics(self, rows: int, length: int) -> Sums:
        """Returns zero metric sums, named by tracing the loss on a micro-batch of `rows` x `length`."""

        def trace() -> Sums:
            token = jnp.zeros((rows, length))
            value = None if self.critic is None else token
            sums = self.loss(TokenStats(token, token, token), value, empty_batch(rows, length))[1]
            return sums | self._of_routers(self.forward.no_routes(self.algorithm.routes == "replay"))

        sums = jax.eval_shape(trace)
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), sums)
