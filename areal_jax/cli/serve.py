"""The command `serve`, which answers requests over gRPC and HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from areal_jax.cli.shell import AnyModel, stop_on_sigterm
from areal_jax.plugin import needing

PACKAGES = ("google", "grpc", "prometheus_client", "starlette", "uvicorn")
"""Top-level modules that the extra [serve] installs; if one is missing, the error names the extra."""


def serve(
    model: AnyModel,
    words: Annotated[
        list[str] | None, typer.Argument(help="Settings: YAML files and section.key=value.")
    ] = None,
    *,
    host: Annotated[
        str, typer.Option(help="Address to bind; any address other than loopback requires a secret.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port of JetStream's gRPC service.")] = 9000,
    http_port: Annotated[
        int, typer.Option(help="Port of HTTP: OpenAI's interface, control of the host, /health, /metrics.")
    ] = 9001,
    queue: Annotated[int, typer.Option(min=0, help="Maximum number of samples that wait for a slot.")] = 1024,
    unread: Annotated[
        int, typer.Option(min=1, help="Maximum number of tokens that a client may leave unread.")
    ] = 4096,
    deadline: Annotated[
        float, typer.Option(min=1, help="Seconds after which a request over HTTP ends with an error.")
    ] = 600,
    idle: Annotated[
        float, typer.Option(min=1, help="Seconds after which a connection without a request is closed.")
    ] = 60,
    connections: Annotated[
        int, typer.Option(min=1, help="Maximum number of open HTTP connections, and of gRPC calls.")
    ] = 2048,
    sample: Annotated[
        bool,
        typer.Option(help="Sample with the settings generation.*; without this option decoding is greedy."),
    ] = False,
    answers_only: Annotated[
        bool,
        typer.Option(help="Send only the text of answers, without thoughts and token ids."),
    ] = False,
    weights: Annotated[
        list[Path] | None,
        typer.Option(help="A folder from which /swap may load weights; may be given several times."),
    ] = None,
    secret_file: Annotated[
        Path | None, typer.Option(help="File that holds the secret; by default AREAL_JAX_SECRET is used.")
    ] = None,
) -> None:
    """Serve a model by gRPC (JetStream's service) and by HTTP (OpenAI's interface, pause and swap)."""
    stop_on_sigterm()
    with needing("serve", "serve", PACKAGES):
        from areal_jax.secret import read_secret
        from areal_jax.serving.server import ServeSettings
        from areal_jax.serving.server import serve as run
    settings = ServeSettings(
        host=host,
        port=port,
        http_port=http_port,
        queue=queue,
        unread=unread,
        deadline_s=deadline,
        idle_s=idle,
        connections=connections,
        is_sampled=sample,
        is_answers_only=answers_only,
        weights=tuple(weights or ()),
        secret=read_secret(secret_file),
    )
    try:
        run(model, words or [], settings, typer.echo)
    except KeyboardInterrupt:
        typer.echo("stopped", err=True)
        raise
