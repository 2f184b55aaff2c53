"""The command `ablate`: runs of an ablation, real, simulated or with sleeping executors, as tables."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from areal_jax.cli.shell import AsJson, print_table, progress, show
from areal_jax.file_errors import writing
from areal_jax.types import ArealError

COLUMN = 13
"""Width of each column in an ablation's table, in characters, even if the terminal is narrower."""


def ablate(
    name: Annotated[str, typer.Argument(help="Name of the ablation; if omitted, all are listed.")] = "",
    words: Annotated[
        list[str] | None,
        typer.Argument(
            help="values=[...], arms=[...], seeds=N, speed=X, or section.key=value for all; strategies also "
            "takes a config file as the first word."
        ),
    ] = None,
    json: AsJson = False,
    *,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="Run a part of the ablation that takes at most two minutes.")
    ] = False,
    runs: Annotated[
        Path | None,
        typer.Option(help="File to which each finished run is appended; runs that it has are not repeated."),
    ] = None,
    curves: Annotated[
        Path | None, typer.Option(help="SVG file for the curves by step, one line for each arm.")
    ] = None,
    page: Annotated[Path | None, typer.Option(help="HTML file for the tables and figures.")] = None,
    simulated: Annotated[
        bool,
        typer.Option(
            "--simulated", help="strategies: simulate the runs, and compare with published figures."
        ),
    ] = False,
    sleeping: Annotated[
        bool,
        typer.Option(
            "--sleeping",
            help="strategies: run in real time with executors that sleep as long as the cost model says, and "
            "compare with the simulation.",
        ),
    ] = False,
    costs: Annotated[
        Path | None,
        typer.Option(
            help="YAML or JSON file with the cost model's figures, as `areal-jax bench costs --json` prints "
            "them; if omitted, they are measured."
        ),
    ] = None,
) -> None:
    """Run an ablation (runs that differ in one key) over several seeds, and show a table of its results."""
    from areal_jax.lab.ablations.ablations import ABLATIONS, find

    if not name:
        show({name: ablation.doc for name, ablation in ABLATIONS.items()}, json)
        return
    from areal_jax.assembly.devices import use_compilation_cache
    from areal_jax.lab.ablations.ablation import ablate as run_all

    for path in (runs, curves, page):
        if path is not None and not path.parent.is_dir():
            raise ArealError(f"{path.parent} is not a folder, so {path.name} cannot be written; create it")
    ablation = find(name)
    _require_modelled(name, simulated or sleeping, costs)
    use_compilation_cache()
    asked = [*(ablation.smoke if smoke else ()), *(words or ())]
    if simulated or sleeping:
        figures = _under_costs(ablation, asked, runs, costs, sleeping)
    else:
        figures = run_all(name, ablation, asked, progress, runs)
    _write(figures, curves, page)
    show(figures, json, lambda: _print_tables(figures))


def _require_modelled(name: str, is_modelled: bool, costs: Path | None) -> None:
    if is_modelled and name != "strategies":
        raise ArealError(f"ablation {name} needs a model; leave --simulated and --sleeping to strategies")
    if costs is not None and not is_modelled:
        raise ArealError(f"--costs {costs} is for --simulated and --sleeping; give one of them too")


def _under_costs(
    ablation: Any, words: Sequence[str], runs: Path | None, costs: Path | None, is_slept: bool
) -> dict[str, Any]:
    """Returns the simulated table, and beside it the published figures or what sleeping executors reached."""
    from functools import partial
    from statistics import fmean

    from areal_jax.lab.ablations.ablation import Runner, ablate
    from areal_jax.lab.ablations.strategy_ablation import compared, under_a_cost_model
    from areal_jax.lab.published.cost_model import fitted
    from areal_jax.lab.published.modelled import simulated, slept
    from areal_jax.lab.published.published import published_table

    ablation = under_a_cost_model(ablation)
    measured = _costs(costs, words, ablation.recipe)
    model = fitted(measured)

    def table(name: str, run: Any, run_s: float | None = None) -> dict[str, Any]:
        runner = Runner(name, partial(run, costs=model), str(model), run_s)
        return ablate("strategies", ablation, words, progress, runs, runner)

    predicted = table("simulated", simulated)
    if not is_slept:
        lines = [line.shown() for line in published_table()]
        return predicted | {"costs": measured, "published": lines}
    step_s = fmean(one["step_s"] for one in predicted["runs"])
    found = table("sleeping", slept, predicted["steps"] * step_s)
    return found | {
        "costs": measured,
        "predicted": predicted["table"],
        "compared": compared(predicted, found),
    }


def _costs(path: Path | None, words: Sequence[str], recipe: str) -> dict[str, Any]:
    """Returns the figures of the file or, without one, as measured on this machine for the same config."""
    import yaml

    if path is not None:
        try:
            found = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, yaml.YAMLError) as error:
            raise ArealError(f"--costs {path} cannot be read: {error}; give a YAML or JSON file") from None
        if not isinstance(found, dict):
            raise ArealError(f"--costs {path} has no figures by name; see `areal-jax bench costs --json`")
        return found
    from areal_jax.lab.bench.registry import bench

    config = words[0] if words and "=" not in words[0] else recipe
    own = [word for word in words if "." in word.partition("=")[0]]
    progress("measuring the cost model on this machine (areal-jax bench costs)")
    return bench("costs", {"config": config, "words": own})


def _write(figures: Mapping[str, Any], curves: Path | None, page: Path | None) -> None:
    from areal_jax.report.report import page_css
    from areal_jax.report.svg import standalone

    if curves is not None:
        from areal_jax.report.curves import arm_curves

        figure = arm_curves(figures["runs"], figures["key"])
        with writing(curves):
            curves.write_text(standalone(figure, page_css()), encoding="utf-8")
    if page is not None:
        from areal_jax.report.comparison import page as render

        tables = {"Results": figures["table"]}
        for title, key in (("Sleeping over simulated", "compared"), ("Published figures", "published")):
            if key in figures:
                tables[title] = figures[key]
        with writing(page):
            page.write_text(
                render(tables, figures, shlex.join(["areal-jax", *sys.argv[1:]])), encoding="utf-8"
            )


def _print_tables(figures: Mapping[str, Any]) -> None:
    names = [name for name in figures["table"][0] if name not in ("value", "arm", "by_seed")]
    headers = (name.replace("_", " ") for name in names[1:])
    has_arms = len({row["arm"] for row in figures["table"]}) > 1
    first = (figures["key"], "arm") if has_arms else (figures["key"],)
    columns = (*first, names[0].replace("_", " "), "by seed", *headers)
    rows = []
    for row in figures["table"]:
        means = [f"{row[name]:.4g}" for name in names]
        seeds = " ".join(f"{figure:.4g}" for figure in row["by_seed"])
        own = (str(row["value"]), row["arm"]) if has_arms else (str(row["value"]),)
        rows.append((*own, means[0], seeds, *means[1:]))
    width = COLUMN * len(columns)
    print_table(columns, rows, width, padding=0)
    for key in ("compared", "published"):
        if key in figures:
            cells = [[_cell(value) for value in row.values()] for row in figures[key]]
            print_table(tuple(figures[key][0]), cells, 100)
    if figures["differences"]:
        names = (figures["key"], "figure", "arm", "minus", "difference", "95 % interval", "pairs")
        print_table(names, map(_difference, figures["differences"]), width)
    for claim, holds in figures["claims"].items():
        typer.echo(f"{ {True: 'met', False: 'not met', None: 'not in this table'}[holds] }: {claim}")


def _cell(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _difference(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns a paired difference of an ablation as the cells of a table."""
    ends = "–" if row["low"] is None else f"{row['low']:+.3f} to {row['high']:+.3f}"
    names = (str(row["value"]), row["figure"].replace("_", " "), row["arm"], row["baseline"])
    return *names, f"{row['difference']:+.3f}", ends, str(row["pairs"])
