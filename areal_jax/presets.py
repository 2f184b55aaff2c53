"""Algorithms as data: each preset is a set of defaults for the `algorithm` section.

The pieces they name stand in `algorithms/`; the config tree reads this table, so it stands below both.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, NamedTuple


class Preset(NamedTuple):
    formula: str
    paper: str
    settings: dict[str, Any]


PRESETS: dict[str, Preset] = {
    "grpo": Preset(
        "A = (R - mean_g) / (std_g + eps); min(r A, clip(r, 1 - low, 1 + high) A) - beta k3; sequence mean",
        "DeepSeekMath, Shao et al. (arXiv:2402.03300)",
        {
            "loss": "ppo_clip",
            "loss_settings": {"low": 0.2, "high": 0.2},
            "advantage": "group_normalized",
            "advantage_settings": {"scale": "group", "ddof": 1},
            "reduction": "sequence_mean",
            "kl": {"coef": 0.04, "estimator": "k3"},
        },
    ),
    "dr_grpo": Preset(
        "A = R - mean_g; min(r A, clip(r, 1 - low, 1 + high) A); summed over tokens / (max_tokens S)",
        "Understanding R1-Zero-like training, Liu et al. (arXiv:2503.20783)",
        {
            "loss": "ppo_clip",
            "loss_settings": {"low": 0.2, "high": 0.2},
            "advantage": "group_normalized",
            "advantage_settings": {"scale": "none"},
            "reduction": "constant",
        },
    ),
    "decoupled_ppo": Preset(
        "sg(exp(p - b)) min(u A, clip(u, 1 - low, 1 + high) A), u = exp(theta - p); token mean",
        "AReaL, Fu et al. (arXiv:2505.24298)",
        {
            "loss": "ppo_clip",
            "loss_settings": {"low": 0.2, "high": 0.2},
            "advantage": "group_normalized",
            "advantage_settings": {"center": "batch", "scale": "batch", "ddof": 1},
            "reduction": "token_mean",
            "minibatches": 4,
        },
    ),
    "sft": Preset(
        "theta; token mean over reference answers",
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
}


OWN_RATIO = ("cispo", "aipo", "dppo")
"""Losses that hold their own ratio to the behaviour policy; they demand off_policy none."""

PIECES = ("loss", "advantage", "off_policy")
"""Keys that name a function; `<key>_settings` are its keyword-only arguments."""


def preset_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """The `algorithm` section: what was given, over its preset's. Raises ValueError for no such preset."""
    name = given.get("preset", "grpo")
    if name not in PRESETS:
        near = difflib.get_close_matches(str(name), PRESETS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(PRESETS)}"
        raise ValueError(f"no algorithm.preset={name}; {hint}")
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
