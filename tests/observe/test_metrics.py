"""metrics.jsonl: what a row must hold, what a crash may cost, what a resume may rewrite."""

from __future__ import annotations

import json
import struct
import sys

import numpy as np
import pytest

from areal_jax.observe.metrics import REQUIRED, MetricsWriter, read_rows, rewrite
from areal_jax.types import ArealError


def row(step: int, **more: object) -> dict:
    return {**dict.fromkeys(REQUIRED, 0.0), "step": step, "params_digest": "d", "dropped": {}, **more}


def test_rows_come_back_as_they_were_written(tmp_path):
    writer = MetricsWriter(tmp_path, tensorboard=False)
    writer.write(row(0, reward_mean=np.float32(0.25), generated_tokens=np.int64(7), dropped={"filtered": 3}))
    writer.write(row(1, reward_mean=0.5))
    assert [each["reward_mean"] for each in read_rows(tmp_path)] == [0.25, 0.5]  # flushed, not only on close
    assert read_rows(tmp_path)[0]["generated_tokens"] == 7
    assert read_rows(tmp_path)[0]["dropped"] == {"filtered": 3}
    writer.close()


def test_what_is_not_finite_becomes_null(tmp_path):
    writer = MetricsWriter(tmp_path, tensorboard=False)
    writer.write(row(0, entropy=float("nan"), grad_norm=np.float32("inf"), more=[1.0, float("-inf")]))
    writer.close()
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert (line["entropy"], line["grad_norm"], line["more"]) == (None, None, [1.0, None])


@pytest.mark.parametrize("name", REQUIRED)
def test_a_row_without_a_required_field_is_refused(tmp_path, name):
    writer = MetricsWriter(tmp_path, tensorboard=False)
    lacking = row(0)
    del lacking[name]
    with pytest.raises(ValueError, match=name):
        writer.write(lacking)
    writer.close()
    assert read_rows(tmp_path) == []


def test_a_line_cut_short_is_left_out_and_the_next_row_does_not_join_it(tmp_path):
    writer = MetricsWriter(tmp_path, tensorboard=False)
    writer.write(row(0))
    writer.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "rew')
    assert [each["step"] for each in read_rows(tmp_path)] == [0]
    rewrite(tmp_path, read_rows(tmp_path))
    writer = MetricsWriter(tmp_path, tensorboard=False)
    writer.write(row(1))
    writer.close()
    assert [each["step"] for each in read_rows(tmp_path)] == [0, 1]


@pytest.mark.parametrize("line", ["{broken", "[1, 2]"])
def test_a_broken_line_in_the_middle_is_named(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 0}}\n{line}\n{{"step": 2}}\n')
    with pytest.raises(ArealError, match="line 2"):
        read_rows(tmp_path)


def test_rewrite_replaces_and_leaves_nothing_beside(tmp_path):
    writer = MetricsWriter(tmp_path, tensorboard=False)
    for step in range(5):
        writer.write(row(step))
    writer.close()
    rewrite(tmp_path, read_rows(tmp_path)[:3])
    assert [each["step"] for each in read_rows(tmp_path)] == [0, 1, 2]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_no_file_is_no_rows(tmp_path):
    assert read_rows(tmp_path) == []


def test_tensorboard_gets_every_number_and_forgets_what_a_resume_redoes(tmp_path):
    for steps in ([0, 1, 2], [1, 2]):
        writer = MetricsWriter(tmp_path)
        for step in steps:
            writer.write(row(step, reward_mean=step / 4, dropped={"filtered": 2}))
        writer.close()
        rewrite(tmp_path, read_rows(tmp_path)[:1])
    first, second = (events(path) for path in sorted((tmp_path / "tensorboard").iterdir()))
    assert scalars(first)["reward_mean"] == [(0, 0.0), (1, 0.25), (2, 0.5)]
    assert scalars(first)["dropped/filtered"] == [(0, 2.0), (1, 2.0), (2, 2.0)]
    assert scalars(second)["reward_mean"] == [(1, 0.25), (2, 0.5)]
    starts = [[event.step for event in file if event.HasField("session_log")] for file in (first, second)]
    assert starts == [[0], [1]]  # TensorBoard then forgets what the first file says of steps 1 and 2


def test_wandb_that_is_not_installed_is_a_clear_error(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ArealError, match=r"pip install '\.\[wandb\]'"):
        MetricsWriter(tmp_path, tensorboard=False, wandb={"project": "p"})


def test_wandb_gets_the_numbers_of_a_step(tmp_path, monkeypatch):
    class Fake:
        def __init__(self) -> None:
            self.calls: list = []

        def init(self, **settings):
            self.calls.append(("init", settings))
            return self

        def log(self, values, step):
            self.calls.append(("log", step, values["reward_mean"], "params_digest" in values))

        def finish(self):
            self.calls.append("finish")

    fake = Fake()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    writer = MetricsWriter(tmp_path, tensorboard=False, wandb={"project": "p"})
    writer.write(row(3, reward_mean=0.5))
    writer.close()
    (_, started), *rest = fake.calls
    assert rest == [("log", 3, 0.5, False), "finish"]
    own = {"dir": str(tmp_path), "resume": "allow", "allow_val_change": True}
    assert started == {"project": "p", "id": started["id"]} | own and len(started["id"]) == 16
    MetricsWriter(tmp_path, tensorboard=False, wandb={"project": "p"}).close()
    (tmp_path / "other").mkdir()
    MetricsWriter(tmp_path / "other", tensorboard=False, wandb={"project": "p"}).close()
    ids = [call[1]["id"] for call in fake.calls if call[0] == "init"]
    assert ids[0] == ids[1] != ids[2]  # a resume continues the run, another folder is another one


def events(path):
    """TensorBoard's records: length (8 bytes), its checksum (4), the event, its checksum (4)."""
    from tensorboardX.proto.event_pb2 import Event

    data, at, found = path.read_bytes(), 0, []
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        found.append(Event.FromString(data[at + 12 : at + 12 + length]))
        at += 16 + length
    return found


def scalars(found):
    by_name: dict[str, list] = {}
    for event in found:
        for value in event.summary.value:
            by_name.setdefault(value.tag, []).append((event.step, value.simple_value))
    return by_name
