"""The paths of a sample, and what is counted over all of them: an episode that branched has several.

A path leads from the beginning of a conversation to a turn that no other one continues. A trajectory is the
path to its sample's last turn and has the other ones as `branches`. A token that several paths share has its
loss, log-prob, version and turn on the first of them only, so that it is trained once.
"""

from __future__ import annotations

from areal_jax.types import Trajectory, VersionSpan


def paths_of(sample: Trajectory) -> tuple[Trajectory, ...]:
    """Returns the sequences on which the sample is trained; one if it did not branch."""
    return (sample, *sample.branches)


def turns_of(sample: Trajectory) -> int:
    """Returns the number of sampled turns."""
    return sum(len(set(path.turn_ids[path.loss_mask].tolist())) for path in paths_of(sample))


def spans_of(sample: Trajectory) -> tuple[VersionSpan, ...]:
    """Returns the spans of all paths in the order of their turns, each with places in its own path."""
    if not sample.branches:
        return sample.spans
    turned = [(int(path.turn_ids[span.start]), span) for path in paths_of(sample) for span in path.spans]
    return tuple(span for _, span in sorted(turned))
