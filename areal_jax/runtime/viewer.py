"""Shows samples of a journal to people: selects the samples and decodes their tokens into text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import NamedTuple

from areal_jax.assembly.sources import RANDOM, open_source
from areal_jax.config.tree import Config
from areal_jax.observe.sample import Piece, SampleView
from areal_jax.serving.text import TextStream
from areal_jax.tasks.source import PromptStream, WeightedTask, load_tasks
from areal_jax.tasks.tokenizers import Tokenizer
from areal_jax.trajectories.sqlite import SqliteQueue
from areal_jax.types import ArealError, SampleId

SHOWN = 3
"""Maximum number of samples of each kind (best, worst, most interrupted) that a report shows."""


class Late(NamedTuple):
    """A sample trained late in the run, with the values by which the report selects it."""

    sample: SampleId
    reward: float
    interruptions: int


class Viewer:
    """Reads the samples of one run from its journal as text.

    `tasks`: the run's tasks by name; None: the config's tasks.
    """

    def __init__(
        self, journal: SqliteQueue, config: Config, tasks: Mapping[str, WeightedTask] | None = None
    ) -> None:
        """Raises ArealError if the model's tokenizer cannot be loaded."""
        self._journal, self._config, self._given = journal, config, tasks
        is_tasks_own = config.model.source == RANDOM and config.model.tokenizer == "auto"
        self._tokenizer: Tokenizer = open_source(config, self._tasks if is_tasks_own else {}).model.tokenizer

    @cached_property
    def _tasks(self) -> Mapping[str, WeightedTask]:
        return load_tasks(self._config.tasks) if self._given is None else self._given

    @cached_property
    def _prompts(self) -> PromptStream:
        return PromptStream(self._tasks, self._config.run.seed)

    def task_of(self, ordinal: int) -> str:
        """Return the name of group `ordinal`'s task; "" if the run's several tasks cannot be loaded."""
        names = self._config.tasks if self._given is None else self._given
        if len(names) == 1:
            return next(iter(names))
        with suppress(ArealError):
            return self._prompts.place(ordinal)[0]
        return ""

    def view(self, sample: SampleId) -> SampleView:
        """Return one sample as text. Raises ArealError if the journal does not have its trajectory."""
        t = self._journal.trajectory(sample)
        sampled = t.loss_mask
        tokens = t.tokens[sampled].tolist()
        texts = token_texts(tokens, self._tokenizer)
        versions, logps = t.versions[sampled].tolist(), t.behavior_logp[sampled].tolist()
        return SampleView(
            sample="/".join(map(str, sample if sample.attempt else sample[:2])),
            prompt=self._tokenizer.decode(t.tokens[~sampled].tolist()),
            pieces=[Piece(*piece) for piece in zip(texts, versions, logps, strict=True)],
            reward=t.reward,
            parts=t.reward_parts,
            stop_reason=t.stop_reason,
            task=self.task_of(sample.ordinal),
            reward_note=t.reward_note,
            truncated=t.truncated,
            interruptions=t.interruptions,
            completion=self._tokenizer.decode(tokens),
        )

    def chosen(self, late: Sequence[Late]) -> list[tuple[str, list[SampleView]]]:
        """Return (title, samples) for the best, worst and most interrupted of the samples `late`.

        If all rewards are equal, the newest samples replace the best and worst. No sample appears twice;
        samples that the journal has deleted are left out.
        """
        kinds = [(title, samples) for title, samples in _kinds(late) if samples]
        shown: set[SampleId] = set()
        return [(title, views) for title, samples in kinds if (views := self._first(samples, shown))]

    def _first(self, samples: Iterable[SampleId], shown: set[SampleId]) -> list[SampleView]:
        """Return at most SHOWN of the `samples`: the first that are not in `shown`; adds them to `shown`.

        Samples that the journal has deleted, and further samples of the same prompt, are left out.
        """
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
    """Return for each token the text that it adds.

    If a character consists of several tokens, the last one adds the character, and the others add "".
    """
    texts: list[str] = []
    stream = TextStream(tokenizer)
    for token in tokens:
        texts.append(stream.push([token]))
        if token == tokenizer.eos_id:
            texts[-1] += stream.finish() + "■"
    if texts:
        texts[-1] += stream.finish()
    return texts
