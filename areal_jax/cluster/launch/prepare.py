"""Makes the commands and files that submit a run by the chosen launcher: slurm, gcloud or gke."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from areal_jax.cluster.launch import gcloud, gke, slurm
from areal_jax.cluster.launch.submission import Submission
from areal_jax.cluster.launched import Launch
from areal_jax.cluster.placement import Plan, make_plan

LAUNCHERS: dict[str, Callable[[Plan, Launch, Sequence[str], Mapping[str, str]], Submission]] = {
    "slurm": slurm.submission,
    "gcloud": gcloud.submission,
    "gke": gke.submission,
}


def prepare(
    launcher: str, launch: Launch, options: Sequence[str], environment: Mapping[str, str]
) -> Submission:
    """Returns the commands and files that submit a run by `launcher`: slurm, gcloud or gke; runs nothing.

    `launch`: the run's config and folder. `options`: words for the command that submits. `environment`: its
    variables are the settings of the files in launchers/. Raises LaunchError if one of them is missing or not
    valid for this launcher.
    """
    accelerator = launch.config.launch.accelerator
    plan = make_plan(launch.config, "gpu" if accelerator == "auto" else accelerator)
    return LAUNCHERS[launcher](plan, launch, options, environment)
