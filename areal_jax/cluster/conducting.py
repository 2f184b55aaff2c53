"""The workflows of a reward process."""

from __future__ import annotations

from typing import Any

from areal_jax.cluster.member import ControllerLink
from areal_jax.config.tree import Config
from areal_jax.control import events as e
from areal_jax.episodes.agent import workflows_of
from areal_jax.episodes.conversation import Conversation
from areal_jax.runtime.workflow_parts import make_runner
from areal_jax.serving.run_services import make_gateway
from areal_jax.tasks.errors import PromptError
from areal_jax.tasks.source import PromptStream, WeightedTask
from areal_jax.trajectories.codec import decode
from areal_jax.types import SampleId


class ConductedWorkflows:
    """Conducts the workflows that the controller places in this process, and reports their events."""

    def __init__(
        self,
        config: Config,
        tasks: dict[str, WeightedTask],
        prompts: PromptStream,
        link: ControllerLink,
    ) -> None:
        from areal_jax.assembly.sources import open_source  # imports jax, which other reward processes lack

        self._tasks, self._prompts, self._link = tasks, prompts, link
        self._talks: dict[SampleId, Conversation] = {}
        workflows = workflows_of(config.episode.agent, tasks)
        tokenizer = open_source(config, tasks).model.tokenizer
        self._runner = make_runner(
            config, workflows, tokenizer, self._emit, link.fail, link.note, make_gateway=make_gateway
        )

    def begin(self) -> None:
        """Ends all workflows, because an epoch begins; what they emitted is queued before this returns."""
        # So it comes before this process's Ready, after which the controller places workflows here again.
        self._runner.end_all()
        self._talks.clear()

    def command(self, action: e.WorkflowCommand | e.Drop, payload: Any) -> None:
        match action:
            case e.Rerun(sample):
                try:
                    prompt = self._prompts.prompt(sample.ordinal)
                except PromptError as error:  # the controller, perhaps on another machine, could read it
                    self._emit(e.EpisodeFailed(sample, "failed_episode", str(error)))
                    return
                self._talks[sample] = talk = Conversation.from_wire(payload)
                self._runner.begin(sample, prompt, talk)
            case e.Answer(sample, _, turn) if sample in self._talks:
                ended, so_far = payload
                self._talks[sample].finish(e.from_wire(*ended, kinds=e.EVENTS), decode(so_far))
                self._runner.answer(sample, turn, self._talks[sample])
            case e.Call(sample, call):
                self._runner.call(sample, call)
            case e.Drop(ordinal):
                self._runner.end(ordinal)
                self._talks = {one: talk for one, talk in self._talks.items() if one.ordinal != ordinal}

    def close(self) -> None:
        self._runner.close()
        for weighted in self._tasks.values():
            weighted.task.close()

    def _emit(self, event: e.Event) -> None:
        if isinstance(event, e.TurnAdded):
            self._talks[event.sample].add(event)
        # Never sent a second time: after a loss the workflow runs again, and says it again.
        self._link.report(event, is_repeated=False)
