"""What each strategy promises of a run without faults or drops, and a run that puts it to the test: its hosts
have a quarter of the slots that a batch has samples. The tests of every driver use this table.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from statistics import mean

import pytest

from areal_jax.config.refusals import FIXED_STALENESS, ON_UPDATE
from areal_jax.config.tree import Config
from areal_jax.control import events as e
from areal_jax.control.events import Event
from areal_jax.types import SampleId, VersionSpan

STEPS, GROUPS, MEMBERS = 5, 4, 4

PAIRS = [(strategy, on_update) for strategy, allowed in ON_UPDATE.items() for on_update in allowed]
"""Every strategy with every `generation.on_update` that is allowed with it."""

VERSIONS: Mapping[str, Callable[[int, int], Collection[int]]] = {
    "sync": lambda step, eta: {step},
    "one_step": lambda step, eta: {max(0, step - 1)},
    "interruptible": lambda step, eta: range(step + 1),
    "keep": lambda step, eta: range(step + 1),
    "pinned": lambda step, eta: range(max(0, step - eta), step + 1),
}
"""control.strategy -> the versions that tokens of batch `step` may carry, given max_staleness."""

each_promise = pytest.mark.parametrize(
    ("strategy", "on_update"), PAIRS, ids=[f"{strategy}-{on_update}" for strategy, on_update in PAIRS]
)


def scarce(strategy: str, on_update: str, hosts: int = 1) -> list[str]:
    """Settings of a run of this pair whose batches have more samples than the hosts have slots."""
    return [
        f"run.steps={STEPS}",
        f"control.strategy={strategy}",
        f"control.max_staleness={FIXED_STALENESS.get(strategy, 2)}",
        f"generation.on_update={on_update}",
        f"generation.slots={4 // hosts}",
        f"runtime.hosts={hosts}",
        f"algorithm.group_size={MEMBERS}",
        f"trainer.batch_size={GROUPS}",
    ]


def check(config: Config, events: Iterable[Event]) -> None:
    """Assert that a finished run kept the promise of its strategy and of its `generation.on_update`."""
    spans: dict[SampleId, tuple[VersionSpan, ...]] = {}
    batches: dict[int, tuple[int, ...]] = {}
    turns: Counter[SampleId] = Counter()
    for event in events:
        if isinstance(event, e.SampleFinished):
            spans.setdefault(event.sample, event.spans)
        elif isinstance(event, e.TurnFinished):
            turns[event.sample] += 1
        elif isinstance(event, e.BatchTrained):
            batches[event.step] = event.ordinals
    members, groups = config.algorithm.group_size, config.trainer.batch_size
    trained = range(config.run.steps * groups)
    assert sorted(ordinal for batch in batches.values() for ordinal in batch) == list(trained)
    assert config.generation.slots * config.runtime.hosts < groups * members
    allowed, eta = VERSIONS[config.control.strategy], config.max_staleness or 0
    head_ages: list[int] = []
    of_group: dict[int, set[int]] = defaultdict(set)
    for step, ordinals in batches.items():
        for sample in (SampleId(ordinal, member) for ordinal in ordinals for member in range(members)):
            versions = [span.version for span in spans[sample]]
            assert set(versions) <= set(allowed(step, eta)), (step, sample, versions)
            assert versions == sorted(versions), (sample, versions)
            if config.on_update in ("drain", "pinned"):
                assert len(set(versions)) == 1, (sample, versions)
                assert len(versions) <= max(1, turns[sample]), "a turn, or a plain sample, has one span"
            head_ages.append(step - versions[0])
            of_group[sample.ordinal].update(versions)
    assert mean(head_ages) <= eta  # the gate's promise, whatever the order in which groups end
    if config.on_update == "drain":
        assert {len(versions) for versions in of_group.values()} == {1}, of_group
