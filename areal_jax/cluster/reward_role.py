"""The reward role: a process that scores groups with a pool of worker processes, without jax."""

from __future__ import annotations

from contextlib import ExitStack, closing
from typing import Any

from areal_jax.assembly.tokenizer_source import open_tokenizer
from areal_jax.cluster.member import ControllerLink
from areal_jax.cluster.messages import Begin, Envelope
from areal_jax.config.tree import Config
from areal_jax.control import events as e
from areal_jax.episodes.agent import workflows_of
from areal_jax.episodes.conversation import Conversation
from areal_jax.runtime.workflow_parts import make_runner
from areal_jax.serving.run_services import make_gateway
from areal_jax.tasks.errors import PromptError
from areal_jax.tasks.pool import RewardPool
from areal_jax.tasks.scoring import GROUP, failed
from areal_jax.tasks.source import PromptStream, WeightedTask, load_tasks
from areal_jax.trajectories.codec import decode
from areal_jax.types import Completion, Reward, SampleId


def reward(config: Config, name: str) -> None:
    """Runs reward process `name`: scores groups and conducts workflows until the controller sends End.

    If this process dies, the controller sends its groups and workflows to another reward process. Raises
    ArealError if End contains an error as its reason, or if the controller has shown no heartbeat for
    runtime.deadline_s seconds.
    """
    c = config.runtime
    tasks = load_tasks(config.tasks)
    prompts = PromptStream(tasks, config.run.seed)
    own = {key: weighted.task for key, weighted in tasks.items()}
    with (
        ControllerLink(config, "reward", name) as link,
        RewardPool(own, c.reward_workers, c.reward_timeout_s) as pool,
        ExitStack() as open_workflows,
    ):
        workflows = None
        if workflows_of(config.episode.agent, tasks):
            workflows = open_workflows.enter_context(
                closing(ConductedWorkflows(config, tasks, prompts, link))
            )
        for message in link.commands():
            match message:
                case Begin():
                    if workflows is not None:
                        workflows.begin()
                    link.ready()
                case Envelope(_, (e.Rerun() | e.Answer() | e.Call() | e.Drop()) as action, payload):
                    assert workflows is not None
                    workflows.command(action, payload)
                case Envelope(_, e.Score(ordinal, attempt), payload):
                    completions = [
                        Completion(text, tuple(ids), why, tuple(pieces), _reward(reward))
                        for text, ids, why, pieces, reward in payload
                    ]
                    try:
                        prompt = prompts.prompt(ordinal)
                    except PromptError as error:  # the controller, perhaps on another machine, could read it
                        link.report(failed(ordinal, attempt, GROUP, str(error)))
                    else:
                        pool.submit(ordinal, attempt, prompt, completions, link.report)


def _reward(plain: Any) -> Reward | None:
    if plain is None:
        return None
    value, parts, note = plain
    return Reward(value, dict(parts), note)


# --- workflows ---------------------------------------------------------------------------------------------


class ConductedWorkflows:
    """Conducts the workflows that the controller places in this process, and reports their events."""

    def __init__(
        self,
        config: Config,
        tasks: dict[str, WeightedTask],
        prompts: PromptStream,
        link: ControllerLink,
    ) -> None:
        self._tasks, self._prompts, self._link = tasks, prompts, link
        self._talks: dict[SampleId, Conversation] = {}
        workflows = workflows_of(config.episode.agent, tasks)
        tokenizer = open_tokenizer(config, tasks)
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
