"""What each launcher submits, for every shape of config: as in files that were read, and by shellcheck."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

from areal_jax.config import load_config, make_config
from areal_jax.runtime.launch import submit
from areal_jax.runtime.launch.plan import LaunchError
from areal_jax.runtime.launch.shell import Expanded, command, quoted
from tests.programs import require
from tests.runtime.launch.jobset import JobSet
from tests.runtime.launch.shapes import CLOUD, GOLDEN, SHAPES, TPU, golden_files, submission_of


@pytest.mark.parametrize("shape", SHAPES)
def test_a_submission_is_the_one_that_was_read(shape):
    files = golden_files(shape)
    assert sorted(files) == sorted(path.name for path in (GOLDEN / shape).iterdir())
    for name, text in files.items():
        assert text == (GOLDEN / shape / name).read_text(), f"{name}: python -m tests.runtime.launch.shapes"


def test_shellcheck_finds_nothing_in_any_script():
    require("shellcheck")
    scripts = sorted(map(str, GOLDEN.glob("*/*.sh")))
    assert len(scripts) >= 16
    done = subprocess.run(
        ["shellcheck", "--severity=warning", *scripts],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape.startswith("gke")])
def test_manifests_have_the_structure_of_the_jobset_api(shape):
    config, jobset = yaml.safe_load_all(submission_of(shape).files["jobset.yaml"])
    checked = JobSet.model_validate(jobset)
    assert (config["kind"], config["metadata"]["name"]) == ("ConfigMap", checked.metadata.name)
    written = make_config(yaml.safe_load(config["data"]["config.yaml"]))
    assert written.trainer.mesh == load_config(*SHAPES[shape]).trainer.mesh


def test_a_jobset_completes_with_its_controller_and_restarts_with_its_trainer():
    jobset = JobSet.model_validate(list(yaml.safe_load_all(submission_of("gke-tpu").files["jobset.yaml"]))[1])
    assert jobset.spec.successPolicy.model_dump() == {
        "operator": "Any",
        "targetReplicatedJobs": ["controller"],
    }
    jobs = {job.name: job.template.spec for job in jobset.spec.replicatedJobs}
    assert set(jobs) == {"controller", "reward", "trainer", "generate"}
    pods = {name: job.template.spec for name, job in jobs.items()}
    assert (jobs["trainer"].parallelism, jobs["trainer"].backoffLimit, pods["trainer"].restartPolicy) == (
        2,
        0,
        "Never",
    )
    assert all(pods[name].restartPolicy == "OnFailure" for name in ("controller", "reward", "generate"))
    assert pods["trainer"].nodeSelector["cloud.google.com/gke-tpu-topology"] == "2x4"
    assert pods["generate"].nodeSelector["cloud.google.com/gke-tpu-topology"] == "2x2"
    trainer = pods["trainer"].containers[0]
    assert trainer.resources.limits == {"google.com/tpu": "4"}
    assert {"--index=$(INDEX)", "--processes=2", "--name=trainer-$(INDEX)"} <= set(trainer.command)
    name = jobset.metadata.name
    assert f"--coordinator={name}-trainer-0-0.{name}:7601" in trainer.command
    assert pods["controller"].initContainers[0].restartPolicy == "Always"  # Redis, beside the controller


@pytest.mark.parametrize("shape", SHAPES)
def test_no_secret_is_in_what_is_printed(shape, tmp_path):
    secret = submit.make_secret(tmp_path / "secret")
    assert len(secret) == 64 and (tmp_path / "secret").stat().st_mode & 0o777 == 0o600
    assert submit.make_secret(tmp_path / "secret") == secret
    assert all(secret not in text for text in submission_of(shape).files.values())


@pytest.mark.parametrize(
    ("launcher", "words", "message"),
    [
        ("slurm", TPU, "TPUs are scheduled by gcloud or gke"),
        ("gcloud", CLOUD, "launch.zone is not given"),
        ("gcloud", [*SHAPES["gcloud-gpu"], "launch.image=cos"], "launch.image=cos.*PROJECT/FAMILY"),
        (
            "gcloud",
            [*SHAPES["gcloud-tpu"], "launch.machine=v9"],
            "launch.machine=v9 is no TPU family.*v5litepod",
        ),
        ("gcloud", [*SHAPES["gcloud-gpu"], "launch.volume=null"], "launch.volume is not given"),
        ("gke", CLOUD, "launch.image is not given"),
        ("gke", [*SHAPES["gke-gpu"], "launch.setup=module load x"], "launch.setup is for slurm and gcloud"),
        ("gke", [*SHAPES["gke-tpu"], "launch.machine=tpu-v5p-slice", "launch.accelerator=gpu"], None),
        (
            "gke",
            [*SHAPES["gke-tpu"], "launch.machine=tpu-v9"],
            "launch.machine=tpu-v9 with a slice of 8 chips",
        ),
    ],
)
def test_what_a_launcher_cannot_start_is_refused(launcher, words, message):
    if message is None:
        assert submit.prepare(launcher, submit.read(words)).program == "kubectl"
        return
    with pytest.raises(LaunchError, match=message):
        submit.prepare(launcher, submit.read(words))


def test_a_folder_that_exists_is_gone_on_with_and_changes_no_past(tmp_path):
    folder = tmp_path / "run"
    words = ["configs/quickstart.yaml", f"run.dir={folder}", "launch.machine_devices=1"]
    fresh = submit.read(words)
    assert not fresh.goes_on
    submit.write(fresh, submit.prepare("slurm", fresh))
    with pytest.raises(LaunchError, match=r"exists; .*name the folder in place of the config"):
        submit.read(words)
    again = submit.read([str(folder), "run.steps=7", "launch.hours=1"])
    assert again.goes_on and again.overrides == {"run.steps": "7"}
    script = submit.prepare("slurm", again).files["run.sh"]
    assert script.count("run.steps=7") == 4 and "#SBATCH --time=60" in script
    before = (folder / "config.yaml").read_text()
    submit.write(again, submit.prepare("slurm", again))
    assert (folder / "config.yaml").read_text() == before
    with pytest.raises(
        LaunchError, match=r"run.seed=3: a run that goes on takes only keys that change no past"
    ):
        submit.read([str(folder), "run.seed=3"])


def test_a_run_whose_weights_stay_in_one_process_is_refused():
    with pytest.raises(LaunchError, match=r"weights.backend=memory: one process's memory reaches no other"):
        submit.read(["configs/quickstart.yaml", "weights.backend=memory"])


def test_a_missing_program_is_named_before_anything_is_written(tmp_path, monkeypatch):
    launch = submit.read(["configs/quickstart.yaml", f"run.dir={tmp_path / 'run'}"])
    submission = submit.prepare("slurm", launch)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match=r"there is no sbatch on this machine.*--dry-run"):
        submit.submit(launch, submission)
    assert not launch.folder.exists()


def test_words_are_quoted_unless_the_shell_is_to_read_them():
    assert [quoted(word) for word in ("a b", "x$y", Expanded("$x/y"), "plain")] == [
        "'a b'",
        "'x$y'",
        '"$x/y"',
        "plain",
    ]
    long = command(["word" * 10] * 4)
    assert [len(line) for line in long.split("\n")] == [83, 85]


def test_golden_files_name_no_folder_of_this_machine():
    assert not any(str(Path.cwd()) in path.read_text() for path in GOLDEN.glob("*/*"))
