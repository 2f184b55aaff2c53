"""Redis' peak memory in a run with samples of 2,000 tokens, for two values of trainer.checkpoint_every.

`python -m tests.cluster.redis_peak`: controller, journal and Redis are real; host, reward worker and trainer
are threads that answer at once, without a model.
"""

from __future__ import annotations

import io
import os
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np

from areal_jax.cluster.controller_role import control
from areal_jax.cluster.member import ControllerLink
from areal_jax.cluster.messages import Begin, Envelope
from areal_jax.cluster.redis_server import redis_server
from areal_jax.config.loading import load_config
from areal_jax.config.tree import Config
from areal_jax.control import events as e
from areal_jax.observe.metrics import REQUIRED
from areal_jax.trajectories.plan import BatchPlan
from areal_jax.types import SampleId
from tests.redis_servers import SECRET, client
from tests.trajectories.samples import trajectory

TOKENS = 2000
STEPS = 160
"""Enough for a run to reach its most samples in flight; after 40 steps the peak is 15 to 22 MB by chance."""


def serve(config: Config, role: str, name: str, every: int) -> None:
    """One process of the role, without its work."""
    newest = 0
    with ControllerLink(config, role, name) as link:
        for message in link.commands():
            match message:
                case Begin():
                    link.ready(slots=8, version=newest, digest=f"d{newest}")
                case Envelope(_, e.Dispatch(samples, host, version)):
                    for sample in samples:
                        one = trajectory(sample, length=TOKENS)
                        one = replace(one, versions=np.where(one.loss_mask, version, -1).astype(np.int32))
                        link.report(e.SampleFinished(sample, host, one.spans, "stop"), one)
                case Envelope(_, e.Score(ordinal, attempt), completions):
                    link.report(e.RewardScored(ordinal, attempt, tuple(map(float, range(len(completions))))))
                case Envelope(_, e.Train(step, ordinals), payload):
                    plan = BatchPlan.from_wire(payload["plan"])
                    link.payloads.wait_for([SampleId(*row) for row in plan.samples.tolist()])
                    newest = step + 1
                    link.report(e.BatchTrained(step, ordinals, f"d{newest}", dict.fromkeys(REQUIRED, 1.0)))
                    link.report(e.VersionCommitted(newest, f"d{newest}"))
                    if newest % every == 0 or newest == STEPS:
                        link.report(e.CheckpointCommitted(newest))


def peak_bytes(folder: Path, every: int) -> int:
    with redis_server(folder / "redis", secret=SECRET) as server:
        os.environ["AREAL_JAX_SECRET"] = SECRET
        words = [f"run.dir={folder / 'run'}", f"run.steps={STEPS}", f"runtime.redis={server.url}"]
        words += [f"trainer.checkpoint_every={every}", f"generation.length={TOKENS + 40}"]
        words += [f"generation.max_tokens={TOKENS}", f"trainer.length={TOKENS + 64}", "observe.report=false"]
        config = load_config("configs/quickstart.yaml", *words, "observe.tensorboard=false")
        threads = []
        for role, name in [("trainer", "trainer-0"), ("generate", "generate-0"), ("reward", "reward-0")]:
            threads.append(threading.Thread(target=serve, args=(config, role, name, every), daemon=True))
            threads[-1].start()
        control(config, folder / "run", io.StringIO())
        with client(server) as asked:
            return asked.info("memory")["used_memory_peak"]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        found = {every: peak_bytes(Path(place) / str(every), every) for every in (2, 1000)}
    sys.stdout.write(f"peak bytes by checkpoint_every: {found}; ratio {found[1000] / found[2]:.3f}\n")
