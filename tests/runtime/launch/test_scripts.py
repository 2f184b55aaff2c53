"""The scripts of gcloud and gke, run against programs that write down what they are told."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from areal_jax.runtime.launch import submit
from tests.runtime.launch.shapes import SHAPES

TOLD = 'echo "$(basename "$0") $*" >>"$TOLD"\n'

PROGRAMS = {
    # A machine is a folder; ssh runs the command in it. The first describe of each machine finds none.
    "gcloud": """
case "$*" in
*describe*format=*) echo 10.0.0.5 ;;
*describe*) exit 1 ;;
*" ssh "*)
    for word in "$@"; do case $word in --command=*) command=${word#--command=} ;; esac; done
    shift; while [ "$1" != ssh ]; do shift; done
    machine=$MACHINES/$2
    mkdir -p "$machine" && cd "$machine" && HOME=$machine bash -c "$command" ;;
esac
""",
    "sudo": """
case "$1" in
mount | systemctl) ;;
install) mkdir -p "$MACHINES/installed" ;;
systemd-run) printf '%s\\0' "$PWD" "$@" >>"$MACHINES/services"; printf '\\n' >>"$MACHINES/services" ;;
esac
""",
    "mountpoint": "exit 1",
    "mkdir": 'exec /bin/mkdir -p "${@/#\\/mnt/$MACHINES/mnt}"',
    "redis-server": "",
    "kubectl": 'case "$*" in *--dry-run=client*) echo "kind: Secret" ;; *filename=-*) cat >>"$TOLD" ;; esac',
}


@pytest.fixture
def stage(tmp_path, monkeypatch):
    """Programs that only write down; answers what they were told once a submission has run."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, body in PROGRAMS.items():
        (programs / name).write_text(f"#!/bin/bash\n{TOLD}{body}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("TOLD", str(tmp_path / "told"))
    monkeypatch.setenv("MACHINES", str(tmp_path))

    def play(shape: str, *words: str) -> tuple[submit.Launch, str]:
        monkeypatch.chdir(tmp_path)
        launch = submit.read([*SHAPES[shape], f"run.dir={Path('runs') / 'qwen'}", *words])
        submit.submit(launch, submit.prepare(shape.partition("-")[0], launch))
        return launch, (tmp_path / "told").read_text()

    return play


def test_gcloud_makes_machines_and_starts_every_process_on_its_own_without_telling_the_secret(
    stage, tmp_path
):
    launch, told = stage("gcloud-gpu", "run.name=qwen")
    created = [
        line.split()[4] for line in told.splitlines() if line.startswith("gcloud compute instances create")
    ]
    assert created == ["qwen-0", "qwen-1"]
    services = [line.strip("\0").split("\0") for line in (tmp_path / "services").read_text().splitlines()]
    started = {words[2].removeprefix("--unit=areal-jax-"): words for words in services}
    assert {name: Path(words[0]).name for name, words in started.items()} == {
        "redis": "qwen-0", "controller": "qwen-0", "reward-0": "qwen-0", "trainer-0": "qwen-0",
        "generate-0": "qwen-1", "generate-1": "qwen-1",
    }  # fmt: skip
    assert "--property=Restart=on-failure" in started["generate-0"]
    assert "runtime.redis=redis://10.0.0.5:7600/0" in started["generate-1"]
    assert "--coordinator=10.0.0.5:7601" in started["trainer-0"]
    secret = (launch.folder / "launch" / "secret").read_text()
    assert secret not in told and secret not in (tmp_path / "services").read_text()
    for machine in ("qwen-0", "qwen-1"):
        own = tmp_path / machine / "areal-jax" / "qwen"
        assert (own / "secret").stat().st_mode & 0o777 == 0o600
        assert (own / "config.yaml").read_text() == (launch.folder / "config.yaml").read_text()
    assert f"requirepass {secret}" in (tmp_path / "qwen-0" / "areal-jax" / "qwen" / "redis.conf").read_text()


def test_a_service_finds_the_secret_in_its_environment_and_its_words_as_they_were(tmp_path):
    launch = submit.read([*SHAPES["gcloud-tpu"], "launch.setup=export FROM_SETUP=yes"])
    start = tmp_path / "start.sh"
    start.write_text(submit.prepare("gcloud", launch).files["start.sh"])
    (tmp_path / "secret").write_text("0123456789abcdef")
    show = 'echo "$AREAL_JAX_SECRET $FROM_SETUP $1"'
    done = subprocess.run(
        ["bash", str(start), "bash", "-c", show, "x", "a b"],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert done.stdout == "0123456789abcdef yes a b\n"


def test_gke_applies_a_secret_then_the_manifests_and_a_run_that_goes_on_replaces_its_jobset(stage, tmp_path):
    volume = "run.name=qwen"
    launch, told = stage("gke-tpu", volume)
    jobset = launch.folder / "launch" / "jobset.yaml"
    secret = launch.folder / "launch" / "secret"
    *piped, last = [line for line in told.splitlines() if line.startswith("kubectl")]
    assert sorted(piped) == [  # at the same time
        "kubectl --namespace=rl apply --filename=-",
        f"kubectl --namespace=rl create secret generic qwen --from-file=secret={secret} "
        "--dry-run=client --output=yaml",
    ]
    assert last == f"kubectl --namespace=rl apply --filename={jobset}" and "kind: Secret" in told
    assert secret.read_text() not in told + jobset.read_text()
    again = submit.read([str(launch.folder)])
    script = submit.prepare("gke", again).files["submit.sh"]
    assert "kubectl --namespace=rl delete jobset qwen --ignore-not-found --wait" in script
