"""Shows samples of a journal to people: selects the samples and decodes their tokens into text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from areal_jax.assembly.tokenizer_source import RANDOM, open_tokenizer
from areal_jax.config.tree import Config
from areal_jax.control.events import BatchTrained
from areal_jax.control.reward_gate import Gates, rewards_of
from areal_jax.plugin import load_object
from areal_jax.report.sample import SampleView, TokenView
from areal_jax.tasks.blocks import ANSWER, THINK, parse
from areal_jax.tasks.interleaved import Interleaved
from areal_jax.tasks.source import BUILTIN, PromptStream, WeightedTask, load_tasks
from areal_jax.tasks.text import token_pieces
from areal_jax.tasks.tokenizers import Tokenizer
from areal_jax.trajectories.paths import turns_of
from areal_jax.trajectories.sqlite import SqliteQueue
from areal_jax.types import ArealError, SampleId, Trajectory

SHOWN = 3
"""Maximum number of samples of each kind (best, worst, most interrupted) that a report shows."""


class Late(NamedTuple):
    """A sample trained late in the run, with the values by which the report selects it."""

    sample: SampleId
    reward: float
    interruptions: int


def gates_in(row: Mapping[str, Any]) -> Gates:
    """Return the gates of the batch with this metrics row; empty without a gate."""
    return tuple((row.get("gates") or {}).items())


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
        self._tokenizer: Tokenizer = open_tokenizer(config, self._tasks if is_tasks_own else {})
        self._template = lru_cache(self._template)  # a task that cannot be loaded is tried once

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

    def text(self, tokens: Sequence[int]) -> str:
        """Return tokens as text."""
        return self._tokenizer.decode(tokens)

    def view(self, sample: SampleId) -> SampleView:
        """Return one sample as text. Raises ArealError if the journal does not have its trajectory."""
        t = self._journal.trajectory(sample)
        # Between the turns of an episode are tokens that were not sampled.
        first = int(t.loss_mask.argmax()) if t.loss_mask.any() else len(t.tokens)
        task = self.task_of(sample.ordinal)
        gates = self._gates(sample.ordinal)
        (paid,) = rewards_of([t.reward or 0.0], [t.reward_parts], gates)
        return SampleView(
            sample="/".join(map(str, sample if sample.attempt else sample[:2])),
            prompt=self._tokenizer.decode(t.tokens[:first].tolist()),
            pieces=self._pieces(t, task),
            reward=t.reward,
            parts=t.reward_parts,
            stop_reason=t.stop_reason,
            task=task,
            reward_note=t.reward_note,
            truncated=t.truncated,
            interruptions=t.interruptions,
            completion=self._tokenizer.decode(t.tokens[t.loss_mask].tolist()),
            turns=turns_of(t),
            branches=[self._pieces(branch, task) for branch in t.branches],
            trained_reward=None if all(is_paid for _, is_paid in gates) else paid,
        )

    def _gates(self, ordinal: int) -> Gates:
        """Return the gates of a trained group's batch; empty for a run without a gate."""
        if self._config.algorithm.gate.part is None:
            return ()
        for row in self._journal.rows_of(ordinal):
            if isinstance(row.event, BatchTrained) and ordinal in row.event.ordinals:
                return gates_in(row.event.metrics)
        return ()

    def _pieces(self, path: Trajectory, task: str) -> list[TokenView]:
        """Return the path's tokens from the first one on that was sampled."""
        first = int(path.loss_mask.argmax()) if path.loss_mask.any() else len(path.tokens)
        tokens = path.tokens[first:].tolist()
        texts, blocks = token_texts(tokens, self._tokenizer), self._blocks(tokens, task)
        versions, logps = path.versions[first:].tolist(), path.behavior_logp[first:].tolist()
        return [TokenView(*piece) for piece in zip(texts, versions, logps, blocks, strict=True)]

    def _blocks(self, tokens: Sequence[int], task: str) -> list[str]:
        if template := self._template(task):
            return token_blocks(token_pieces(tokens, self._tokenizer), template)
        return [""] * len(tokens)

    def _template(self, name: str) -> str:
        """Return the template of task `name`'s responses; "" if it has none, or the task cannot be loaded."""
        with suppress(ArealError, ImportError):
            # Only tasks of a class that may have a template are loaded: loading may download a task's data.
            if name and (self._given or getattr(load_object(name, BUILTIN, "task"), "wants_pieces", False)):
                task = self._tasks[name].task
                return task.template if isinstance(task, Interleaved) else ""
        return ""

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
    """Return for each token the text that it adds, as `tasks.text.token_pieces`; an end token's ends in ■."""
    pieces = token_pieces(tokens, tokenizer)
    return [
        piece + "■" if token in tokenizer.end_ids else piece
        for token, piece in zip(tokens, pieces, strict=True)
    ]


def token_blocks(pieces: Sequence[str], template: str) -> list[str]:
    """Return for each token the kind of the block that it is part of, tags included; "" outside of blocks.

    `pieces`: the text of each token. A token with the end of one block and the beginning of the next is part
    of the first. A last block that is not closed counts; after the first break of the template no token is
    part of a block.
    """
    # A closing tag after the last token completes the block that the length limit cut off, if there is one.
    blocks = max((parse([*pieces, f"</{kind}>"], template).blocks for kind in (THINK, ANSWER)), key=len)
    kinds, start = [""] * len(pieces), 0
    for block in blocks:
        for token, piece in enumerate(pieces[start : block.closed + 1], start):
            if piece.strip() or token >= block.opened:  # whitespace between blocks is outside
                kinds[token] = block.kind
        start = block.closed + 1
    return kinds
