"""`areal-jax`: the verbs. Each is a thin shell; what it does is imported when it is called."""

from __future__ import annotations

import typer

from areal_jax.cli import cluster, convert, evaluate, explain, launch, measure, parity, read, serve, train

app = typer.Typer(
    name="areal-jax",
    help="Asynchronous reinforcement learning for language-model reasoning, in JAX.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for family in (train, launch, cluster, read, evaluate, serve, convert, measure, parity, explain):
    family.register(app)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
