"""Ablations: a run for each value of one config key, each arm and each seed, and a table of the results.

An arm is a named set of config overrides. Every run uses the real engine and learner. Runs under the virtual
clock train samples of the requested staleness, and equal arguments give the same table bit for bit. An
ablation that measures speed uses local runs under the wall clock.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from areal_jax.assembly.devices import machine
from areal_jax.assembly.parts import Parts, assemble, first_params, with_measured_layout
from areal_jax.assembly.run_folder import open_journal
from areal_jax.config.loading import load_config, parsed
from areal_jax.config.tree import Config
from areal_jax.control.events import BatchTrained
from areal_jax.evaluation.evaluator import as_served
from areal_jax.evaluation.result import overall, task_figures
from areal_jax.evaluation.run import EvalSettings, evaluate
from areal_jax.file_errors import writing
from areal_jax.generation.engine import Engine
from areal_jax.jobs.local import run_parts
from areal_jax.lab.ablations.real_machines import RealMachines
from areal_jax.lab.simulation.schedule import Schedule
from areal_jax.lab.simulation.world import simulate
from areal_jax.models.model import Params
from areal_jax.observe.estimates import paired_estimate
from areal_jax.observe.live import clock
from areal_jax.observe.metrics import read_objects
from areal_jax.observe.waits import Interval, read_timelines
from areal_jax.plugin import check_settings, did_you_mean
from areal_jax.report.reading import find
from areal_jax.report.run_result import RunResult
from areal_jax.tasks.held_out import held_out, without_splits
from areal_jax.trainer.learner import Learner
from areal_jax.trainer.state import TrainState
from areal_jax.types import ArealError, VersionedParams

PUBLISH_S = 0.02
"""Virtual seconds until a trained version is published; a training step takes 1 virtual second."""

EVAL_PROMPTS, EVAL_SAMPLES = 128, 2
"""Sizes of an evaluation: the held-out prompts of each task, and the sampled answers of each prompt."""

Table = Mapping[tuple[Any, str], Mapping[str, Sequence[float]]]
"""(value of the varied key, arm) -> name of a figure -> its numbers, one per seed."""

Evaluations = Mapping[str, Mapping[str, Any]]
"""Name of an evaluation -> its figures over all tasks, as `evaluation.result.task_figures` returns them."""


class RunRecord(NamedTuple):
    """What a run gives to an ablation's figures."""

    rows: Sequence[Mapping[str, Any]]
    """The metrics of each training step."""
    evaluations: Evaluations = MappingProxyType({})
    """Of the run's last parameters."""
    intervals: Sequence[Interval] = ()
    """What trainer and hosts did at which time."""
    token_ages: Mapping[int, int] = MappingProxyType({})
    """Age in versions -> number of trained tokens of that age."""


@dataclass(frozen=True)
class Runner:
    """A way to run a config, other than the ablation's own."""

    name: str
    run: Callable[[Config], RunRecord]
    depends_on: str = ""
    """What determines a run's result besides its config, as text."""
    run_s: float | None = None
    """Seconds that a run takes on average, if known."""


@dataclass(frozen=True)
class Contrast:
    """A figure's difference between two arms, seed by seed: arm `arm` minus arm `baseline`."""

    figure: str
    arm: str
    baseline: str


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
    seeds: int | Mapping[Any, int]
    """Number of seeds, or value -> number of seeds."""
    speed: float | None
    """Decoding speed: how many batches of completions of maximum length the hosts decode during one training
    step. None: local runs under the wall clock.
    """
    figures: Mapping[str, Callable[[RunRecord], float]]
    """Name -> function that computes the figure of a run. The first one answers the ablation's question."""
    claims: Mapping[str, Callable[[Table], bool]]
    """Expected result -> function that returns whether the table confirms it, and raises KeyError if the
    table lacks a run that the function needs.
    """
    smoke: tuple[str, ...]
    """Words of a table that takes at most two minutes."""
    of_value: Mapping[Any, tuple[str, ...]] = field(default_factory=dict)
    """Value -> config overrides of all its runs."""
    evaluations: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Name -> config overrides of an evaluation of each run's last parameters on held-out prompts."""
    shares_start: bool = False
    """Whether all seeds begin with the parameters of seed 0, as runs that begin with one pretrained model."""
    contrasts: tuple[Contrast, ...] = ()
    """The differences that the result shows with their 95 % intervals over seeds."""
    takes_config: bool = False
    """Whether the first word may be a user's config file, in place of the recipe."""
    curves: tuple[str, ...] = ("reward_mean",)
    """Fields of the metrics rows that each run's result has for every step; `part/field` is in a mapping."""


# --- running ------------------------------------------------------------------------------------------------


def ablate(
    name: str,
    ablation: Ablation,
    words: Sequence[str],
    say: Callable[[str], None],
    kept: Path | None = None,
    runner: Runner | None = None,
) -> dict[str, Any]:
    """Run an ablation and return its table.

    `words` are key=value arguments: settings (values, arms, seeds, speed) or config keys; before them, if
    `ablation.takes_config`, a config file. `say(text)` reports, in one line each, how long the ablation will
    take, and each finished run. `kept`: a file to which each finished run is appended as a JSON line; a run
    that it has already, of an equal config, is not repeated. `runner`: how to run each config; None: with the
    real engine and learner. Raises ArealError for an unknown key, and for a config key that the ablation
    itself varies.
    """
    if ablation.takes_config and words and "=" not in words[0]:
        ablation, words = replace(ablation, recipe=words[0]), words[1:]
    settings, overrides = _read(name, ablation, words)
    places = _places(settings)
    # A bad word fails before the first run.
    sources = [_sources(ablation, overrides, *place) for place in places]
    configs = [load_config(*own) for own in sources]
    asked = [
        {name: load_config(*own, *extra) for name, extra in ablation.evaluations.items()} for own in sources
    ]
    runs = _runs(ablation, settings["speed"], runner)
    known = {} if kept is None else {one["config"]: one for one in read_objects(kept, "delete the line")}
    names = [_digest(config, evaluations, runner) for config, evaluations in zip(configs, asked, strict=True)]
    left = sum(name_of_run not in known for name_of_run in names)
    known_s = [known[name_of_run]["seconds"] for name_of_run in names if name_of_run in known]
    own_s = [] if runner is None or runner.run_s is None else [runner.run_s]
    known_s, taken_s = known_s or own_s, []
    expected = _expected(left, known_s, taken_s)
    say(f"{left} of {len(places)} runs to do, {configs[0].run.steps} steps each{expected}")
    results, started = [], time.perf_counter()
    for place, config, evaluations, name_of_run in zip(places, configs, asked, names, strict=True):
        result = known.get(name_of_run)
        if result is None:
            began = time.perf_counter()
            measured = runs(config, evaluations)
            result = _result(ablation, place, measured) | {"seconds": time.perf_counter() - began}
            result["config"] = name_of_run
            _keep(kept, result)
            taken_s.append(result["seconds"])
            left -= 1
        results.append(result)
        first = next(iter(ablation.figures))
        seed, value, arm = place
        say(
            f"{len(results)}/{len(places)}: {ablation.key}={value}, {arm}, seed {seed}: "
            f"{first} {result[first]:.5g}, {result['seconds']:.0f} s{_expected(left, known_s, taken_s)}"
        )
    return _answer(name, ablation, settings, overrides, results) | {
        "steps": configs[0].run.steps,
        "total_seconds": time.perf_counter() - started,
        **machine(configs[0].model.shape, configs[0].model.dtype, [one["seconds"] for one in results]),
    }


def _expected(left: int, known_s: Sequence[float], taken_s: Sequence[float]) -> str:
    """Returns how long the runs that are left will take, as the end of a sentence.

    `known_s`: seconds of runs like these; `taken_s`: of the finished ones, of which the first also compiled.
    """
    if not left:
        return ""
    if usual_s := [*known_s, *taken_s[1:]]:
        return f"; about {clock(left * statistics.fmean(usual_s))} left"
    if taken_s:
        return f"; at most {clock(left * taken_s[0])} left, since this one also compiled"
    return "; the first one will show how long the others take"


def _places(settings: Mapping[str, Any]) -> list[tuple[int, Any, str]]:
    """Return (seed, value, arm) of every run, in the order of the runs."""
    seeds, values = settings["seeds"], settings["values"]
    count = {value: seeds if isinstance(seeds, int) else seeds[value] for value in values}
    return [
        (seed, value, arm)
        for seed in range(max(count.values()))
        for value in values
        for arm in settings["arms"]
        if seed < count[value]
    ]


def _runs(
    ablation: Ablation, speed: float | None, runner: Runner | None
) -> Callable[[Config, Mapping[str, Config]], RunRecord]:
    """Return the function that runs a config and evaluates its last parameters by the given configs."""
    if runner is not None:
        return lambda config, evaluations: runner.run(config)
    if speed is None:
        local = LocalBench()
        return lambda config, evaluations: local.run(config)
    return Workbench(speed, ablation.shares_start).run


def _result(ablation: Ablation, place: tuple[int, Any, str], measured: RunRecord) -> dict[str, Any]:
    """Return a run's figures and curves."""
    seed, value, arm = place
    rows = measured.rows
    return {
        "value": value,
        "arm": arm,
        "seed": seed,
        **{name: figure(measured) for name, figure in ablation.figures.items()},
        "curves": {name: [_rounded(_field(row, name)) for row in rows] for name in ablation.curves},
        "token_ages": {str(age): count for age, count in sorted(measured.token_ages.items())},
        "digest": rows[-1]["params_digest"],
    }


def _field(row: Mapping[str, Any], name: str) -> Any:
    field_name, _, inner = name.partition("/")
    found = row.get(field_name)
    return (found or {}).get(inner) if inner else found


def _rounded(value: Any) -> Any:
    return round(value, 4) if isinstance(value, float) else value


def _digest(config: Config, evaluations: Mapping[str, Config], runner: Runner | None) -> str:
    """Return a digest of everything that determines a run's result, except code and machine."""
    # The evaluation's sizes count too; where a run's folder is does not.
    texts = [config.model_dump_json(exclude={"run": {"dir"}}), str((EVAL_PROMPTS, EVAL_SAMPLES))]
    texts += [f"{name} {other.model_dump_json(include={'tasks'})}" for name, other in evaluations.items()]
    texts += [] if runner is None else [f"{runner.name} {runner.depends_on}"]
    return hashlib.blake2b("\n".join(texts).encode(), digest_size=8).hexdigest()


def _keep(kept: Path | None, result: Mapping[str, Any]) -> None:
    if kept is not None:
        with writing(kept), kept.open("a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")


def _answer(
    name: str,
    ablation: Ablation,
    settings: Mapping[str, Any],
    overrides: Sequence[str],
    results: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Return the ablation's table, differences, claims and runs."""
    table: dict[tuple[Any, str], dict[str, list[float]]] = {}
    for result in results:
        place = result["value"], result["arm"]
        numbers = table.setdefault(place, {figure: [] for figure in ablation.figures})
        for figure in ablation.figures:
            numbers[figure].append(result[figure])
    return {
        "ablation": name,
        "key": ablation.key,
        "recipe": ablation.recipe,
        "words": list(overrides),
        **settings,
        "table": _rows(table),
        "differences": _differences(ablation, settings["values"], table),
        "claims": {claim: _holds(table, test) for claim, test in ablation.claims.items()},
        "runs": list(results),
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


def _differences(ablation: Ablation, values: Sequence[Any], table: Table) -> list[dict[str, Any]]:
    """Return each contrast's mean difference and 95 % interval: for each value, and over all values."""
    found = []
    for one in ablation.contrasts:
        by_value = {value: paired(table, value, one) for value in values}
        pooled = [difference for pairs in by_value.values() for difference in pairs]
        for value, pairs in [*by_value.items(), ("all", pooled)]:
            if pairs:
                difference, low, high = paired_estimate(pairs)
                ends = {"difference": difference, "low": low, "high": high, "pairs": len(pairs)}
                found.append({"value": value, **vars(one), **ends})
    return found


def paired(table: Table, value: Any, contrast: Contrast) -> list[float]:
    """Return the contrast's differences at this value, one per seed; empty if an arm was not run."""
    arms = [table.get((value, arm), {}).get(contrast.figure, ()) for arm in (contrast.arm, contrast.baseline)]
    return [one - other for one, other in zip(*arms, strict=False)]


def _holds(table: Table, test: Callable[[Table], bool]) -> bool | None:
    try:
        return test(table)
    except KeyError:
        return None


def recorded(result: RunResult) -> RunRecord:
    """Return what a finished run's folder has of it."""
    with open_journal(result.folder) as journal:
        ages = find(journal).token_ages
    return RunRecord(result.metrics, intervals=read_timelines(result.folder), token_ages=ages)


class Shared:
    """Learners and first parameters that runs have in common, so that most runs compile and pretrain nothing.

    `shares_start`: all seeds begin with the parameters of seed 0.
    """

    def __init__(self, shares_start: bool = False) -> None:
        self._shares_start = shares_start
        self._learners: dict[str, Learner] = {}
        self.params: dict[str, Params] = {}

    def parts(self, config: Config) -> tuple[Parts, Params]:
        """Return the assembled parts of a config, and its first parameters, which must not be donated."""
        own = _key(config, "model", "tasks", "algorithm", "trainer", "runtime")
        of_learner = f"{own} {config.generation.length} {config.generation.max_tokens} {config.run.steps}"
        # Arms with the same tasks in their supervised steps have the same start.
        prompts = () if config.trainer.supervised.tasks else ("tasks",)
        seed = 0 if self._shares_start else config.run.seed
        of_params = _key(config, "model", "runtime", "trainer", *prompts) + f"{config.row_length} {seed}"
        parts = assemble(config, learner=self._learners.get(of_learner))
        self._learners[of_learner] = parts.learner
        if of_params not in self.params:
            first = config.model_copy(update={"run": config.run.model_copy(update={"seed": seed})})
            self.params[of_params] = first_params(assemble(first, learner=parts.learner))
        return parts, self.params[of_params]


class LocalBench:
    """Runs configs under the wall clock, in this process and in temporary folders."""

    def __init__(self) -> None:
        self.shared = Shared()

    def run(self, config: Config) -> RunRecord:
        with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as silent:
            where = config.run.model_copy(update={"dir": f"{folder}/run"})
            parts, params = self.shared.parts(config.model_copy(update={"run": where}))
            started = _Started(**vars(with_measured_layout(parts)), params=params)
            return recorded(run_parts(started, started.config, silent))


@dataclass(frozen=True)
class _Started(Parts):
    """The parts of a run that begins with given parameters."""

    params: Any = None

    def engine(self, host: int) -> Engine:
        engine = super().engine(host)
        # A program that compiles at a run's first swap would take longer than many of its steps.
        engine.warm(engine.load_params(engine.blank(self.config.wire_dtype)))
        return engine

    def first_state(self) -> TrainState:
        return self.learner.init(self.params)


class Workbench:
    """Runs configs under the virtual clock, with hosts of decoding speed `speed` (see `Ablation.speed`).

    Configs with the same model, tasks and sizes share learners, engines and initial parameters, so most runs
    compile nothing. `shares_start`: all seeds begin with the parameters of seed 0.
    """

    def __init__(self, speed: float, shares_start: bool = False) -> None:
        self._speed, self.shared = speed, Shared(shares_start)
        self._engines: dict[str, list[Engine]] = {}

    def run(self, config: Config, evaluations: Mapping[str, Config] | None = None) -> RunRecord:
        """Run a config, and evaluate its last parameters by the configs `evaluations`."""
        of_engine = _key(config, "model", "tasks", "generation", "runtime")
        parts, params = self.shared.parts(config)
        if of_engine not in self._engines:
            self._engines[of_engine] = [parts.engine(i) for i in range(config.runtime.hosts)]
        state = parts.learner.init(params)
        machines = RealMachines(parts, state, self._engines[of_engine])
        result = simulate(config, schedule(config, self._speed), machines)
        if not result.audit.ok:
            raise ArealError(
                f"the run with seed {config.run.seed} broke an invariant of the control plane: "
                f"{result.audit.violations[0]}; please report this as a bug"
            )
        trained = [event for _, event, _ in result.rows if isinstance(event, BatchTrained)]
        rows = [event.metrics | {"params_digest": event.digest} for event in trained]
        value = parts.learner.publish(machines.state)
        found = {
            name: self._evaluated(self._engines[of_engine][0], value, other)
            for name, other in (evaluations or {}).items()
        }
        return RunRecord(rows, found, token_ages=result.token_ages)

    def _evaluated(self, engine: Engine, value: VersionedParams, config: Config) -> dict[str, Any]:
        asked = held_out(without_splits(config.tasks))
        settings = EvalSettings(config, EVAL_PROMPTS, EVAL_SAMPLES)
        return task_figures(overall(evaluate(engine, as_served(value, config), asked, settings)))


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
            given[key] = parsed(text)
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
    seeds = settings["seeds"]
    if seeds != ablation.seeds and (type(seeds) is not int or seeds < 1):
        raise ArealError(f"seeds={settings['seeds']} is not a count; use an integer of at least 1")
    speed = settings["speed"]
    if speed is not None and not (isinstance(speed, (int, float)) and 0 < speed < math.inf):
        raise ArealError(f"speed={speed} is not a finite number above 0; use, for example, speed=0.6")


def _sources(
    ablation: Ablation, overrides: Sequence[str], seed: int, value: Any, arm: str
) -> tuple[str, ...]:
    """Return the recipe and the words that make a run's config."""
    own = (*ablation.arms[arm], *ablation.of_value.get(value, ()))
    return (ablation.recipe, *overrides, *own, f"{ablation.key}={value}", f"run.seed={seed}")
