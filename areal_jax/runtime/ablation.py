"""Ablations: one config key varied, arms that differ in a few words, seeds; and the table that comes of it.

Every run is the real engine and learner. Under the virtual clock the staleness of what is trained is the one
asked for, and equal words give the same table twice, bit for bit; where speed itself is the question, a run
is the local one and the clock is the wall's. What each named ablation varies stands in `runtime.ablations`.
"""

from __future__ import annotations

import difflib
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import yaml

from areal_jax.config import Config, load_config
from areal_jax.control.events import BatchTrained
from areal_jax.generation.engine import Engine
from areal_jax.models.model import Params
from areal_jax.plugin import check_settings
from areal_jax.runtime.assembly import assemble, first_params
from areal_jax.runtime.jobs import run
from areal_jax.runtime.measure import machine
from areal_jax.runtime.real_machines import RealMachines
from areal_jax.runtime.schedule import Schedule
from areal_jax.runtime.simulated import simulate
from areal_jax.trainer.learner import Learner
from areal_jax.types import ArealError

PUBLISH_S = 0.02
"""Virtual seconds of a publication; a training step takes 1."""


Row = Mapping[str, Any]
"""The metrics of a training step."""


@dataclass(frozen=True)
class Result:
    """One run."""

    value: Any
    arm: str
    seed: int
    figures: Mapping[str, float]
    """By the names of `Ablation.figures`."""
    rewards: tuple[float, ...]
    """Mean of each batch."""
    digest: str
    """Of the last parameters."""
    seconds: float

    def to_json(self) -> dict[str, Any]:
        plain = dict(vars(self))
        return {key: plain.pop(key) for key in ("value", "arm", "seed")} | plain.pop("figures") | plain


@dataclass(frozen=True)
class Table:
    """Results, by the varied value and the arm."""

    results: tuple[Result, ...]

    def by_seed(self, value: Any, arm: str, figure: str) -> list[float]:
        """Raises KeyError without such runs."""
        found = [r.figures[figure] for r in self.results if (r.value, r.arm) == (value, arm)]
        if not found:
            raise KeyError((value, arm))
        return found

    def mean(self, value: Any, arm: str, figure: str) -> float:
        """Over seeds. Raises KeyError without such runs."""
        return statistics.mean(self.by_seed(value, arm, figure))

    def rows(self) -> list[dict[str, Any]]:
        """One a value and arm, in the order in which they were run: the first figure by seed, and means."""
        names = list(self.results[0].figures)
        return [
            {"value": value, "arm": arm, "by_seed": self.by_seed(value, arm, names[0])}
            | {name: self.mean(value, arm, name) for name in names}
            for value, arm in dict.fromkeys((r.value, r.arm) for r in self.results)
        ]


@dataclass(frozen=True)
class Ablation:
    doc: str
    recipe: str
    """Packaged config of all runs."""
    key: str
    """What is varied."""
    values: tuple[Any, ...]
    arms: Mapping[str, tuple[str, ...]]
    """Name -> the config words that make it."""
    seeds: int
    speed: float | None
    """Batches decoded in the time of a training step, were every answer as long as it may be; None: the local
    run, by the wall clock.
    """
    figures: Mapping[str, Callable[[Sequence[Row]], float]]
    """Name -> what it is of the rows of a run. The first is what the ablation is about."""
    claims: Mapping[str, Callable[[Table], bool]]
    """What is expected -> whether it came out so; KeyError where the table lacks runs to tell."""


# --- running ------------------------------------------------------------------------------------------------


def ablate(name: str, ablation: Ablation, words: Sequence[str], say: Callable[[str], None]) -> dict[str, Any]:
    """The table of that ablation. `words` are its settings (values, arms, seeds, speed) and config words.

    `say` hears of every run that ended. Raises ArealError for a word that means nothing here, or sets what
    the ablation varies itself.
    """
    settings, overrides = _read(name, ablation, words)
    values, arms = settings["values"], settings["arms"]
    places = [(seed, value, arm) for seed in range(settings["seeds"]) for value in values for arm in arms]
    configs = [_config(ablation, overrides, *place) for place in places]  # what cannot be is said at once
    bench: Bench = LocalBench() if settings["speed"] is None else Workbench(settings["speed"])
    results, started = [], time.perf_counter()
    for (seed, value, arm), config in zip(places, configs, strict=True):
        began = time.perf_counter()
        rows = bench.run(config)
        figures = {name: figure(rows) for name, figure in ablation.figures.items()}
        rewards, seconds = tuple(row["reward_mean"] for row in rows), time.perf_counter() - began
        results.append(Result(value, arm, seed, figures, rewards, rows[-1]["params_digest"], seconds))
        first = next(iter(figures))
        say(
            f"{len(results)}/{len(places)}: {ablation.key}={value}, {arm}, seed {seed}: "
            f"{first} {figures[first]:.5g}, {seconds:.0f} s"
        )
    table, c = Table(tuple(results)), configs[0]
    seconds = [result.seconds for result in results]
    return {
        "ablation": name,
        "key": ablation.key,
        "recipe": ablation.recipe,
        "words": overrides,
        "steps": c.run.steps,
        **settings,
        "table": table.rows(),
        "claims": {claim: _holds(table, test) for claim, test in ablation.claims.items()},
        "runs": [result.to_json() for result in results],
        "total_seconds": time.perf_counter() - started,
        **machine(c.model.shape, c.model.dtype, statistics.median(seconds), seconds),
    }


def _holds(table: Table, test: Callable[[Table], bool]) -> bool | None:
    try:
        return test(table)
    except KeyError:
        return None


class Bench(Protocol):
    def run(self, config: Config) -> list[dict[str, Any]]:
        """A row of metrics a step. Raises ArealError."""
        ...


class LocalBench:
    """The local run: threads and the wall clock, in a folder that goes when it ends."""

    def run(self, config: Config) -> list[dict[str, Any]]:
        with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as silent:
            where = config.run.model_copy(update={"dir": f"{folder}/run"})
            return run(config.model_copy(update={"run": where}), stream=silent).metrics


class Workbench:
    """Under the virtual clock. Runs one config after another: learners, engines and first parameters are made
    once for all the configs that agree in what they are made of, so most runs cost their steps alone.
    """

    def __init__(self, speed: float) -> None:
        self._speed = speed
        self._learners: dict[str, Learner] = {}
        self._engines: dict[str, list[Engine]] = {}
        self._params: dict[str, Params] = {}

    def run(self, config: Config) -> list[dict[str, Any]]:
        of_engine = _key(config, "model", "tasks", "generation", "runtime")
        of_learner = of_engine + _key(config, "algorithm", "trainer") + str(config.run.steps)
        of_params = of_engine + _key(config, "trainer") + str(config.run.seed)
        parts = assemble(config, learner=self._learners.get(of_learner))
        self._learners[of_learner] = parts.learner
        if of_engine not in self._engines:
            self._engines[of_engine] = [parts.engine(i) for i in range(config.runtime.hosts)]
        if of_params not in self._params:
            self._params[of_params] = first_params(parts)
        state = parts.learner.init(self._params[of_params], config.run.seed)
        machines = RealMachines(parts, state, self._engines[of_engine])
        result = simulate(config, schedule(config, self._speed), machines)
        if not result.audit.ok:
            raise ArealError(f"a run broke an invariant: {result.audit.violations[0]}")
        trained = [event for _, event, _ in result.rows if isinstance(event, BatchTrained)]
        return [event.metrics | {"params_digest": event.digest} for event in trained]


def schedule(config: Config, speed: float) -> Schedule:
    """A training step takes a virtual second, decoding a batch of longest answers 1 / speed of them."""
    samples = config.trainer.batch_size * config.algorithm.group_size
    rounds = math.ceil(samples / (config.runtime.hosts * config.generation.slots))
    return Schedule(
        jitter=0.0,
        token_s=1.0 / (speed * rounds * config.generation.max_tokens),
        crowd_slots=math.inf,
        prefill_s=0.0,
        swap_s=0.0,
        recompute_token_s=0.0,
        train_s=1.0,
        publish_s=PUBLISH_S,
        reward_s=0.0,
    )


def _key(config: Config, *sections: str) -> str:
    return config.model_dump_json(include=set(sections))


# --- words --------------------------------------------------------------------------------------------------


def _settings(*, values: Any = None, arms: Any = None, seeds: Any = None, speed: Any = None) -> None:
    """The settings that an ablation takes beside config words."""


def _read(name: str, ablation: Ablation, words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Settings with their defaults filled in, and the words for the config. Raises ArealError."""
    given: dict[str, Any] = {}
    overrides: list[str] = []
    varied = {word.split("=")[0] for arm in ablation.arms.values() for word in arm}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:
            raise ArealError(f"{word} is no key=value; all runs of ablation {name} share {ablation.recipe}")
        if key == ablation.key:
            raise ArealError(f"{word}: ablation {name} varies {key} itself; give values=[{text}]")
        if key == "run.seed":
            raise ArealError(f"{word}: an ablation runs seeds 0, 1, ...; say how many with seeds=N")
        if key in varied:
            raise ArealError(f"{word}: {key} is what the arms differ in; choose with arms=[...]")
        if "." in key or key == "tasks":
            overrides.append(word)
        else:
            given[key] = yaml.safe_load(text)
    check_settings(_settings, given, f"ablate {name}")
    defaults = {name: getattr(ablation, name) for name in ("values", "arms", "seeds", "speed")}
    settings = defaults | {key: value for key, value in given.items() if value is not None}
    _check(name, ablation, settings)
    return settings | {"values": list(settings["values"]), "arms": list(settings["arms"])}, overrides


def _check(name: str, ablation: Ablation, settings: Mapping[str, Any]) -> None:
    """Raise ArealError for a setting that cannot be. The values themselves are the config's to check."""
    if ablation.speed is None and settings["speed"] is not None:
        raise ArealError(
            f"speed={settings['speed']}: ablation {name} runs by the wall clock; leave speed out"
        )
    for key in ("values", "arms"):
        if isinstance(settings[key], str) or not settings[key]:
            raise ArealError(f"{key}={settings[key]} is no list; write {key}=[{settings[key]}]")
    for arm in settings["arms"]:
        if arm not in ablation.arms:
            near = difflib.get_close_matches(str(arm), ablation.arms, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(ablation.arms)}"
            raise ArealError(f"ablation {name} has no arm {arm}; {hint}")
    if type(settings["seeds"]) is not int or settings["seeds"] < 1:
        raise ArealError(f"seeds={settings['seeds']} is no count; give a whole number from 1 on")
    speed = settings["speed"]
    if speed is not None and not (isinstance(speed, (int, float)) and 0 < speed < math.inf):
        raise ArealError(f"speed={speed} is no ratio; give a number above 0")


def _config(ablation: Ablation, overrides: Sequence[str], seed: int, value: Any, arm: str) -> Config:
    own = (*ablation.arms[arm], f"{ablation.key}={value}", f"run.seed={seed}")
    return load_config(ablation.recipe, *overrides, *own)
