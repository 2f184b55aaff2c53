"""What each launcher submits: files of launchers/, with sizes, places and settings from the config."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from areal_jax.cli.main import app
from areal_jax.cluster import launched
from areal_jax.cluster.launched import make_secret, read
from areal_jax.cluster.node_agent import describe, plan_of
from areal_jax.cluster.placement import LaunchError
from areal_jax.cluster.rendezvous import Place
from areal_jax.cluster.submission import launcher_file, prepare, submit
from tests.cluster.launch.jobset import JobSet
from tests.cluster.launch.shapes import SHAPES, TPU, submission_of
from tests.hangs import HANG_S
from tests.programs import require

LAUNCHERS = Path(__file__).parents[3] / "launchers"


def test_shellcheck_finds_nothing_in_any_script_and_slurms_are_short():
    require("shellcheck")
    scripts = sorted(map(str, [*LAUNCHERS.glob("*.sh"), *LAUNCHERS.glob("*.sbatch")]))
    assert len(scripts) == 7
    done = subprocess.run(
        ["shellcheck", "--external-sources", *scripts],
        cwd=LAUNCHERS.parent,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert all(len(path.read_text().splitlines()) <= 60 for path in LAUNCHERS.glob("*.sbatch"))


# --- Slurm --------------------------------------------------------------------------------------------------


def sbatch_of(shape: str, options: list[str] | None = None) -> tuple[list[list[str]], str, list[str]]:
    """Options of each component, the script's name and its arguments."""
    submission = submission_of(shape, options=options)
    ((program, *rest),) = submission.commands
    assert program == submission.program == "sbatch"
    at = next(number for number, word in enumerate(rest) if word.endswith(".sbatch"))
    assert Path(rest[at]).is_file()
    components: list[list[str]] = [[]]
    for word in rest[:at]:
        components.append([]) if word == ":" else components[-1].append(word)
    return components, Path(rest[at]).name, rest[at + 1 :]


def test_machines_of_one_size_are_one_plain_job():
    ((*_, nodes, exclusive, memory, gpus, time),), script, arguments = sbatch_of("slurm-one-machine")
    assert script == "slurm.sbatch"
    assert [time, nodes, exclusive, memory] == ["--time=12:00:00", "--nodes=1", "--exclusive", "--mem=0"]
    assert gpus == "--gpus-per-node=6"  # 4 train, 2 hosts of one each
    assert arguments == ["/shared/runs/qwen/launch/config.yaml", "run.dir=/shared/runs/qwen"]


def test_trainer_and_hosts_of_different_sizes_are_two_components():
    (trainer, hosts), script, _ = sbatch_of("slurm-two-machines")
    assert script == "slurm_split.sbatch"
    assert {"--nodes=1", "--gpus-per-node=8"} <= set(trainer)
    assert {"--nodes=1", "--gpus-per-node=3"} <= set(hosts)  # two hosts, and that of evaluation
    assert submission_of("slurm-two-machines").env == {}


def test_trainers_over_two_nodes_and_hosts_of_whole_machines_are_four_nodes():
    (all_,), script, _ = sbatch_of("slurm-two-trainers")
    assert script == "slurm.sbatch"
    assert {"--nodes=4", "--gpus-per-node=8", "--cpus-per-task=64"} <= set(all_)
    assert "--exclusive" not in all_


def test_options_are_passed_on_and_a_colon_parts_those_of_the_hosts():
    (all_,), script, _ = sbatch_of("slurm-container")
    assert script == "slurm.sbatch" and all_[-2:] == ["--partition=gpu", "--account=my lab"]
    assert {"--nodes=2", "--gpus-per-node=8", "--exclusive", "--mem=0"} <= set(all_)
    parted = ["--partition=h100", "--cpus-per-task=8", ":", "--partition=l40"]
    for shape in ("slurm-two-machines", "slurm-container"):  # also where both components have one size
        (trainer, hosts), script, _ = sbatch_of(shape, parted)
        assert script == "slurm_split.sbatch"
        assert trainer[-2:] == ["--partition=h100", "--cpus-per-task=8"] and hosts[-1] == "--partition=l40"
        assert "--exclusive" not in trainer and "--exclusive" in hosts


def test_the_command_line_parts_words_of_the_config_from_options_of_the_scheduler():
    words = ["launch", "slurm", *SHAPES["slurm-one-machine"].words, "--dry-run", "--json"]
    given = ["--partition=h100", "-N", "1", "--comment=a=b"]
    (submitted,) = json.loads(CliRunner().invoke(app, [*words, "--", *given]).stdout)["commands"]
    at = next(number for number, word in enumerate(submitted) if word.endswith("slurm.sbatch"))
    assert submitted[at - 4 : at] == given
    refused = CliRunner().invoke(
        app, ["launch", "local", "configs/quickstart.yaml", "--", "--partition=h100"]
    )
    assert "--partition=h100: a run on this machine needs no scheduler" in refused.output


def test_a_container_mounts_the_runs_folder_wherever_it_is():
    own = "/shared/runs/qwen:/shared/runs/qwen"
    assert submission_of("slurm-container").env == {"AREAL_JAX_MOUNTS": own}
    others = submission_of("slurm-container", AREAL_JAX_MOUNTS="/data:/data:ro")
    assert others.env == {"AREAL_JAX_MOUNTS": f"{own},/data:/data:ro"}
    # What is below the folder from which the script is submitted is mounted with it.
    assert submission_of("slurm-container", "run.dir=runs/qwen").env == {}


@pytest.mark.parametrize(
    ("more", "mounts"), [({}, "{0}:{0}"), ({"AREAL_JAX_MOUNTS": "/a:/b,/c:/c:ro"}, "{0}:{0},/a:/b,/c:/c:ro")]
)
@pytest.mark.parametrize("script", ["slurm.sbatch", "slurm_split.sbatch"])
def test_a_script_starts_its_agents_in_a_container_with_these_mounts(script, more, mounts, tmp_path):
    (tmp_path / "srun").write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    (tmp_path / "srun").chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    done = subprocess.run(
        ["bash", str(LAUNCHERS / script), "my.yaml", "run.steps=3"],
        cwd=tmp_path,
        env=env | {"AREAL_JAX_IMAGE": "/shared/image.sqsh"} | more,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=True,
    )
    words = done.stdout.splitlines()
    assert {"--container-image=/shared/image.sqsh", f"--container-mounts={mounts.format(tmp_path)}"} <= set(
        words
    )
    assert words[-5:] == ["areal-jax", "role", "node", "--config=my.yaml", "run.steps=3"]


@pytest.mark.parametrize("script", ["slurm.sbatch", "slurm_split.sbatch"])
def test_a_job_that_is_cancelled_says_how_it_goes_on_and_nothing_else(script, tmp_path):
    """scancel ends the job's id at once, so that the script's own call of it fails."""
    programs = {
        "srun": 'trap "exit 143" TERM; touch started; while :; do sleep 0.05; done',
        "scancel": 'echo "Invalid job id specified" >&2; kill -TERM "$(cat srun.pid)"; exit 1',
    }
    for name, body in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\necho $$ >{name}.pid\n{body}\n")
        (tmp_path / name).chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    job = subprocess.Popen(
        ["bash", str(LAUNCHERS / script), "my.yaml"],
        cwd=tmp_path,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    end_s = time.monotonic() + HANG_S
    while not (tmp_path / "started").exists():
        assert time.monotonic() < end_s
        time.sleep(0.05)
    job.terminate()
    said, _ = job.communicate(timeout=HANG_S)
    assert said == "job 7 was cancelled; submit the same command again to continue the run\n"
    assert job.returncode == 143


def test_a_script_and_its_launch_agree_on_the_number_of_machines(monkeypatch):
    """The agents of a job compute the same placement as the launch did, and refuse another size."""
    for shape in (shape for shape in SHAPES if shape.startswith("slurm")):
        launch = read(SHAPES[shape].words)
        components, _, _ = sbatch_of(shape)
        nodes = [word for words in components for word in words if word.startswith("--nodes=")]
        count = sum(int(word.removeprefix("--nodes=")) for word in nodes)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
        for rank in range(count):
            assert plan_of(launch.config, Place(rank, count, "")).on(rank)
        with pytest.raises(LaunchError, match=rf"needs {count} machines"):
            plan_of(launch.config, Place(0, count + 2, ""))


# --- GKE ----------------------------------------------------------------------------------------------------


def jobset_of(shape: str, *words: str) -> JobSet:
    ((_, text),) = submission_of(shape, *words).files.items()
    return JobSet.model_validate(yaml.safe_load(text))


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape.startswith("gke")])
def test_manifests_have_the_structure_of_the_jobset_api(shape):
    jobset = jobset_of(shape)
    assert jobset.metadata.name == "qwen2-5-1-5b-gsm8k"
    for job in jobset.spec.replicatedJobs:
        (container,) = job.template.spec.template.spec.containers
        assert container.command[:3] == ["areal-jax", "role", "node"]
        assert {"--config=/etc/areal-jax/config.yaml", "--run=/mnt/areal-jax/runs/qwen"} <= set(
            container.command
        )
        mounted = {mount.name for mount in container.volumeMounts}
        assert mounted == {volume.name for volume in job.template.spec.template.spec.volumes}


def test_a_pod_is_a_machine_with_all_its_devices():
    jobset = jobset_of("gke-gpu")
    (job,) = jobset.spec.replicatedJobs
    spec, pod = job.template.spec, job.template.spec.template.spec
    assert (spec.parallelism, spec.completions, spec.completionMode) == (2, 2, "Indexed")
    assert pod.nodeSelector == {"cloud.google.com/gke-accelerator": "nvidia-h100-80gb"}
    assert pod.containers[0].resources.limits == {"nvidia.com/gpu": "8"}
    assert pod.containers[0].resources.requests == {"cpu": "16"}
    assert "--machines=2" in pod.containers[0].command
    assert (spec.backoffLimit, spec.activeDeadlineSeconds) == (3, 12 * 3600)


def test_tpus_are_one_slice_that_trains_and_others_that_generate():
    jobset = jobset_of("gke-tpu")
    jobs = {job.name: job.template for job in jobset.spec.replicatedJobs}
    assert {name: job.spec.parallelism for name, job in jobs.items()} == {"trainer": 2, "hosts": 2}
    pods = {name: job.spec.template.spec for name, job in jobs.items()}
    for name, topology in {"trainer": "2x4", "hosts": "2x2"}.items():
        assert pods[name].nodeSelector == {
            "cloud.google.com/gke-tpu-accelerator": "tpu-v5-lite-podslice",
            "cloud.google.com/gke-tpu-topology": topology,
        }
        assert pods[name].containers[0].resources.limits == {"google.com/tpu": "4"}
        assert "--machines=4" in pods[name].containers[0].command
    assert "--first-rank=2" in pods["hosts"].containers[0].command
    assert not any(word.startswith("--first-rank") for word in pods["trainer"].containers[0].command)
    assert jobs["trainer"].metadata and "exclusive-topology" in next(
        iter(jobs["trainer"].metadata.annotations)
    )


# --- all ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_no_secret_is_in_what_is_printed(shape, tmp_path):
    secret = make_secret(tmp_path / "secret")
    assert len(secret) == 64 and (tmp_path / "secret").stat().st_mode & 0o777 == 0o600
    assert make_secret(tmp_path / "secret") == secret
    assert secret not in submission_of(shape).text()


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if not shape.startswith("slurm")])
def test_a_missing_setting_of_a_launcher_is_named(shape):
    optional = ("SETUP", "MINUTES", "CPUS", "LIMIT_SECONDS")
    for name in SHAPES[shape].environment.keys() - set(optional):
        with pytest.raises(LaunchError, match=f"the environment variable {name} is not set"):
            submission_of(shape, **{name: ""})
    for name in optional:
        submission_of(shape, **{name: ""})


@pytest.mark.parametrize(
    ("shape", "words", "environment", "message"),
    [
        ("slurm-one-machine", TPU, {}, "Slurm does not schedule TPUs; use `areal-jax launch gcloud`"),
        ("gcloud-gpu", [], {"IMAGE": "cos"}, "IMAGE=cos.*PROJECT/FAMILY"),
        ("gcloud-tpu", [], {"MACHINE": "v9"}, "MACHINE=v9 is not a TPU family.*v5litepod"),
        (
            "gcloud-gpu",
            ["run.dir=/shared/x"],
            {},
            "is not on the volume that all machines mount at /mnt/areal",
        ),
        ("gcloud-gpu", ["run.dir=../not-on-the-volume"], {}, "is not on the volume"),
        ("gke-gpu", ["launch.accelerator=cpu"], {}, "launch.accelerator=cpu: GKE finds nodes by"),
        ("gke-tpu", [], {"ACCELERATOR": "tpu-v9"}, "ACCELERATOR=tpu-v9 with 8 chips"),
    ],
)
def test_what_a_launcher_cannot_start_is_refused(shape, words, environment, message):
    with pytest.raises(LaunchError, match=message):
        submission_of(shape, *words, **environment)


def test_options_for_hosts_are_refused_where_they_share_the_trainers_machine():
    with pytest.raises(LaunchError, match=r"':' among the options: .*one machine; leave ':'"):
        submission_of("slurm-one-machine", options=["--partition=h100", ":", "--partition=l40"])


def test_settings_without_a_default_of_their_own_get_one():
    (container,) = jobset_of("gke-tpu").spec.replicatedJobs[0].template.spec.template.spec.containers
    assert container.resources.requests == {"cpu": "1"}
    assert jobset_of("gke-tpu").spec.replicatedJobs[0].template.spec.activeDeadlineSeconds == 24 * 3600
    assert "MINUTES" not in submission_of("gcloud-gpu", MINUTES="").env  # the script's own


def test_a_folder_that_exists_is_resumed_and_takes_no_key_that_changes_the_past(tmp_path):
    folder = tmp_path / "run"
    words = ["configs/quickstart.yaml", f"run.dir={folder}", "launch.machine_devices=1"]
    fresh = read(words)
    assert not fresh.is_resumed
    launched.write(fresh)
    before = (folder / "config.yaml").read_text()
    assert read(words).is_resumed  # the same words again
    again = read([str(folder), "run.steps=7", "launch.machine_devices=2"])
    assert again.is_resumed and again.folder == folder
    assert "--gpus-per-node=2" in prepare("slurm", again, [], {}).commands[0]
    launched.write(again)
    assert (folder / "config.yaml").read_text() == before
    assert read([str(folder / "launch" / "config.yaml"), f"run.dir={folder}"]).config.run.steps == 7
    for changed in ([str(folder), "run.seed=3"], [*words, "run.seed=3"]):
        with pytest.raises(
            LaunchError, match=r"was started without run.seed=3, which can only be set on a new run"
        ):
            read(changed)


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "run").mkdir()
    assert not read(["configs/quickstart.yaml", f"run.dir={tmp_path / 'run'}"]).is_resumed
    (tmp_path / "run" / "thesis.tex").touch()
    with pytest.raises(
        LaunchError, match=r"contains files, but no config.yaml, so it is not the folder of a run"
    ):
        read(["configs/quickstart.yaml", f"run.dir={tmp_path / 'run'}"])


def test_a_run_whose_weights_stay_in_one_process_is_refused():
    with pytest.raises(LaunchError, match=r"weights.backend=memory works within one process only"):
        read(["configs/quickstart.yaml", "weights.backend=memory"])


def test_a_missing_program_is_named_before_anything_is_written(tmp_path, monkeypatch):
    launch = read(["configs/quickstart.yaml", f"run.dir={tmp_path / 'run'}"])
    submission = prepare("slurm", launch, [], {})
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match=r"there is no sbatch on this machine.*--dry-run"):
        submit(launch, submission)
    assert not launch.folder.exists()


def test_a_dry_run_of_local_prints_the_command_of_every_process(tmp_path):
    launch = read(["configs/quickstart.yaml", f"run.dir={tmp_path / 'a b'}", "launch.accelerator=cpu"])
    first, *commands = describe(plan_of(launch.config, Place(0, 1, "")), launch).splitlines()
    assert first.startswith("redis-server")
    assert [line.split("areal-jax role ")[1].split()[0] for line in commands] == [
        "controller", "reward", "trainer", "generate",
    ]  # fmt: skip
    assert all(f"'--run={tmp_path}/a b'" in line for line in commands)


def test_launchers_lie_in_the_package_and_name_no_folder_of_this_machine():
    for path in LAUNCHERS.rglob("*"):
        if path.is_file():
            assert launcher_file(str(path.relative_to(LAUNCHERS))).read_text() == path.read_text()
            assert str(Path.cwd()) not in path.read_text()
