"""Samples of a journal as people read them: which are worth showing, and the text of their tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cached_property
from typing import NamedTuple

from areal_jax.config import Config
from areal_jax.observe.sample import Piece, SampleView
from areal_jax.runtime.sources import RANDOM, open_source
from areal_jax.tasks.source import PromptStream, WeightedTask, load_tasks
from areal_jax.tasks.task import Task
from areal_jax.tasks.tokenizers import REPLACEMENT, Tokenizer
from areal_jax.trajectories.journal import Journal
from areal_jax.types import ArealError, SampleId

SHOWN = 3
"""Samples of each kind that a report shows."""

LONGEST_CHARACTER = 4
"""UTF-8 bytes, and so tokens, that a character may be spread over."""


class Late(NamedTuple):
    """A sample that was trained, as far as the report chooses by it."""

    sample: SampleId
    reward: float
    interruptions: int


class Viewer:
    """Reads one run's samples; tasks given as objects stand in for the config's."""

    def __init__(self, journal: Journal, config: Config, tasks: Sequence[Task] = ()) -> None:
        """Raises ArealError where the model's tokenizer cannot be made here."""
        self._journal, self._config, self._objects = journal, config, tasks
        is_tasks_own = config.model.source == RANDOM and config.model.tokenizer == "auto"
        self._tokenizer: Tokenizer = open_source(config, self._tasks if is_tasks_own else {}).model.tokenizer

    @cached_property
    def _tasks(self) -> dict[str, WeightedTask]:
        return load_tasks(self._config.tasks, self._objects)

    @cached_property
    def _prompts(self) -> PromptStream:
        return PromptStream(self._tasks, self._config.run.seed)

    def task_of(self, ordinal: int) -> str:
        """Name of the task whose prompt stands there; "" where several mix and cannot be made here."""
        if len(self._config.tasks) == 1 and not self._objects:
            return next(iter(self._config.tasks))
        with suppress(ArealError):
            return self._prompts.place(ordinal)[0]
        return ""

    def view(self, sample: SampleId) -> SampleView:
        """Raises ArealError for a sample whose trajectory the journal does not hold."""
        t = self._journal.trajectory(sample)
        sampled = t.loss_mask
        tokens = t.tokens[sampled].tolist()
        texts = token_texts(tokens, self._tokenizer)
        versions, logps = t.versions[sampled].tolist(), t.behavior_logp[sampled].tolist()
        return SampleView(
            sample_id="/".join(map(str, sample if sample.attempt else sample[:2])),
            prompt=self._tokenizer.decode(t.tokens[~sampled].tolist()),
            pieces=[Piece(*piece) for piece in zip(texts, versions, logps, strict=True)],
            reward=t.reward,
            parts=t.reward_parts,
            stop_reason=t.stop_reason,
            task=self.task_of(sample.ordinal),
            note=t.reward_note,
            truncated=t.truncated,
            interruptions=t.interruptions,
            completion=self._tokenizer.decode(tokens),
        )

    def chosen(self, late: Sequence[Late]) -> list[tuple[str, list[SampleView]]]:
        """Of the newest trained samples the best, the worst and the most interrupted, each shown once.

        Left out is what the journal holds no more.
        """
        kinds = [(title, samples) for title, samples in _kinds(late) if samples]
        shown: set[SampleId] = set()
        return [(title, views) for title, samples in kinds if (views := self._first(samples, shown))]

    def _first(self, samples: Iterable[SampleId], shown: set[SampleId]) -> list[SampleView]:
        """The first SHOWN of different prompts that can be read and were not shown yet."""
        views: dict[int, SampleView] = {}
        for sample in samples:
            if len(views) == SHOWN:
                break
            if sample in shown or sample.ordinal in views:
                continue
            with suppress(ArealError):  # pruned
                views[sample.ordinal] = self.view(sample)
                shown.add(sample)
        return list(views.values())


def _kinds(late: Sequence[Late]) -> list[tuple[str, list[SampleId]]]:
    newest = list(reversed(late))
    rewards = {each.reward for each in newest}
    best = [each.sample for each in sorted(newest, key=lambda each: -each.reward)]
    worst = [each.sample for each in sorted(newest, key=lambda each: each.reward)]
    mixed = [each for each in newest if each.interruptions]
    interrupted = [each.sample for each in sorted(mixed, key=lambda each: -each.interruptions)]
    by_reward = [("Best", best), ("Worst", worst)] if len(rewards) > 1 else [("Newest", best)]
    return [*by_reward, ("Most interrupted", interrupted)]


def token_texts(tokens: Sequence[int], tokenizer: Tokenizer) -> list[str]:
    """The text that each token adds; a character spread over several tokens comes with the last of them."""
    texts: list[str] = []
    pending: list[int] = []
    for token in tokens:
        pending.append(token)
        text = tokenizer.decode(pending) + ("■" if token == tokenizer.eos_id else "")
        is_whole = not text.endswith(REPLACEMENT) or len(pending) >= LONGEST_CHARACTER
        texts.append(text if is_whole else "")
        if is_whole:
            pending = []
    if pending:
        texts[-1] = tokenizer.decode(pending)
    return texts
