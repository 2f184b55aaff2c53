"""The scripts of gcloud, and what gke applies, run against programs that write down how they were called."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from areal_jax.cluster.launched import Launch, read
from areal_jax.cluster.placement import LaunchError
from areal_jax.cluster.submission import prepare, submit
from tests.cluster.launch.shapes import SHAPES
from tests.hangs import HANG_S

CALLED = 'echo "$(basename "$0") $*" >>"$CALLS"\n'

PROGRAMS = {
    # A machine is a folder; ssh runs the command in it. The first describe of each machine finds none.
    "gcloud": """
case "$*" in
*describe*format=*) echo 10.0.0.5 ;;
*describe*) exit 1 ;;
*" create "*)
    # Machines are made side by side: one alone would wait in vain for the other.
    case "$*" in *"${FAILING:-no machine}"*) echo "no capacity" >&2; exit 1 ;; esac
    touch "$MACHINE_FOLDERS/making-$$"
    for try in $(seq 600); do
        [ "$(ls "$MACHINE_FOLDERS" | grep -c making-)" -ge 2 ] && break; sleep 0.1
        [ "$try" -lt 600 ] || exit 1
    done ;;
*" ssh "*)
    for word in "$@"; do case $word in --command=*) command=${word#--command=} ;; esac; done
    shift; while [ "$1" != ssh ]; do shift; done
    machine=$MACHINE_FOLDERS/$2; case $3 in --worker=*) machine=$machine-${3#--worker=} ;; esac
    mkdir -p "$machine" && cd "$machine" && HOME=$machine bash -c "$command" ;;
esac
""",
    "sudo": """
case "$1" in
mount | systemctl | install) ;;
systemd-run) printf '%s\\0' "$PWD" "$@" $'\\036' >>"$MACHINE_FOLDERS/services" ;;
esac
""",
    "mountpoint": "exit 1",
    "mkdir": 'exec /bin/mkdir -p "${@/#\\/mnt/$MACHINE_FOLDERS/mnt}"',
    "install": '/bin/mkdir -p "$MACHINE_FOLDERS/installed"; cp "$3" "$MACHINE_FOLDERS/installed/"',
    "kubectl": "",
}


@pytest.fixture
def stage(tmp_path, monkeypatch):
    """Programs that only write down how they were called; that, once a submission has run."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, body in PROGRAMS.items():
        (programs / name).write_text(f"#!/bin/bash\n{CALLED}{body}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("MACHINE_FOLDERS", str(tmp_path))

    def play(name: str, *words: str, options: Sequence[str] = (), **variables: str) -> tuple[Launch, str]:
        monkeypatch.chdir(tmp_path)
        shape = SHAPES[name]
        launch = read([*shape.words, f"run.dir={Path('runs') / 'qwen'}", *words])
        own = (*shape.options, *options), shape.environment | variables
        submit(launch, prepare(name.partition("-")[0], launch, *own))
        return launch, (tmp_path / "calls").read_text()

    return play


def services(tmp_path: Path) -> list[list[str]]:
    """Folder and words of each agent that was started."""
    text = (tmp_path / "services").read_text()
    return [record.strip("\0").split("\0") for record in text.split("\036") if record.strip("\0")]


def test_gcloud_makes_machines_and_starts_an_agent_on_each(stage, tmp_path):
    launch, called = stage("gcloud-gpu", "run.name=qwen", options=["--tags=a b"])
    created = [line for line in called.splitlines() if line.startswith("gcloud compute instances create")]
    assert sorted(line.split()[4] for line in created) == ["qwen-0", "qwen-1"]
    assert all(
        "--max-run-duration=720m" in line and line.endswith("--tags=a b --zone=us-central1-a")
        for line in created
    )
    started = services(tmp_path)
    assert [Path(words[0]).name for words in started] == ["qwen-0", "qwen-1"]
    common = ["--run=/mnt/areal-jax/runs/qwen", "--machines=2"]
    for rank, words in enumerate(started):
        assert "--property=Restart=on-failure" in words and {*common, f"--rank={rank}"} <= set(words)
        config = tmp_path / f"qwen-{rank}" / "areal-jax" / "qwen" / "config.yaml"
        assert f"--config={config}" in words
        assert config.read_text() == launch.effective.read_text()
    assert "--address=10.0.0.5" in started[0] and "--address=10.0.0.5" not in started[1]


def test_machines_that_cannot_be_created_are_named_with_what_to_do(stage, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("FAILING", "create qwen-1")
    with pytest.raises(LaunchError, match="failed with status 1"):
        stage("gcloud-gpu", "run.name=qwen", "trainer.mesh.data=4", "runtime.trainer_processes=4")
    said = capfd.readouterr().err
    assert "could not be created, for the reasons above: qwen-1. The others" in said
    names = [line.split()[4] for line in (tmp_path / "calls").read_text().splitlines() if " create " in line]
    assert sorted(names) == [f"qwen-{rank}" for rank in range(len(names))] and len(names) > 2
    assert f"delete all that exist: gcloud compute instances delete {' '.join(sorted(names))} --zone=" in said
    assert not (tmp_path / "services").exists()


def test_the_agents_command_runs_after_the_setup_with_its_words_as_they_were(stage, tmp_path, monkeypatch):
    stage("gcloud-gpu", "run.name=qwen", SETUP="export FROM_SETUP='a  b'")
    first = services(tmp_path)[0]
    command = first[first.index("bash") :]
    (tmp_path / "bin" / "areal-jax").write_text('#!/bin/bash\nprintf "%s|" "$FROM_SETUP" "$@"')
    (tmp_path / "bin" / "areal-jax").chmod(0o755)
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=True)
    assert done.stdout.split("|")[:3] == ["a  b", "role", "node"]


def test_the_password_of_an_own_redis_reaches_the_head_by_file_alone(stage, tmp_path, monkeypatch):
    password = "a-password-of-their-own-redis"
    monkeypatch.setenv("AREAL_JAX_SECRET", password)
    _, called = stage("gcloud-gpu", "run.name=qwen", "runtime.redis=rediss://db:6379/0")
    assert (tmp_path / "installed" / "secret").read_text() == password
    for machine in ("qwen-0", "qwen-1"):
        assert (tmp_path / machine / "areal-jax" / "qwen" / "secret").stat().st_mode & 0o777 == 0o600
    assert password not in called and password not in (tmp_path / "services").read_text()


def test_tpu_slices_are_one_that_trains_and_one_for_each_host(stage, tmp_path):
    _, called = stage("gcloud-tpu", "run.name=qwen")
    created = [line.split()[5:7] for line in called.splitlines() if "tpu-vm create" in line]
    assert sorted(created) == [
        ["qwen-hosts-0", "--accelerator-type=v5litepod-4"],
        ["qwen-hosts-1", "--accelerator-type=v5litepod-4"],
        ["qwen-trainer", "--accelerator-type=v5litepod-8"],
    ]
    started = services(tmp_path)
    places = {Path(words[0]).name: [word for word in words if word.startswith("--rank")] for words in started}
    assert places == {
        "qwen-trainer-0": ["--rank=0"],
        "qwen-trainer-1": ["--rank=1"],
        "qwen-hosts-0-0": ["--rank=2"],
        "qwen-hosts-1-0": ["--rank=3"],
    }
    assert all("--machines=4" in words for words in started)


def test_gke_replaces_the_jobset_and_its_config_by_those_of_this_launch(stage):
    launch, called = stage("gke-tpu", "run.name=qwen")
    assert [line for line in called.splitlines() if line.startswith("kubectl")] == [
        "kubectl --namespace=rl delete jobset,configmap qwen --ignore-not-found --wait",
        f"kubectl --namespace=rl create configmap qwen --from-file=config.yaml={launch.effective}",
        f"kubectl --namespace=rl apply --filename={launch.folder}/launch/tpu.yaml",
    ]
    assert (launch.folder / "launch" / "secret").read_text() not in called
