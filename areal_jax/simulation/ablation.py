"""Ablations: a run for each value of one config key, each arm and each seed, and a table of the results.

An arm is a named set of config overrides. Every run uses the real engine and learner. Runs under the virtual
clock train samples of the requested staleness, and equal arguments give the same table bit for bit. An
ablation that measures speed uses local runs under the wall clock.
"""

from __future__ import annotations

import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from areal_jax.assembly.devices import machine
from areal_jax.assembly.parts import assemble, first_params
from areal_jax.config.loading import load_config
from areal_jax.config.tree import Config
from areal_jax.control.events import BatchTrained
from areal_jax.generation.engine import Engine
from areal_jax.models.model import Params
from areal_jax.plugin import check_settings, did_you_mean
from areal_jax.runtime.jobs import run
from areal_jax.simulation.real_machines import RealMachines
from areal_jax.simulation.schedule import Schedule
from areal_jax.simulation.world import simulate
from areal_jax.trainer.learner import Learner
from areal_jax.types import ArealError

PUBLISH_S = 0.02
"""Virtual seconds until a trained version is published; a training step takes 1 virtual second."""


Row = Mapping[str, Any]
"""The metrics of one training step."""


Table = Mapping[tuple[Any, str], Mapping[str, Sequence[float]]]
"""(value of the varied key, arm) -> name of a figure -> its numbers, one per seed."""


@dataclass(frozen=True)
class Ablation:
    doc: str
    recipe: str
    """The packaged config file that all runs share."""
    key: str
    """The config key that is varied."""
    values: tuple[Any, ...]
    arms: Mapping[str, tuple[str, ...]]
    """Name -> the config overrides of that arm."""
    seeds: int
    speed: float | None
    """Decoding speed: how many batches of completions of maximum length the hosts decode during one training
    step. None: local runs under the wall clock.
    """
    figures: Mapping[str, Callable[[Sequence[Row]], float]]
    """Name -> function that computes the figure from a run's rows. The first figure answers the ablation's
    question.
    """
    claims: Mapping[str, Callable[[Table], bool]]
    """Expected result -> function that returns whether the table confirms it, and raises KeyError if the
    table lacks a run that the function needs.
    """


# --- running ------------------------------------------------------------------------------------------------


def ablate(name: str, ablation: Ablation, words: Sequence[str], say: Callable[[str], None]) -> dict[str, Any]:
    """Run an ablation and return its table.

    `words` are key=value arguments: settings (values, arms, seeds, speed) or config keys. `say(text)` reports
    each finished run in one line. Raises ArealError for an unknown key, and for a config key that the
    ablation itself varies.
    """
    settings, overrides = _read(name, ablation, words)
    values, arms = settings["values"], settings["arms"]
    places = [(seed, value, arm) for seed in range(settings["seeds"]) for value in values for arm in arms]
    configs = [
        _config(ablation, overrides, *place) for place in places
    ]  # a bad word fails before the first run
    measure = run_locally if settings["speed"] is None else Workbench(settings["speed"]).run
    table: dict[tuple[Any, str], dict[str, list[float]]] = {}
    results, started = [], time.perf_counter()
    for (seed, value, arm), config in zip(places, configs, strict=True):
        began = time.perf_counter()
        rows = measure(config)
        figures = {name: figure(rows) for name, figure in ablation.figures.items()}
        result: dict[str, Any] = {
            "value": value,
            "arm": arm,
            "seed": seed,
            **figures,
            "rewards": [row["reward_mean"] for row in rows],
            "digest": rows[-1]["params_digest"],
            "seconds": time.perf_counter() - began,
        }
        results.append(result)
        for figure, number in figures.items():
            table.setdefault((value, arm), {}).setdefault(figure, []).append(number)
        first = next(iter(figures))
        say(
            f"{len(results)}/{len(places)}: {ablation.key}={value}, {arm}, seed {seed}: "
            f"{first} {figures[first]:.5g}, {result['seconds']:.0f} s"
        )
    c = configs[0]
    return {
        "ablation": name,
        "key": ablation.key,
        "recipe": ablation.recipe,
        "words": overrides,
        "steps": c.run.steps,
        **settings,
        "table": _rows(table),
        "claims": {claim: _holds(table, test) for claim, test in ablation.claims.items()},
        "runs": results,
        "total_seconds": time.perf_counter() - started,
        **machine(c.model.shape, c.model.dtype, [result["seconds"] for result in results]),
    }


def _rows(table: Table) -> list[dict[str, Any]]:
    """Return one row for each value and arm, in the order of the runs.

    A row has each figure's mean over seeds and, as `by_seed`, the first figure's numbers, one per seed.
    """
    return [
        {"value": value, "arm": arm, "by_seed": next(iter(figures.values()))}
        | {name: statistics.mean(numbers) for name, numbers in figures.items()}
        for (value, arm), figures in table.items()
    ]


def _holds(table: Table, test: Callable[[Table], bool]) -> bool | None:
    try:
        return test(table)
    except KeyError:
        return None


def run_locally(config: Config) -> list[dict[str, Any]]:
    """Return the metrics rows, one per step, of a local run under the wall clock in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as silent:
        where = config.run.model_copy(update={"dir": f"{folder}/run"})
        return run(config.model_copy(update={"run": where}), stream=silent).metrics


class Workbench:
    """Runs configs under the virtual clock, with hosts of decoding speed `speed` (see `Ablation.speed`).

    Configs with the same model, tasks and sizes share learners, engines and initial parameters, so most runs
    compile nothing.
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
        state = parts.learner.init(self._params[of_params])
        machines = RealMachines(parts, state, self._engines[of_engine])
        result = simulate(config, schedule(config, self._speed), machines)
        if not result.audit.ok:
            raise ArealError(
                f"the run with seed {config.run.seed} broke an invariant of the control plane: "
                f"{result.audit.violations[0]}; please report this as a bug"
            )
        trained = [event for _, event, _ in result.rows if isinstance(event, BatchTrained)]
        return [event.metrics | {"params_digest": event.digest} for event in trained]


def schedule(config: Config, speed: float) -> Schedule:
    """Return a schedule in which a training step takes 1 virtual second.

    Decoding one batch of completions of maximum length takes 1 / `speed` virtual seconds.
    """
    samples = config.trainer.batch_size * config.algorithm.group_size
    rounds = math.ceil(samples / (config.runtime.hosts * config.generation.rollout_slots))
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
    """Does nothing; its signature declares to `check_settings` which settings an ablation accepts."""


def _read(name: str, ablation: Ablation, words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Split `words` of the form key=value into the ablation's settings and config overrides.

    Settings are values, arms, seeds and speed; by default, those of `ablation`. Raises ArealError for an
    invalid word. `name`: the ablation's name, for messages.
    """
    given: dict[str, Any] = {}
    overrides: list[str] = []
    varied = {word.split("=")[0] for arm in ablation.arms.values() for word in arm}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:
            raise ArealError(
                f"{word} is not key=value; leave the word out, because ablation {name} uses the config "
                f"{ablation.recipe}"
            )
        if key == ablation.key:
            raise ArealError(f"{word}: ablation {name} varies {key} itself; give values=[{text}]")
        if key == "run.seed":
            raise ArealError(f"{word}: an ablation uses seeds 0, 1, ...; set their number with seeds=N")
        if key in varied:
            raise ArealError(
                f"{word}: ablation {name} sets {key} itself, in each arm; leave the word out, or choose "
                f"arms with arms=[{','.join(ablation.arms)}]"
            )
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
    """Raise ArealError for an invalid setting; the elements of `values` are checked later, by each config."""
    if ablation.speed is None and settings["speed"] is not None:
        raise ArealError(f"speed={settings['speed']}: ablation {name} uses the wall clock; leave speed out")
    for key in ("values", "arms"):
        if isinstance(settings[key], str) or not settings[key]:
            raise ArealError(f"{key}={settings[key]} is not a list; write {key}=[{settings[key]}]")
    for arm in settings["arms"]:
        if arm not in ablation.arms:
            hint = did_you_mean(str(arm), ablation.arms, f"choose from: {', '.join(ablation.arms)}")
            raise ArealError(f"ablation {name} has no arm {arm}; {hint}")
    if type(settings["seeds"]) is not int or settings["seeds"] < 1:
        raise ArealError(f"seeds={settings['seeds']} is not a count; use an integer of at least 1")
    speed = settings["speed"]
    if speed is not None and not (isinstance(speed, (int, float)) and 0 < speed < math.inf):
        raise ArealError(f"speed={speed} is not a finite number above 0; use, for example, speed=0.6")


def _config(ablation: Ablation, overrides: Sequence[str], seed: int, value: Any, arm: str) -> Config:
    own = (*ablation.arms[arm], f"{ablation.key}={value}", f"run.seed={seed}")
    return load_config(ablation.recipe, *overrides, *own)
