"""The verb that answers others: serve."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated

import typer

from areal_jax.cli.shell import INTERRUPTED, plain_errors
from areal_jax.types import ArealError

PACKAGES = ("google", "grpc", "prometheus_client", "starlette", "uvicorn")
"""Of the extra [serve], by the name that is imported."""


def register(app: typer.Typer) -> None:
    app.command()(serve)


@plain_errors
def serve(
    model: Annotated[
        str,
        typer.Argument(help="smollm2, a Hugging Face folder, a GGUF file, a run's folder, a shape (random)."),
    ],
    words: Annotated[list[str] | None, typer.Argument(help="YAML files and section.key=value.")] = None,
    host: Annotated[
        str, typer.Option(help="Address to bind; beyond loopback it needs a secret.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="gRPC: JetStream's Orchestrator and our Rollout.")] = 9000,
    http_port: Annotated[int, typer.Option(help="HTTP: /health and /metrics.")] = 9001,
    queue: Annotated[int, typer.Option(min=0, help="Samples that may wait beyond the slots.")] = 1024,
    unread: Annotated[int, typer.Option(min=1, help="Tokens that a client may leave unread.")] = 4096,
    sample: Annotated[bool, typer.Option(help="Decode draws by generation.*; greedy unless given.")] = False,
    weights: Annotated[
        list[Path] | None, typer.Option(help="A folder that Swap may read; repeat it.")
    ] = None,
    secret_file: Annotated[
        Path | None, typer.Option(help="Holds the secret; AREAL_JAX_SECRET unless given.")
    ] = None,
) -> None:
    """Serve a model: JetStream's gRPC, the rollout service beside it, /health and /metrics."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a polite kill stops as cleanly as Ctrl-C
    try:
        from areal_jax.runtime.serve import ServeSettings, read_secret
        from areal_jax.runtime.serve import serve as run
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in PACKAGES:
            raise
        raise ArealError(f"serve needs the package {error.name}: pip install 'areal-jax[serve]'") from None
    settings = ServeSettings(
        host, port, http_port, queue, unread, sample, tuple(weights or ()), read_secret(secret_file)
    )
    try:
        run(model, words or [], settings, typer.echo)
    except KeyboardInterrupt:
        typer.echo("stopped", err=True)
        raise typer.Exit(INTERRUPTED) from None
