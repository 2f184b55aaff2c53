"""Tasks that are environments of other projects, unchanged: each is conducted by a worker process.

The worker runs in an interpreter of its own, with the environment's package. It gets an episode's base_url,
has its chats sampled there as any agent does, and returns the reward.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from areal_jax.plugin import require_code_allowed
from areal_jax.tasks.errors import TaskError
from areal_jax.tasks.outside.worker_process import WorkerProcess
from areal_jax.tasks.task import Task
from areal_jax.types import Prompt, Reward

GAMES = {"GuessTheNumber": 1, "TicTacToe": 2, "KuhnPoker": 2}
"""Name of a game -> its number of players."""

WORD_GAMES = ("Wordle", "Hangman", "WordLadder", "WordSearch", "Crosswords", "SpellingBee")
"""Games that download lists of words when they start."""


class Outside(Task):
    """An environment that a worker conducts. `kind`: which one; `settings`: the worker's, as JSON."""

    def __init__(self, kind: str, python: str, settings: Mapping[str, Any], start_s: float) -> None:
        if not start_s > 0:
            raise TaskError(f"start_s={start_s} is not positive; give seconds")
        require_code_allowed(python, f"tasks.{kind}.python")
        self._kind, self._python, self._settings, self._start_s = kind, python, settings, start_s
        self._listed: list[Any] | None = None
        self._worker: WorkerProcess | None = None

    def __len__(self) -> int:
        return len(self._prompts())

    def __getitem__(self, i: int) -> Prompt:
        if not 0 <= i < len(self):
            raise IndexError(f"there is no prompt {i}: the task has {len(self)}, numbered from 0")
        return Prompt(messages=self._prompts()[i], info={"index": i})

    async def workflow(self, prompt: Prompt, episode: Any) -> Reward:
        """Conducts an episode in the worker; the environment's error is an error of the episode.

        If the error follows a turn for which the episode had no room, the reward is 0.
        """
        worker = self._worker
        if worker is None:
            worker = self._worker = WorkerProcess(self._kind, self._python, self._settings)
        asked = worker.ask("run", index=prompt.info["index"], base_url=episode.base_url)
        try:
            found = await asyncio.wrap_future(asked)
        except asyncio.CancelledError:
            worker.cancel(asked)
            raise
        except TaskError as error:
            if episode.is_cut and episode.last is not None:
                return Reward(0.0, note=f"no room for another turn: {error}")
            raise
        return Reward(found["value"], found["parts"], found["note"])

    def close(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_worker": None}

    def _prompts(self) -> list[Any]:
        """The messages of each prompt, from a worker that ends after it has listed them."""
        if self._listed is None:
            worker = WorkerProcess(self._kind, self._python, self._settings)
            try:
                self._listed = worker.ask("prompts").result(self._start_s)
            except TimeoutError:
                worker.close(within_s=0.0)
                raise TaskError(
                    f"tasks.{self._kind}: the worker has not listed its prompts within {self._start_s:g} s; "
                    f"raise tasks.{self._kind}.start_s. Its last lines on stderr:"
                    f"{worker.last_lines() or ' none'}"
                ) from None
            finally:
                worker.close()
            assert self._listed is not None
        return self._listed


class VerifiersTaskset(Outside):
    """A taskset of verifiers 0.4 (`verifiers.v1`), unchanged, run by the python of another environment."""

    def __init__(
        self,
        *,
        python: str,
        taskset: str,
        client: Literal["train", "eval"] = "train",
        tokenizer: str | None = None,
        renderer: Mapping[str, Any] | None = None,
        environment: Mapping[str, Any] | None = None,
        size: int | None = None,
        start_s: float = 120.0,
    ) -> None:
        """`python`: path of the interpreter; `taskset`: module of that venv, or of the working folder.

        `client`: train renders prompts in the worker and posts token ids, and needs `tokenizer`, the folder
        of the model's tokenizer, and perhaps `renderer`, such as {name: qwen3}; eval posts messages. A random
        model takes that tokenizer, too. `environment`: settings of the taskset's environment, as in a config
        of verifiers; `size`: number of tasks, None for all; `start_s`: seconds to list them. Raises TaskError
        if the settings contradict each other.
        """
        if client not in ("train", "eval"):
            raise TaskError(f"client={client!r} is neither train nor eval")
        if client == "train" and tokenizer is None:
            raise TaskError(
                "client=train renders prompts in the worker and needs tasks.verifiers.tokenizer, the folder "
                "of the model's tokenizer; give it, or set client=eval"
            )
        if client == "eval" and renderer is not None:
            raise TaskError("client=eval posts messages, so renderer has no effect; leave it out")
        if tokenizer is not None:
            from areal_jax.tasks.hf_tokenizer import HFTokenizer  # imports tokenizers, an optional package

            own_tokenizer: Any = HFTokenizer.from_folder(Path(tokenizer))
            self.tokenizer = own_tokenizer
            tokenizer = str(Path(tokenizer).resolve())
        own = {
            "taskset": taskset,
            "client": client,
            "tokenizer": tokenizer,
            "renderer": renderer,
            "size": size,
        }
        super().__init__("verifiers", python, own | {"environment": dict(environment or {})}, start_s)


class TextArenaGame(Outside):
    """A game of textarena 0.7: GuessTheNumber-v0, TicTacToe-v0 or KuhnPoker-v0, against random legal moves.

    Observations are user messages, and the policy's text is its move. The reward is the game's: 0 to 1 for
    one player, and -1, 0 or 1 for two. Game i has the seed `seed` + i; the policy's seat alternates.
    """

    def __init__(
        self, *, python: str, game: str, size: int = 1000, seed: int = 0, start_s: float = 120.0
    ) -> None:
        """`python`: path of an interpreter with textarena; `game`: a name in textarena, such as TicTacToe-v0.

        `size`: number of games; `start_s`: seconds to begin all of them once. Raises TaskError for another
        game.
        """
        name = game.partition("-")[0]
        known = f"choose one of {', '.join(f'{name}-v0' for name in GAMES)}"
        if name in WORD_GAMES:
            raise TaskError(f"game={game} downloads a list of words when it starts; {known}")
        if name not in GAMES:
            raise TaskError(f"game={game} is not supported; {known}")
        if size < 1 or seed < 0:
            raise TaskError(f"size={size} and seed={seed} violate 1 <= size, 0 <= seed")
        own = {"game": game, "players": GAMES[name], "size": size, "seed": seed}
        super().__init__("textarena", python, own, start_s)
