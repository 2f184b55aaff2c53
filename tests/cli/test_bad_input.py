"""What a user gets wrong: one clear message that names the remedy, exit code 1, nothing lost."""

from __future__ import annotations

import json
import socket
import sqlite3
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

from areal_jax.cli.main import app
from areal_jax.trajectories.sqlite import SqliteQueue
from tests.small_run import RECIPE, WORDS


def fails(*words: str) -> str:
    """The message on stderr of a call that has to fail in the clear way."""
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 1, result.output
    assert isinstance(result.exception, SystemExit), result.exception
    assert "Traceback" not in result.output and result.stderr.startswith("error: ")
    return result.stderr


def refused(*words: str) -> str:
    return fails("run", str(RECIPE), *WORDS, *words, "--dry-run")


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("trainer.learning_rat=1", "did you mean trainer.learning_rate?"),
        ("control.max_stalenes=1", "did you mean control.max_staleness?"),
        ("learning_rate=1", "did you mean trainer.learning_rate?"),
        ("trainer.batch_size=many", "trainer.batch_size: Input should be a valid integer"),
        ("control.strategy=asink", "Input should be 'sync', 'one_step', 'interruptible', 'keep' or 'pinned'"),
        ("control.max_staleness=-1", "give a whole number of at least 0, or unbounded (got -1)"),
        (
            "control.max_staleness=unbounded",
            "unbounded needs a bound on the groups in flight; set control.max_",
        ),
        ("algorithm.preset=grppo", "did you mean grpo?"),
        ("algorithm.preset=gpro", "did you mean grpo?"),
        ("algorithm.minibatches=3", "algorithm.minibatches=3 does not divide trainer.batch_size=4"),
        ("generation.max_tokens=24", "leaves no room for a prompt in generation.length=24"),
        ("trainer.length=16", "trainer.length=16 is shorter than generation.length=24"),
        ("generation.page_tokens=7", "generation.page_tokens=7 must divide"),
        ("generation.top_p=0.9", "Set generation.top_k=256 generation.support_size=256"),
        ("algorithm.loss=ppo_clop", "did you mean ppo_clip?"),
        ("algorithm.loss_settings.lo=0.1", "did you mean algorithm.loss_settings.low?"),
        ("algorithm.loss=nowhere.losses:mine", "module nowhere.losses was not found"),
        ("tasks=countdwn", "did you mean countdown?"),
        ("tasks.countdown.lettrs=4", "did you mean tasks.countdown.letters?"),
        ("model.shape=huge", "choose one of: tiny, 5m"),
        ("model.overrides.widht=4", "did you mean model.overrides.width?"),
        ("model.overrides.kv_heads=3", "kv_heads=3 does not divide heads=2"),
        ("nowhere.yaml", "no config file nowhere.yaml"),
        ("configs/quikstart.yaml", "did you mean configs/quickstart.yaml?"),
    ],
)
def test_a_config_that_cannot_run_is_refused_before_anything_starts(word, says):
    assert says in refused(word)


def test_sync_contradicts_staleness():
    assert "contradicts control.strategy=sync" in refused("control.strategy=sync", "control.max_staleness=1")


def test_dr_grpo_with_std_is_refused():
    message = refused("algorithm.preset=dr_grpo", "algorithm.advantage_settings.scale=group")
    assert "Dr.GRPO divides by no standard deviation" in message


def test_rows_that_do_not_divide_over_the_mesh():
    assert "trainer.rows=7" in refused("trainer.rows=7", "trainer.mesh.data=2", "runtime.placement=shared")


def test_a_mesh_larger_than_the_devices():
    message = refused("trainer.mesh.fsdp=64", "trainer.rows=64", "runtime.placement=shared")
    assert "mesh fsdp=64 needs 64 devices, but only" in message


def test_a_prompt_longer_than_the_context(tmp_path):
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"prompt": "why " * 20, "answer": "42"}) + "\n")
    message = refused("tasks=jsonl", f"tasks.jsonl.path={path}")
    assert "has 81 tokens" in message and "generation.length=24" in message and "task jsonl" in message


def test_a_jsonl_line_that_is_not_json(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "a", "answer": "b"}\n{"prompt": oops}\n')
    message = refused("tasks=jsonl", f"tasks.jsonl.path={path}")
    assert "bad.jsonl" in message and "line 2" in message


def test_a_yaml_that_is_none(tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text("run: [1, 2\n")
    assert "is not YAML" in fails("run", str(path))


def test_a_yaml_of_another_encoding(tmp_path):
    (tmp_path / "config.yaml").write_bytes("run: {name: Prüfung}".encode("latin-1"))
    assert "config.yaml is not text in UTF-8" in fails("run", str(tmp_path / "config.yaml"))


def test_a_path_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    below = str(tmp_path / "file" / "run")
    for words in (["run"], ["launch", "local"]):
        assert f"{below}/" in (said := fails(*words, str(RECIPE), *WORDS, f"run.dir={below}"))
        assert "Not a directory" in said


def test_folders_that_are_no_runs(tmp_path):
    assert "is not a run's folder" in fails("resume", str(tmp_path))
    assert str(tmp_path) in fails("audit", str(tmp_path))
    for verb, *words in (["report"], ["inspect", "1/2"], ["replay"], ["bundle", "--step=1"]):
        assert f"{tmp_path} is not a run's folder" in fails(verb, str(tmp_path), *words)


def test_a_run_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    says = fails("run", str(RECIPE), *WORDS, f"run.dir={tmp_path}/file/run")
    assert f"the run's folder {tmp_path}/file/run cannot be made (Not a directory" in says


def test_a_taken_port_is_named_before_the_model_is_loaded(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        for option in ("--port", "--http-port"):
            # No model loads from the folder; the port is what is named.
            said = fails("serve", str(tmp_path), option, str(number))
            assert f"{option} {number} on 127.0.0.1 cannot be bound" in said


def test_a_number_in_a_file_may_have_an_exponent_without_a_point(tmp_path):
    path = tmp_path / "more.yaml"
    path.write_text("algorithm: {loss_settings: {high: 3e-1}}\ntrainer: {learning_rate: 3E-4}\n")
    done = CliRunner().invoke(app, ["run", str(RECIPE), *WORDS, str(path), "--dry-run"])
    assert "learning_rate: 0.0003" in done.output and "high: 0.3" in done.output


def test_the_version_is_printed():
    done = CliRunner().invoke(app, ["--version"])
    assert (done.exit_code, done.output) == (0, f"areal-jax {version('areal-jax')}\n")


def test_a_journal_of_another_format_is_named(tmp_path):
    (tmp_path / "config.yaml").write_text("run: {name: x}\ntasks: countdown\n")
    SqliteQueue.create(tmp_path / "journal.sqlite", {}).close()
    with sqlite3.connect(tmp_path / "journal.sqlite") as db:
        db.execute("PRAGMA user_version = 99")
    assert "99" in fails("audit", str(tmp_path))


def test_explaining_a_key_that_is_none():
    assert "did you mean control.max_staleness?" in fails("config", "control.max_stalness")


def test_a_bench_or_setting_that_is_none():
    from areal_jax.lab.bench.registry import bench
    from areal_jax.types import ArealError

    with pytest.raises(ArealError, match="choose one of: decode, prefill, sample, update"):
        bench("decod", {})
    with pytest.raises(ArealError, match=r"did you mean bench decode\.slots\?"):
        bench("decode", {"slot": 3})


def test_every_leaf_of_the_config_is_explained():
    result = CliRunner().invoke(app, ["config", "--json"])
    leaves = json.loads(result.stdout)
    assert leaves["control.max_staleness"]["type"] == "int | Literal['unbounded'] | None"
    assert all(leaf["doc"] for name, leaf in leaves.items()), [
        n for n, leaf in leaves.items() if not leaf["doc"]
    ]


def test_a_dry_run_writes_nothing_and_adds_up(tmp_path):
    done = CliRunner().invoke(app, ["run", str(RECIPE), f"run.dir={tmp_path}/x", "--dry-run", "--json"])
    plan = json.loads(done.stdout)
    assert not Path(tmp_path / "x").exists()
    sizes = {(row["owner"], row["content"]): row["bytes"] for row in plan["memory"]}
    assert sizes[("trainer", "Adam moments, float32")] == 8 * plan["parameters"]
    assert plan["config"]["control"]["max_staleness"] == 2
