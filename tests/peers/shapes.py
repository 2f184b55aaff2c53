"""Sizes of the compared models, for interpreters that have no areal_jax; as in areal_jax.models.config."""

SHAPES = {
    "5m": dict(
        vocab=258, layers=6, width=256, heads=8, kv_heads=4, head_dim=32, mlp=704, theta=10_000.0, rows=16
    ),
    "smollm2-135m": dict(
        vocab=49_152,
        layers=30,
        width=576,
        heads=9,
        kv_heads=3,
        head_dim=64,
        mlp=1536,
        theta=100_000.0,
        rows=8,
    ),
}
LENGTH = 256
SEQUENCES = 64
"""Of a skewed batch: lognormal lengths of median 64 and sigma 0.8, cut at 16 and LENGTH."""
MICRO_ROWS = 8
"""Rows of a micro-batch of it."""
