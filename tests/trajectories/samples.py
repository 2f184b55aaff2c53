"""Trajectories for tests: as hypothesis strategies, and one by one."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from areal_jax.types import Group, Prompt, SampleId, Sampling, Trajectory

INT32 = st.integers(-(2**31), 2**31 - 1)


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    """Any trajectory, also of zero tokens and with NaN log-probs: the codec must not care."""
    n = draw(st.integers(0, 40))
    width = draw(st.integers(1, 4))
    return Trajectory(
        sample=SampleId(draw(st.integers(0, 2**40)), draw(st.integers(0, 99)), draw(st.integers(0, 3))),
        tokens=draw(arrays(np.int32, n, elements=INT32)),
        loss_mask=draw(arrays(np.bool_, n)),
        behavior_logp=draw(arrays(np.float32, n, elements=st.floats(width=32))),
        versions=draw(arrays(np.int32, n, elements=INT32)),
        turn_ids=draw(arrays(np.int32, n, elements=INT32)),
        sampling=Sampling(
            draw(st.floats(0, 2)), draw(st.integers(0, 9)), draw(st.floats(0, 1)), 0.25, 7, ("a", "")
        ),
        stop_reason=draw(st.sampled_from(["stop", "length"])),
        support=draw(st.none() | arrays(np.int32, (n, width), elements=INT32)),
        experts=draw(st.none() | arrays(np.uint8, (n, width))),
        reward=draw(st.none() | st.floats(allow_nan=False)),
        reward_parts=draw(st.dictionaries(st.text(max_size=4), st.floats(allow_nan=False), max_size=3)),
        reward_note=draw(st.text(max_size=9)),
        interruptions=draw(st.integers(0, 9)),
        on_update=draw(st.sampled_from(["recompute", "keep", "pinned", "drain"])),
    )


def trajectory(
    sample: SampleId,
    length: int = 6,
    reward: float | None = 0.5,
    support: int | None = None,
    experts: int | None = None,
) -> Trajectory:
    """One of `length` tokens, a third of them prompt; every value tells its sample and its place."""
    place = np.arange(length, dtype=np.int32)
    sampled = place >= max(1, length // 3) if length > 1 else place >= 0
    base = 10_000 * sample.ordinal + 1000 * sample.member
    ids = None
    if support is not None:
        ids = (base + place[:, None] + np.arange(support)).astype(np.int32)
    routes = None
    if experts is not None:
        routes = (sample.member + place[:, None] + np.arange(experts)).astype(np.uint8)
    return Trajectory(
        sample=sample,
        tokens=base + place,
        loss_mask=sampled,
        behavior_logp=np.where(sampled, -0.25 - place, 0).astype(np.float32),
        versions=np.where(sampled, sample.ordinal, -1).astype(np.int32),
        turn_ids=np.where(sampled, 0, -1).astype(np.int32),
        sampling=Sampling(temperature=0.5 + sample.member, max_tokens=9),
        stop_reason="length" if sample.member == 1 else "stop",
        support=ids,
        experts=routes,
        reward=reward,
    )


def group(ordinal: int, lengths: list[int]) -> Group:
    """The group of these trajectory lengths; member m's reward is ordinal + m / 10."""
    return Group(
        ordinal,
        Prompt("?"),
        tuple(
            trajectory(SampleId(ordinal, member), length, reward=ordinal + member / 10)
            for member, length in enumerate(lengths)
        ),
    )


def assert_same(one: Trajectory, other: Trajectory) -> None:
    """Equal in every field, bit for bit in the arrays."""
    for name in ("tokens", "loss_mask", "behavior_logp", "versions", "turn_ids", "support", "experts"):
        left, right = getattr(one, name), getattr(other, name)
        if left is None or right is None:
            assert left is right, name
            continue
        assert (left.dtype, left.shape) == (right.dtype, right.shape), name
        assert left.tobytes() == right.tobytes(), name
    for name in ("sample", "sampling", "stop_reason", "reward", "reward_parts", "interruptions", "on_update"):
        assert getattr(one, name) == getattr(other, name), name
