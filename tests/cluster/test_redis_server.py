"""The server that a run starts: which clients it accepts, when it ends, what it leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from areal_jax.cluster.redis_server import redis_server
from areal_jax.types import ArealError
from tests.hangs import HANG_S
from tests.processes import assert_ends
from tests.redis_servers import SECRET, client, require_redis

ROOT = Path(__file__).parents[2]
slow = pytest.mark.slow


def test_a_missing_program_is_named_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ArealError, match=r"redis-server is not installed: .*`apt install.*runtime\.redis"):
        redis_server(tmp_path).__enter__()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("secret", ["short", "with a space in it", "two\nlines-in-a-password", ""])
@slow
def test_an_invalid_password_starts_no_server(tmp_path: Path, secret: str):
    require_redis()
    with pytest.raises(ArealError, match="give at least 16, printable ASCII"):
        redis_server(tmp_path / "redis", secret=secret).__enter__()
    assert not (tmp_path / "redis").exists()


@slow
def test_clients_need_the_password_which_is_in_no_argument_file_or_variable(tmp_path: Path):
    require_redis()
    with redis_server(tmp_path / "of a run") as server:
        with client(server) as asked:
            info, config = asked.info(), asked.config_get()
        assert (info["process_id"], info["aof_enabled"]) == (server.process.pid, 0)
        names = ("bind", "appendonly", "save", "protected-mode", "maxmemory-policy")
        assert [config[name] for name in names] == ["127.0.0.1", "no", "", "yes", "noeviction"]
        for password in (None, "foobared", server.secret[:-1]):
            with pytest.raises(redis.exceptions.AuthenticationError):
                redis.Redis(port=server.port, password=password, retry=Retry(NoBackoff(), 0)).ping()
        assert len(server.secret) >= 32
        assert server.secret not in repr(server)
        assert server.secret not in server.url
        for said in ("cmdline", "environ"):
            assert server.secret.encode() not in Path(f"/proc/{server.process.pid}/{said}").read_bytes()
        written = b"".join(path.read_bytes() for path in (tmp_path / "of a run").rglob("*") if path.is_file())
        assert server.secret.encode() not in written
    with redis_server(tmp_path / "other") as other:
        assert other.secret != server.secret


@slow
def test_it_keeps_no_data_and_takes_any_password(tmp_path: Path):
    require_redis()
    odd = "quo\"te'back\\slash#hash"
    for _ in range(2):
        with redis_server(tmp_path, secret=odd) as server, client(server) as asked:
            assert asked.get("kept") is None
            asked.set("kept", "1")
        with pytest.raises(ProcessLookupError):
            os.kill(server.process.pid, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["redis.log"]


@slow
def test_a_port_that_is_taken_is_an_error_with_what_the_server_said(tmp_path: Path):
    require_redis()
    with (
        redis_server(tmp_path / "one", secret=SECRET) as server,
        pytest.raises(
            ArealError, match=rf"on 127\.0\.0\.1:{server.port} ended at once.*Address already in use"
        ),
    ):
        redis_server(tmp_path / "two", server.port, secret=SECRET).__enter__()


@slow
def test_a_server_that_died_is_started_again_at_its_port(tmp_path: Path):
    require_redis()
    with redis_server(tmp_path) as server:
        with client(server) as asked:
            asked.set("kept", "1")
        former = server.process.pid
        server.tend()
        assert server.process.pid == former
        os.kill(former, signal.SIGKILL)
        server.process.wait(HANG_S)
        server.tend()
        with client(server) as asked:
            assert server.process.pid != former and asked.get("kept") is None
    with pytest.raises(ProcessLookupError):
        os.kill(server.process.pid, 0)


@slow
@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_with_the_program_that_started_it(tmp_path: Path, by: signal.Signals):
    require_redis()
    program = """
        import sys, time
        from areal_jax.cluster.redis_server import redis_server
        with redis_server(sys.argv[1]) as server:
            print(server.process.pid, flush=True)
            time.sleep(1000)
    """
    words = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)]
    parent = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert os.getsid(pid) == pid, "Ctrl-C in the terminal would reach it before its parent"
        os.kill(pid, 0)
    finally:
        parent.send_signal(by)
        parent.wait(HANG_S)
    assert_ends(pid, "redis-server of a killed parent")
    assert "User requested shutdown" in (tmp_path / "redis.log").read_text()
