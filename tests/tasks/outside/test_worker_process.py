"""The worker of an outside environment: its protocol, deaths and deadlines, and that nothing outlives it."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from areal_jax.control import events as e
from areal_jax.episodes.conversation import Conversation
from areal_jax.tasks.errors import TaskError
from areal_jax.tasks.outside import worker_process
from areal_jax.tasks.outside.environments import Outside
from areal_jax.tasks.outside.worker_process import PROGRAM, WorkerProcess
from areal_jax.tasks.source import load_tasks
from areal_jax.types import SampleId
from tests.hangs import HANG_S
from tests.processes import assert_ends, has_ended
from tests.serving.test_episode_gateway import LIMITS, TOKENIZER, Policy

STUB = Path(__file__).with_name("stub_worker.py")
RIGHT, RAISES, EXITS, WAITS, BLOCKS, CHATTERS, CHATS = range(7)
"""As in stub_worker: what the stub does at each index."""


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTSIDE_FOLDER", str(PROGRAM.parent))


@pytest.fixture
def worker() -> Iterator[WorkerProcess]:
    with closing(WorkerProcess("verifiers", sys.executable, {}, STUB)) as worker:
        yield worker


def run(worker: WorkerProcess, index: int) -> Any:
    return worker.ask("run", index=index, base_url=f"url {index}")


def test_answers_come_to_their_requests_and_prints_do_no_harm(worker: WorkerProcess):
    waiting = run(worker, WAITS)
    found = [run(worker, index) for index in (RIGHT, CHATTERS, RIGHT)]
    answer = {"value": 0.5, "parts": {"index": RIGHT}, "note": f"url {RIGHT}"}
    assert [found[0].result(HANG_S), found[2].result(HANG_S)] == [answer, answer]
    assert found[1].result(HANG_S)["value"] > 0 and not waiting.done()
    assert worker.ask("prompts").result(HANG_S)[2] == [{"role": "user", "content": "2"}]
    with pytest.raises(TaskError, match=r"^tasks\.verifiers: LookupError: no such key$"):
        run(worker, RAISES).result(HANG_S)


def test_a_dead_worker_fails_its_requests_with_its_last_words_and_another_one_starts(worker: WorkerProcess):
    waiting, died = run(worker, WAITS), run(worker, EXITS)
    for future in (waiting, died):
        with pytest.raises(TaskError, match=r"ended with status 3; .*\n  the library is broken"):
            future.result(HANG_S)
    assert run(worker, RIGHT).result(HANG_S)["value"] == 0.5


def test_a_worker_that_dies_while_its_threads_start_fails_its_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Each thread runs for as long as it can before the next one starts."""
    start = threading.Thread.start

    def start_and_wait(thread: threading.Thread) -> None:
        start(thread)
        thread.join(1.0)

    monkeypatch.setattr(threading.Thread, "start", start_and_wait)
    (program := tmp_path / "dies.py").write_text("raise SystemExit('no library')")
    with (
        closing(WorkerProcess("verifiers", sys.executable, {}, program)) as worker,
        pytest.raises(TaskError, match=r"ended with status 1; .*\n  no library"),
    ):
        run(worker, RIGHT).result(HANG_S)


def test_a_cancelled_request_ends_and_a_blocked_worker_is_killed(
    worker: WorkerProcess, monkeypatch: pytest.MonkeyPatch
):
    waiting = run(worker, WAITS)
    assert run(worker, RIGHT).result(HANG_S)["value"] == 0.5
    worker.cancel(waiting)
    with pytest.raises(TaskError, match="cancelled"):
        waiting.result(HANG_S)
    monkeypatch.setattr(worker_process, "END_S", 0.3)
    other, blocked = run(worker, WAITS), run(worker, BLOCKS)
    worker.cancel(blocked)
    for future in (other, blocked):
        with pytest.raises(TaskError, match="ended with status -9"):
            future.result(HANG_S)


def test_closing_ends_the_worker_and_what_it_started():
    worker = WorkerProcess("verifiers", sys.executable, {}, STUB)
    found = run(worker, CHATTERS).result(HANG_S)
    own, child = int(found["note"]), found["value"]
    assert not has_ended(own) and not has_ended(child)
    worker.close()
    assert_ends(own)
    assert_ends(child)
    worker.close()


def test_a_worker_ends_when_its_parent_is_killed():
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from areal_jax.tasks.outside.worker_process import WorkerProcess\n"
        f"worker = WorkerProcess('verifiers', sys.executable, {{}}, Path({str(STUB)!r}))\n"
        f"print(worker.ask('run', index={CHATTERS}, base_url='').result(300)['note'], flush=True)\n"
        "input()"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert not has_ended(pid)
    parent.send_signal(signal.SIGKILL)
    parent.wait(HANG_S)
    assert_ends(pid)


def test_a_missing_interpreter_and_a_missing_package_are_named():
    with pytest.raises(TaskError, match=r"tasks\.textarena\.python=nowhere/python cannot be run \(No such"):
        WorkerProcess("textarena", "nowhere/python", {}).ask("prompts")
    games = WorkerProcess("textarena", sys.executable, {"game": "TicTacToe-v0"})
    with closing(games), pytest.raises(TaskError, match=r"no package textarena; .* -m pip install 'texta"):
        games.ask("prompts").result(HANG_S)
    own = WorkerProcess("verifiers", sys.executable, {"needs": "not_there"}, STUB)
    with closing(own), pytest.raises(TaskError, match=r"no package not_there; .* -m pip install not_there$"):
        own.ask("prompts").result(HANG_S)


# --- as a task ----------------------------------------------------------------------------------------------


@pytest.fixture
def stubbed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkerProcess.__init__, "__defaults__", (STUB,))


def task(**settings: Any) -> Outside:
    return Outside("verifiers", sys.executable, settings, start_s=settings.pop("start_s", 20.0))


def test_prompts_are_listed_once_and_within_a_deadline(stubbed: None):
    one = task()
    assert len(one) == 7 and one[3].info == {"index": 3} and one[3].messages[0]["content"] == "3"
    with pytest.raises(IndexError):
        one[7]
    with pytest.raises(
        TaskError, match=r"not listed its prompts within 0\.3 s; raise tasks\.verifiers\.start"
    ):
        len(task(list_s=30, start_s=0.3))


def conducted(index: int, **limits: float) -> tuple[e.Event, Policy]:
    """How an episode at this index ends with a policy that says letters."""
    one = task()
    sample, prompt = SampleId(0, 0), replace(one[index], task="own")
    policy = Policy(print, "abcdefghijkl".__getitem__, LIMITS._replace(**limits), one)
    with closing(policy), closing(one):
        policy.talks[sample] = talk = Conversation(tuple(TOKENIZER.render(prompt)))
        policy.runner.begin(sample, prompt, talk)
        return policy.wait()[0], policy


def test_an_episode_has_the_workers_reward(stubbed: None):
    ended, policy = conducted(CHATS)
    assert ended == e.EpisodeEnded(SampleId(0, 0), 0.5, (("index", float(CHATS)),), ended.note)
    assert ended.note.startswith("http://127.0.0.1:") and len(policy.asked) == 9


def test_an_error_after_a_refused_turn_is_a_reward_of_0_and_any_other_one_fails(stubbed: None):
    ended, policy = conducted(CHATS, max_turns=4)
    assert (ended.reward, ended.stop_reason, len(policy.asked)) == (0.0, "length", 4)
    assert ended.note == "no room for another turn: tasks.verifiers: RuntimeError: the policy is silent"
    failed, _ = conducted(RAISES)
    assert isinstance(failed, e.EpisodeFailed) and "LookupError: no such key" in failed.message


def test_an_environment_that_exceeds_the_episodes_deadline_fails_it(stubbed: None):
    failed, _ = conducted(WAITS, timeout_s=1.5)
    assert (
        isinstance(failed, e.EpisodeFailed) and "took longer than 1.5 s between two turns" in failed.message
    )


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("textarena", {"game": "Wordle-v0"}, "game=Wordle-v0 downloads a list of words"),
        (
            "textarena",
            {"game": "Chess-v0"},
            "game=Chess-v0 is not supported; choose one of GuessTheNumber-v0",
        ),
        ("textarena", {"game": "TicTacToe-v0", "size": 0}, "size=0 and seed=0 violate 1 <= size"),
        ("textarena", {"game": "TicTacToe-v0", "start_s": 0}, "start_s=0 is not positive"),
        ("verifiers", {"taskset": "x"}, "client=train .* needs tasks.verifiers.tokenizer"),
        ("verifiers", {"taskset": "x", "client": "both"}, "client='both' is neither train nor eval"),
        ("verifiers", {"taskset": "x", "client": "eval", "renderer": {}}, "renderer has no effect"),
    ],
)
def test_settings_that_cannot_work_are_refused(name: str, settings: dict[str, Any], message: str):
    with pytest.raises(TaskError, match=message):
        load_tasks({name: {"python": "python", **settings}})
