"""`areal-jax serve` as a user calls it: what it refuses, and how it ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from typer.testing import CliRunner

from areal_jax.cli.main import app
from areal_jax.serving import server
from tests.cli.test_bad_input import fails
from tests.hangs import HANG_S


def test_an_address_that_others_reach_needs_a_secret(monkeypatch):
    monkeypatch.delenv("AREAL_JAX_SECRET", raising=False)
    assert "--host 0.0.0.0 can be reached from other machines" in fails("serve", "tiny", "--host", "0.0.0.0")
    monkeypatch.setenv("AREAL_JAX_SECRET", "short")
    assert "the secret has 5 characters" in fails("serve", "tiny", "--host", "0.0.0.0")


def test_an_unknown_model_and_a_mistyped_key_are_named():
    assert "did you mean smollm2?" in fails("serve", "smolm2")
    assert "did you mean generation.slots?" in fails("serve", "tiny", "generation.slot=3")


def test_options_become_settings(monkeypatch):
    served = []
    monkeypatch.setattr(server, "serve", lambda model, words, settings, say: served.append((model, settings)))
    words = ["serve", "tiny", "--answers-only", "--sample", "--queue", "3", "--unread", "9", "--weights", "w"]
    for each in (words, ["serve", "tiny"]):
        assert CliRunner().invoke(app, each).exit_code == 0
    settings = server.ServeSettings(
        queue=3, unread=9, is_sampled=True, is_answers_only=True, weights=(Path("w"),)
    )
    assert served == [("tiny", settings), ("tiny", server.ServeSettings())]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "says"),
    [
        ("grpc", "pip install '.[serve]'"),
        ("uvicorn", "pip install '.[serve]'"),
        ("jetstream.core", "pip install --no-deps google-jetstream==0.2.2"),
    ],
)
def test_a_missing_package_says_how_to_get_it(package, says):
    """In a process of its own: modules that were imported anew would not be those of later tests."""
    lines = [
        "import sys; sys.argv = ['areal-jax', 'serve', 'tiny']",
        f"sys.modules[{package!r}] = None",
        "from areal_jax.cli.main import app",
        "app()",
    ]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1 and says in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_it_says_when_it_is_ready_and_stops_when_asked(end):
    words = [
        "serve",
        "tiny",
        "--port",
        "0",
        "--http-port",
        "0",
        "generation.length=64",
        "generation.max_tokens=32",
    ]
    with subprocess.Popen(
        # A shell's background command ignores SIGINT, and so would its children.
        ["env", "--default-signal=INT", sys.executable, "-m", "areal_jax.cli.main", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        found = re.fullmatch(
            r"tiny is served: gRPC on 127\.0\.0\.1:\d+, HTTP on (127\.0\.0\.1:\d+) "
            r"\(/v1 as OpenAI's, /health, /metrics\)\n",
            said,
        )
        if found is None:
            process.kill()
            pytest.fail(f"{said}{process.communicate()}")
        with urllib.request.urlopen(f"http://{found[1]}/health", timeout=HANG_S) as response:
            assert b'"status":"ok"' in response.read()
        process.send_signal(end)
        try:
            _, err = process.communicate(timeout=HANG_S)
        finally:
            process.kill()  # one that does not stop would hold the tests for ever
    assert (process.returncode, err) == (130, "stopped\n")
