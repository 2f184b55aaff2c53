"""Tokens that repeat a prefix: sums over a run and its parts, in `inspect --tree` and in the report."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from areal_jax.cli.main import app
from areal_jax.report.report import ReportData, render
from areal_jax.report.sharing import Sharing, sharing, sharing_by_part
from tests.report.test_report import row


def rows(steps: int) -> list[dict]:
    return [row(step, sequence_tokens=100 * (step + 1), tree_tokens=25 * (step + 1)) for step in range(steps)]


def test_a_runs_figures_are_sums_over_its_steps():
    found = sharing(rows(4))
    assert found == Sharing(0, 3, 1000, 250)
    assert (found.compression, found.repeated_share) == (4.0, 0.75)


def test_rows_of_an_older_version_are_left_out():
    assert sharing([row(0), *rows(3)[1:]]) == Sharing(1, 2, 500, 125)
    assert sharing([row(0), row(1)]) is None
    assert sharing_by_part([row(0)]) == sharing_by_part([]) == []


@pytest.mark.parametrize(("steps", "parts"), [(1, 1), (10, 10), (11, 6), (25, 9)])
def test_the_parts_of_a_run_cover_it(steps, parts):
    found = sharing_by_part(rows(steps))
    assert len(found) == parts
    assert [part.first_step for part in found[1:]] == [part.last_step + 1 for part in found[:-1]]
    assert sum(part.tree_tokens for part in found) == sharing(rows(steps)).tree_tokens


def written(folder, steps: int) -> str:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows(steps)))
    return str(folder)


def test_inspect_prints_the_run_and_its_parts(tmp_path):
    done = CliRunner().invoke(app, ["inspect", written(tmp_path, 20), "--tree"])
    lines = done.stdout.splitlines()
    assert done.exit_code == 0 and len(lines) == 12
    assert lines[-1].split() == ["0", "to", "19", "21,000", "5,250", "4.00", "75.0%"]


def test_inspect_prints_one_json_object(tmp_path):
    done = CliRunner().invoke(app, ["inspect", written(tmp_path, 2), "--tree", "--json"])
    found = json.loads(done.stdout)
    assert (found["sequence_tokens"], found["tree_tokens"], found["compression"]) == (300, 75, 4.0)
    assert [part["first_step"] for part in found["parts"]] == [0, 1]


def test_inspect_names_what_is_missing(tmp_path):
    def fails(*words: str) -> str:
        done = CliRunner().invoke(app, ["inspect", str(tmp_path), *words])
        assert done.exit_code == 1
        return done.stderr

    assert "metrics.jsonl has no step with sequence_tokens and tree_tokens" in fails("--tree")
    assert "given: no sample, no --tree, no --staleness, no --selection" in fails()
    assert "given: 3/1, --tree, no --staleness, no --selection" in fails("3/1", "--tree")
    assert "given: no sample, --tree, --staleness, no --selection" in fails("--staleness", "--tree")
    assert "no --tree, --staleness, --selection" in fails("--staleness", "--selection")


def test_the_report_has_a_tile():
    page = render(ReportData("r", "c", "y", rows=rows(2)))
    assert "<dt>repeated prefixes</dt><dd>75%</dd>" in page
    assert "repeated prefixes" not in render(ReportData("r", "c", "y", rows=[row(0)]))
