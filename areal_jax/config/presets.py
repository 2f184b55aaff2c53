"""Algorithms as data: each preset is a set of defaults for the `algorithm` section.

The functions that a preset names are in `areal_jax/algorithms`, which this module does not import. In the
formulas b, p and theta are a token's log-probs under the behavior, proximal and current policy, A is its
advantage, u = exp(theta - p), r = exp(theta - b), w = exp(p - b) is the off-policy weight, R is a sequence's
reward, mean_g and std_g are R's mean and standard deviation over its group, eps is a small constant and sg
stops the gradient. Each formula is an objective to maximise; a KL term is subtracted from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from areal_jax.plugin import did_you_mean


class Preset(NamedTuple):
    formula: str
    paper: str
    settings: dict[str, Any]


OWN_RATIO = ("cispo", "aipo", "dppo")
"""Losses that contain a ratio to the behavior policy and therefore need off_policy=none."""

MINIBATCH_STATISTICS = ("m2po",)
"""Off-policy weights that are computed from statistics of a minibatch, and so need proximal=recompute."""

NO_REWARD = ("ones", "teacher_gap")
"""Advantage estimators that do not read the sequences' rewards."""

_CLIP = {"loss": "ppo_clip", "loss_settings": {"low": 0.2, "high": 0.2}}


def _normalized(center: str, scale: str, **others: int) -> dict[str, Any]:
    settings = {"center": center, "scale": scale, **others}
    return {"advantage": "group_normalized", "advantage_settings": settings}


_GROUP = _normalized("group", "group", ddof=1)
_GROUP_MEAN = _normalized("group", "none")
_GROUP_Z = "A = (R - mean_g) / (std_g + eps)"
_CLIPPED = "min(u A, clip(u, 1 - low, 1 + high) A)"

_DECOUPLED = {
    **_CLIP,
    **_normalized("batch", "batch", ddof=1),
    "reduction": "token_mean",
    "minibatches": 4,
}
_GSPO = {
    **_GROUP,
    "loss": "ppo_clip",
    "reduction": "sequence_mean",
    "off_policy": "truncate",
    "off_policy_settings": {"cap": 5.0, "level": "sequence", "aggregate": "mean"},
    "minibatches": 4,
}

PRESETS: dict[str, Preset] = {
    "ppo": Preset(
        f"A from GAE with a critic, gamma 1, lambda 0.95; w {_CLIPPED}; token mean; clipped value loss",
        "Proximal policy optimization, Schulman et al. (arXiv:1707.06347)",
        {
            **_CLIP,
            "advantage": "gae",
            "advantage_settings": {"gamma": 1.0, "lam": 0.95},
            "critic": {"kind": "separate"},
            "reduction": "token_mean",
            "minibatches": 4,
        },
    ),
    "grpo": Preset(
        f"{_GROUP_Z}; w {_CLIPPED}; sequence mean; minus 0.04 KL (estimator k3) in the loss",
        "DeepSeekMath, Shao et al. (arXiv:2402.03300)",
        {**_CLIP, **_GROUP, "reduction": "sequence_mean", "kl": {"coef": 0.04, "estimator": "k3"}},
    ),
    "dr_grpo": Preset(
        f"A = R - mean_g; w {_CLIPPED}; sum over tokens / (max_tokens S), with S sequences",
        "Understanding R1-Zero-like training, Liu et al. (arXiv:2503.20783)",
        {**_CLIP, **_GROUP_MEAN, "reduction": "constant"},
    ),
    "dapo": Preset(
        f"{_GROUP_Z}; w {_CLIPPED}, low 0.2, high 0.28; token mean; groups of equal rewards are "
        "dropped; R includes the penalty for overlong answers",
        "DAPO, Yu et al. (arXiv:2503.14476)",
        {
            **_GROUP,
            "loss": "ppo_clip",
            "loss_settings": {"low": 0.2, "high": 0.28},
            "reduction": "token_mean",
            "group_filter": "signal",
            "truncation": "soft_penalty",
        },
    ),
    "rloo": Preset(
        "A_i = R_i - mean R of the group's other samples, with 0.05 KL (k1) subtracted from R; w A theta; "
        "sequence sum",
        "Back to basics, Ahmadian et al. (arXiv:2402.14740)",
        {
            "loss": "policy_gradient",
            "advantage": "leave_one_out",
            "reduction": "sequence_sum",
            "kl": {"coef": 0.05, "place": "reward", "estimator": "k1"},
        },
    ),
    "reinforce": Preset(
        "A = R, without a baseline; w A theta; sequence sum",
        "Simple statistical gradient-following algorithms, Williams (1992)",
        {"loss": "policy_gradient", "advantage": "reward_to_go", "reduction": "sequence_sum"},
    ),
    "reinforce_pp": Preset(
        f"A_t = R - 0.01 times the sum of the KL (k1) from token t on, whitened over the batch's tokens; "
        f"w {_CLIPPED}; token mean",
        "REINFORCE++, Hu et al. (arXiv:2501.03262)",
        {
            **_CLIP,
            "advantage": "reward_to_go",
            "whiten": "tokens",
            "reduction": "token_mean",
            "kl": {"coef": 0.01, "place": "reward", "estimator": "k1"},
        },
    ),
    "reinforce_pp_baseline": Preset(
        f"A = (R - mean_g) / (std of R - mean_g over the batch); w {_CLIPPED}; token mean",
        "REINFORCE++, Hu et al. (arXiv:2501.03262)",
        {
            **_CLIP,
            **_normalized("group", "batch_centered", ddof=1),
            "reduction": "token_mean",
        },
    ),
    "lite_ppo": Preset(
        f"A = (R - mean_g) / (std of R over the batch + eps); w {_CLIPPED}; token mean",
        "Tricks or traps, Liu et al. (arXiv:2508.08221)",
        {
            **_CLIP,
            **_normalized("group", "batch", ddof=1),
            "reduction": "token_mean",
        },
    ),
    "gspo": Preset(
        f"{_GROUP_Z}; s = exp(mean over the sequence of theta - p); w min(s A, clip(s, 1 - 3e-4, 1 + "
        "4e-4) A), with w also per sequence; sequence mean",
        "Group sequence policy optimization, Zheng et al. (arXiv:2507.18071)",
        {**_GSPO, "loss_settings": {"level": "sequence", "low": 3e-4, "high": 4e-4}},
    ),
    "gspo_token": Preset(
        "as gspo, but with sg(s) exp(theta - sg(theta)) in place of s, so that advantages may differ by "
        "token",
        "Group sequence policy optimization, Zheng et al. (arXiv:2507.18071)",
        {**_GSPO, "loss_settings": {"level": "sequence_token", "low": 3e-4, "high": 4e-4}},
    ),
    "sapo": Preset(
        f"{_GROUP_Z}; w (4 / tau) sigmoid(tau (u - 1)) A, with tau 1 where A > 0, else 1.05; sequence mean",
        "Soft adaptive policy optimization, Gao et al. (arXiv:2511.20347)",
        {
            **_GROUP,
            "loss": "sapo",
            "loss_settings": {"tau_positive": 1.0, "tau_negative": 1.05},
            "reduction": "sequence_mean",
            "minibatches": 4,
        },
    ),
    "cispo": Preset(
        f"{_GROUP_Z}; sg(min(r, 1 + high)) A theta, with high 4; token mean",
        "MiniMax-M1 (arXiv:2506.13585)",
        {
            **_GROUP,
            "loss": "cispo",
            "loss_settings": {"high": 4.0},
            "off_policy": "none",
            "reduction": "token_mean",
        },
    ),
    "m2po": Preset(
        f"{_GROUP_Z}; w u A, but 0 for the tokens of a minibatch with the largest (p - b)^2, as many as "
        "bring the mean of the others to at most 0.04; token mean",
        "Prosperity before collapse, Zheng et al. (arXiv:2510.01161)",
        {
            **_GROUP,
            "loss": "importance",
            "proximal": "recompute",
            "off_policy": "m2po",
            "off_policy_settings": {"budget": 0.04},
            "reduction": "token_mean",
        },
    ),
    "icepop": Preset(
        f"{_GROUP_Z}; w {_CLIPPED} where 0.5 <= w <= 5, else 0; sequence mean",
        "Every step evolves, Ling team (arXiv:2510.18855)",
        {
            **_CLIP,
            **_GROUP,
            "off_policy": "mask",
            "off_policy_settings": {"metric": "ratio", "lower": 0.5, "upper": 5.0, "weight": "ratio"},
            "reduction": "sequence_mean",
        },
    ),
    "kpop": Preset(
        f"{_GROUP_Z}; w {_CLIPPED} where the binary KL of b and p is at most 2 in both directions, else "
        "0; token mean",
        "Taming training-inference mismatch, Guo et al. 2026 (ringtech.notion.site/kpop)",
        {
            **_CLIP,
            **_GROUP,
            "off_policy": "mask",
            "off_policy_settings": {"metric": "binary_kl", "upper": 2.0, "weight": "ratio"},
            "reduction": "token_mean",
        },
    ),
    "dppo": Preset(
        f"{_GROUP_Z}; r A, but 0 for a token beyond |e^theta - e^b| > 0.15 that A pushes further; token mean",
        "Rethinking the trust region in LLM RL, Qi et al. (arXiv:2602.04879)",
        {
            **_GROUP,
            "loss": "dppo",
            "loss_settings": {"delta": 0.15, "divergence": "total_variation"},
            "off_policy": "none",
            "reduction": "token_mean",
        },
    ),
    "aipo": Preset(
        "A = R - mean_g; sg(min(r, cap)) A theta, with cap 5; sequence sum",
        "LlamaRL, Wu et al. (arXiv:2505.24034)",
        {
            **_GROUP_MEAN,
            "loss": "aipo",
            "loss_settings": {"cap": 5.0},
            "off_policy": "none",
            "reduction": "sequence_sum",
        },
    ),
    "decoupled_ppo": Preset(
        f"A = (R - mean) / (std + eps) over the batch; w {_CLIPPED}, with p recomputed when the batch "
        "arrives; token mean",
        "AReaL, Fu et al. (arXiv:2505.24298)",
        {**_DECOUPLED, "proximal": "recompute"},
    ),
    "decoupled_ppo_loglinear": Preset(
        "as decoupled_ppo, but p = sg(b + alpha (theta - b)), alpha = d / (d + k / n) for a token of "
        "age d in minibatch k of n; p is not recomputed",
        "A-3PO (arXiv:2512.06547), with the age counted exactly",
        {**_DECOUPLED, "proximal": "loglinear"},
    ),
    "decoupled_ppo_loglinear_published": Preset(
        "as decoupled_ppo, but p = sg(b + alpha (theta - b)), alpha = 1 - 1 / d for a token of age d, 0 "
        "for d = 0",
        "A-3PO (arXiv:2512.06547)",
        {**_DECOUPLED, "proximal": "loglinear_published"},
    ),
    "sft": Preset(
        "log-likelihood theta of the tasks' reference answers; token mean",
        "maximum likelihood",
        {
            "samples": "reference",
            "loss": "policy_gradient",
            "advantage": "ones",
            "reduction": "token_mean",
            "proximal": "none",
            "off_policy": "none",
            "group_size": 1,
        },
    ),
    "distillation": Preset(
        "A_t = teacher's log-prob - b; w u A; token mean; set algorithm.teacher",
        "On-policy distillation, Agarwal et al. (arXiv:2306.13649)",
        {
            "loss": "importance",
            "advantage": "teacher_gap",
            "reduction": "token_mean",
        },
    ),
}


PIECES = ("loss", "advantage", "off_policy")
"""Keys of the `algorithm` section that name a function; `<key>_settings` has its keyword-only arguments."""


def preset_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the section `algorithm`: the keys in `given`, and for all other keys the preset's values.

    The preset is given["preset"], by default grpo. If `given` names another loss, advantage or off_policy
    than the preset, the preset's settings of that function are left out. Raises ValueError for an unknown
    preset.
    """
    name = given.get("preset", "grpo")
    if name not in PRESETS:
        hint = did_you_mean(str(name), PRESETS, f"choose one of {', '.join(PRESETS)}")
        raise ValueError(f"algorithm.preset={name} does not exist; {hint}")
    defaults = PRESETS[name].settings
    merged = {**defaults, "preset": name, **given}
    for piece in PIECES:
        is_own = merged.get(piece) != defaults.get(piece)  # another function has other settings
        merged[f"{piece}_settings"] = {
            **({} if is_own else defaults.get(f"{piece}_settings", {})),
            **given.get(f"{piece}_settings", {}),
        }
    for section in ("kl", "critic"):
        if isinstance(own := given.get(section, {}), Mapping):
            merged[section] = {**defaults.get(section, {}), **own}
    return merged
