"""An out-of-memory error names the role, the program and the settings to change, under every driver."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from areal_jax.assembly.device_memory_remedies import (
    HOST,
    TRAINER,
    Need,
    OutOfMemoryError,
    explained,
    for_host,
    for_trainer,
)
from areal_jax.config.loading import load_config
from areal_jax.models.config import SHAPES, ModelConfig
from areal_jax.observe.waits import Timeline
from areal_jax.parallel.program_errors import Running
from areal_jax.runtime import talking, trainer_loop
from areal_jax.serving import server
from areal_jax.trainer.compiled import Program

RECIPE = Path(__file__).parents[2] / "configs" / "qwen2.5_1.5b_gsm8k_8gpu.yaml"
CONFIG = load_config(RECIPE, "trainer.rows=8", "trainer.mesh.fsdp=4", "generation.slots=32")
MODEL = ModelConfig(**SHAPES["qwen2.5-1.5b"])

TRAINERS = (
    r"^the trainer's device ran out of memory in the program accumulate; set trainer\.rows=4, or trainer\."
    r"logp_chunk=1024, or .*, or use devices with more memory\. .*: RESOURCE_EXHAUSTED: Out of memory"
)
HOSTS = (
    r"^the host's device ran out of memory in the program decode; set generation\.kv_tokens=\d+, or "
    r"generation\.slots=24, or generation\.weight_layout=stacked, or runtime\.host_tensor=2, or use devices "
    r"with more memory\. "
)


def short_of_memory(*_: Any, **__: Any) -> Any:
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 99 bytes.\nMore follows")


def decode(*_: Any, **__: Any) -> None:
    with Running("decode"):
        short_of_memory()


def accumulate(*_: Any, **__: Any) -> None:
    program = Program("accumulate", lambda x: x, lambda _: None)
    program._jitted = short_of_memory  # type: ignore[assignment]
    program(jnp.ones(()))


@pytest.mark.parametrize(
    ("role", "program", "said"), [(TRAINER, accumulate, TRAINERS), (HOST, decode, HOSTS)]
)
def test_the_error_names_role_program_and_settings(role: str, program: Any, said: str):
    with pytest.raises(OutOfMemoryError, match=said) as caught, explained(role, CONFIG, MODEL):
        program()
    assert "More follows" not in str(caught.value)
    assert isinstance(caught.value.__cause__, jax.errors.JaxRuntimeError)


def test_without_a_program_the_error_says_so():
    """A device may report the error when a result is read."""
    said = "in a program that was started before; set "
    with pytest.raises(OutOfMemoryError, match=said), explained(HOST, CONFIG, MODEL):
        short_of_memory()


def test_other_errors_of_a_device_stay_what_they_are():
    error = jax.errors.JaxRuntimeError
    with pytest.raises(error, match=r"^INTERNAL: a fault$"), explained(HOST, CONFIG, MODEL):
        raise jax.errors.JaxRuntimeError("INTERNAL: a fault")


def test_the_settings_are_those_of_the_plan():
    """Those of a program that lacks half of its temporaries; the plan gives its own figures."""
    half = Need(program=None, temporary=2, excess=1, state=2, weights=2, pool=2)
    for role, remedies in ((TRAINER, for_trainer), (HOST, for_host)):
        with pytest.raises(OutOfMemoryError) as caught, explained(role, CONFIG, MODEL):
            short_of_memory()
        for text, _ in list(remedies(CONFIG, MODEL, half))[:4]:
            assert text in str(caught.value)


# --- drivers ------------------------------------------------------------------------------------------------


def test_every_trainer(monkeypatch: pytest.MonkeyPatch):
    """That of one process and of a launched role in `run`, a role that trains batches again in `train`."""
    monkeypatch.setattr(trainer_loop, "train_batch", accumulate)
    learner = SimpleNamespace(mesh=SimpleNamespace(local_devices=jax.local_devices()))
    parts: Any = SimpleNamespace(config=CONFIG, model=SimpleNamespace(config=MODEL), learner=learner)
    nothing: Any = None
    trainer = trainer_loop.Trainer(
        parts, nothing, nothing, nothing, print, clock=Timeline(None).clock("trainer"), note=print
    )
    batch: Any = "a batch"
    trainer.inbox.put(batch)
    with pytest.raises(OutOfMemoryError, match=TRAINERS):
        trainer.run()
    with pytest.raises(OutOfMemoryError, match=TRAINERS):
        trainer.train(batch)


def test_every_host_of_a_run(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(talking, "Host", lambda *_, **__: SimpleNamespace(run=decode))
    engine: Any = SimpleNamespace(model=SimpleNamespace(config=MODEL))
    store: Any = None
    clock = Timeline(None).clock("host-0")
    _, run = talking.training_host(CONFIG, 0, engine, store, print, name="host-0", clock=clock)
    with pytest.raises(OutOfMemoryError, match=HOSTS):
        run()


def test_a_server(monkeypatch: pytest.MonkeyPatch):
    started = SimpleNamespace(
        model=SimpleNamespace(config=MODEL), port=1, http_port=2,
        start=lambda: None, wait=decode, stop=lambda: None,
    )  # fmt: skip
    monkeypatch.setattr(server, "make_server", lambda *_: started)
    words = ("generation.length=2048", "generation.slots=32")
    with pytest.raises(OutOfMemoryError, match=r"^the host's device .* program decode; set generation"):
        server.serve("qwen2.5-1.5b", words, server.ServeSettings(), print)
