"""Frequencies of rotary embeddings: a geometric series, and published models' changes for long contexts."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class LinearScaling:
    """Divides every frequency by `factor`, so that longer contexts fit (Chen et al., arXiv:2306.15595)."""

    factor: float

    def __call__(self, frequencies: np.ndarray) -> np.ndarray:
        return frequencies / self.factor


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's scaling: divides only those frequencies that rotate slowly (arXiv:2407.21783).

    In the context of pretraining, `original_length` tokens, a frequency makes t = original_length *
    frequency / 2 pi full rotations. A frequency with t >= `high_turns` is unchanged, a frequency with t <=
    `low_turns` is divided by `factor`; in between the two results are mixed linearly in t. The formula is
    in the released model code.
    """

    factor: float
    low_turns: float
    high_turns: float
    original_length: int

    def __call__(self, frequencies: np.ndarray) -> np.ndarray:
        turns = self.original_length * frequencies / (2 * math.pi)
        kept = np.clip((turns - self.low_turns) / (self.high_turns - self.low_turns), 0, 1)
        return frequencies * (kept + (1 - kept) / self.factor)


RopeScaling = LinearScaling | Llama3Scaling


def inverse_frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None, dtype: str = "float32"
) -> np.ndarray:
    """Returns each pair's rotation per position in radians, (head_dim / 2,) in `dtype`.

    The rotation of pair i is theta^(-2 i / head_dim) (Su et al., arXiv:2104.09864), computed in float64 and
    then changed by `scaling` (None: not changed).
    """
    frequencies = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    return (scaling(frequencies) if scaling else frequencies).astype(dtype)
