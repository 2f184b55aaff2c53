"""A worker: conducts episodes of another project's environment, in that project's interpreter.

`python outside_worker.py KIND` reads requests from stdin and writes answers to stdout, each a line of JSON.
It imports the standard library and the environment's package alone, so areal-jax need not be installed there.

| request | answer |
|---|---|
| `{"id", "do": "open", "settings"}`, always the first one | `{"id", "result": null}` |
| `{"id", "do": "prompts"}` | the messages of each task, a list |
| `{"id", "do": "run", "index", "base_url"}` | value, parts and note of the episode's reward |
| `{"id", "do": "cancel", "of"}` | `{"id", "result": null}`; then request `of` is answered with an error |

An error is answered as `{"id", "error", "missing"}`; missing: the package that is not installed, if any.
The worker ends when stdin ends, also because its parent was killed.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from typing import Any

MODEL = "policy"
MOST_CHATS = 512
TURN_S = 3600.0
"""Seconds to wait for a turn; the parent has deadlines of its own, and ends the episode by them."""
END_S = 5.0


class Verifiers:
    """The tasks of a taskset that is written for verifiers.v1."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from verifiers.v1.utils import loaders  # pyright: ignore[reportMissingImports]

        environment = {**settings["environment"]}
        environment["taskset"] = {**environment.get("taskset", {}), "id": settings["taskset"]}
        kind = loaders.env_config_type(settings["taskset"], environment.get("id", ""))
        has_harness = loaders.default_harness_id(settings["taskset"]) != "bash"
        for name, field in kind.model_fields.items():
            if getattr(field.default, "runtime", None) is not None:
                environment[name] = _seat(field.default, has_harness, environment.get(name, {}))
        self._config, self._loaders = loaders.resolve_env_config(environment), loaders
        self._client = {"type": settings["client"], "api_key_var": "AREAL_JAX_NO_KEY"}
        if settings["client"] == "train":
            own = {"renderer_model_name": settings["tokenizer"], "renderer": settings["renderer"]}
            self._client |= own
        taskset = loaders.load_taskset(self._config.taskset)
        if settings["size"] is None and not taskset.bounded:
            raise ValueError(f"the taskset {settings['taskset']} is infinite; set tasks.verifiers.size")
        self._tasks = list(islice(taskset, settings["size"]))

    def prompts(self) -> list[Any]:
        return [self._messages(task.data) for task in self._tasks]

    async def run(self, index: int, base_url: str) -> dict[str, Any]:
        """Conducts the episode of a task; verifiers keeps a client for each address, so none is shared."""
        import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]

        kind = vf.TrainClientConfig if self._client["type"] == "train" else vf.EvalClientConfig
        client = kind.model_validate({**self._client, "base_url": base_url})
        environment = self._loaders.load_environment(self._config)
        async with environment.serving():
            own = vf.ModelContext(model=MODEL, client=client)
            episode = await environment.run_episode(self._tasks[index], own)
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in errors)[-2000:])
        traces = [trace for trace in episode.traces if trace.agent is None or trace.agent.trainable]
        if len(traces) != 1:
            raise RuntimeError(f"the episode has {len(traces)} trained agents; a sample is one agent's")
        (trace,) = traces
        named = {name: one and one.value for name, one in trace.rewards.items()} | trace.metrics
        parts = {name: value for name, value in named.items() if value is not None}
        return {"value": trace.reward, "parts": parts, "note": trace.stop_condition or ""}

    def _messages(self, data: Any) -> list[dict[str, Any]]:
        from verifiers.v1.dialects.chat import message_to_wire  # pyright: ignore[reportMissingImports]

        system = [] if data.system_prompt is None else [{"role": "system", "content": data.system_prompt}]
        if data.prompt is None or isinstance(data.prompt, str):
            # Without a prompt the environment opens the conversation itself.
            return [*system, {"role": "user", "content": data.prompt or data.name or f"task {data.idx}"}]
        return [*system, *(message_to_wire(message) for message in data.prompt)]


def _seat(default: Any, has_harness: bool, given: dict[str, Any]) -> dict[str, Any]:
    """An agent's settings: on this machine, and without a shell, unless the settings say otherwise."""
    seat: dict[str, Any] = {}
    if default.runtime.type == "prime":
        seat["runtime"] = {"type": "subprocess"}
    if default.harness is None and not has_harness:
        seat["harness"] = {"id": "null"}
    return {**seat, **given}


class TextArena:
    """Games of TextArena: the policy has one seat, and random legal moves have the others."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import textarena  # pyright: ignore[reportMissingImports]

        self._make = lambda: textarena.make(f"{settings['game']}-raw")
        self._players, self._size, self._seed = settings["players"], settings["size"], settings["seed"]

    def prompts(self) -> list[Any]:
        return [[{"role": "user", "content": self._game(index).seen()}] for index in range(self._size)]

    async def run(self, index: int, base_url: str) -> dict[str, Any]:
        game, messages = self._game(index), []
        while not game.is_over:
            messages.append({"role": "user", "content": game.seen()})
            answer = await asyncio.to_thread(_chat, base_url, messages)
            if answer is None:
                lost = 0.0 if self._players == 1 else -1.0
                return {"value": lost, "parts": {}, "note": "the episode had no room for another turn"}
            messages.append({"role": "assistant", "content": answer})
            game.play(answer)
        return {"value": game.reward, "parts": {}, "note": game.reason}

    def _game(self, index: int) -> _Game:
        return _Game(self._make, self._players, self._seed + index)


class _Game:
    def __init__(self, make: Callable[[], Any], players: int, seed: int) -> None:
        self._seat = seed % players
        self._opponent = random.Random(seed)
        # TextArena draws from Python's global generator: each game gets a state of its own.
        self._state = random.Random(seed).getstate()
        with self._own_random():
            self._env = make()
            self._env.reset(num_players=players, seed=seed)
            self._play_others()

    @property
    def is_over(self) -> bool:
        return self._env.state.done

    @property
    def reward(self) -> float:
        return float(self._env.state.rewards[self._seat])

    @property
    def reason(self) -> str:
        return str(self._env.state.game_info[self._seat].get("reason", ""))

    def seen(self) -> str:
        """Returns what the policy has seen since the last call, without its own moves."""
        _, seen = self._env.get_observation()
        texts = [
            text if kind.name != "PLAYER_ACTION" else f"Player {player}: {text}"
            for player, text, kind in seen
            if player != self._seat
        ]
        return "\n".join(texts).strip()

    def play(self, move: str) -> None:
        with self._own_random():
            self._env.step(move)
            self._play_others()

    def _play_others(self) -> None:
        while not self.is_over and self._env.state.current_player_id != self._seat:
            _, seen = self._env.get_observation()
            boards = [
                re.findall(r"'\[([^\]]+)\]'", text) for _, text, kind in seen if kind.name == "GAME_BOARD"
            ]
            self._env.step(f"[{self._opponent.choice([legal for legal in boards if legal][-1])}]")

    @contextmanager
    def _own_random(self) -> Iterator[None]:
        others = random.getstate()
        random.setstate(self._state)
        try:
            yield
        finally:
            self._state = random.getstate()
            random.setstate(others)


def _chat(base_url: str, messages: list[dict[str, str]]) -> str | None:
    """Returns the policy's answer; None if the episode has no room for it."""
    body = json.dumps({"model": MODEL, "messages": messages}).encode()
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{base_url}/chat/completions", body, headers)
    try:
        with urllib.request.urlopen(request, timeout=TURN_S) as answer:
            return json.load(answer)["choices"][0]["message"]["content"] or ""
    except urllib.error.HTTPError as error:
        if error.code == 400:
            return None
        raise


KINDS: dict[str, Callable[[dict[str, Any]], Any]] = {"verifiers": Verifiers, "textarena": TextArena}


class WorkerServer:
    """Answers the requests of one parent."""

    def __init__(self, make: Callable[[dict[str, Any]], Any], write: Callable[[str], object]) -> None:
        self._make, self._write = make, write
        self._environment: Any = None
        self._problem: dict[str, Any] | None = None
        self._running: dict[int, asyncio.Task[None]] = {}

    async def serve(self, requests: asyncio.Queue[dict[str, Any] | None]) -> None:
        """Returns when the requests have ended, and what they began has ended, too."""
        while (request := await requests.get()) is not None:
            if request["do"] == "cancel":
                if (task := self._running.get(request["of"])) is not None:
                    task.cancel()
                self._answer(request, result=None)
                continue
            task = self._running[request["id"]] = asyncio.create_task(self._handled(request))
            task.add_done_callback(lambda _, number=request["id"]: self._running.pop(number))
            if request["do"] == "open":
                await task
        for task in (ending := set(self._running.values())):
            task.cancel()
        if ending:
            await asyncio.wait(ending, timeout=END_S)

    async def _handled(self, request: dict[str, Any]) -> None:
        try:
            if self._problem is not None:
                self._answer(request, **self._problem)
            else:
                self._answer(request, result=await self._result(request))
        except asyncio.CancelledError:
            self._answer(request, error="cancelled")
        except BaseException as error:  # noqa: BLE001 - another project's code may raise anything, and exit
            missing = error.name if isinstance(error, ModuleNotFoundError) else None
            problem = {"error": f"{type(error).__name__}: {error}", "missing": missing}
            if request["do"] == "open":
                self._problem = problem
            self._answer(request, **problem)

    async def _result(self, request: dict[str, Any]) -> Any:
        if request["do"] == "open":
            self._environment = self._make(request["settings"])
            return None
        if request["do"] == "prompts":
            return self._environment.prompts()
        return await self._environment.run(request["index"], request["base_url"])

    def _answer(self, request: dict[str, Any], **fields: Any) -> None:
        self._write(json.dumps({"id": request["id"], **fields}))


async def main(kind: str) -> None:
    """Serves the parent's requests until they end, and then ends the process."""
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    # The protocol's pipes are the worker's own: an environment may print, or start programs that read.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    # As for a script in the working folder: its modules, and the programs beside its interpreter.
    sys.path[0] = os.getcwd()
    os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
    loop, queue = asyncio.get_running_loop(), asyncio.Queue()
    loop.set_default_executor(ThreadPoolExecutor(MOST_CHATS))

    def read() -> None:
        for line in requests:
            loop.call_soon_threadsafe(queue.put_nowait, json.loads(line))
        loop.call_soon_threadsafe(queue.put_nowait, None)

    def write(line: str) -> None:
        try:
            answers.write(line + "\n")
            answers.flush()
        except BrokenPipeError:
            os._exit(1)  # the parent has died

    threading.Thread(target=read, daemon=True).start()
    await WorkerServer(KINDS[kind], write).serve(queue)
    os._exit(0)  # threads that wait for a turn would keep the process


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
