"""The supervised start."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from areal_jax.config.sections import SupervisedConfig, TrainerConfig
from areal_jax.models.config import ModelConfig
from areal_jax.models.model import Model
from areal_jax.tasks.datasets.countdown import Countdown
from areal_jax.tasks.source import PromptStream, load_tasks
from areal_jax.trainer.state import make_optimizer
from areal_jax.trainer.supervised import supervised_start
from areal_jax.types import Prompt
from tests.algorithms.reference import log_softmax
from tests.models.reference import logits
from tests.trainer.conftest import same_bits


class Short(Countdown):
    """Answers of three letters and end of text."""

    def __getitem__(self, i: int) -> Prompt:
        return Prompt("d>", info={"answer": "cba"})


@pytest.fixture(scope="module")
def small() -> Model:
    tokenizer = Short().tokenizer
    sizes = dict(layers=1, width=16, heads=2, kv_heads=2, head_dim=8, mlp_width=32)
    return Model(ModelConfig(vocab_size=tokenizer.vocab_size, **sizes), tokenizer)


def start(model: Model, params: Any, steps: int = 8) -> Any:
    c = TrainerConfig(rows=8, learning_rate=3e-3, supervised=SupervisedConfig(batch=24, steps=steps))
    tasks = load_tasks({}, [Short()])
    return supervised_start(model, params, make_optimizer(c, 8), tasks, c, length=16, seed=0)


def answer_logp(model: Model, params: Any) -> float:
    """Log-likelihood of the right answer by the numpy transformer."""
    tasks = load_tasks({}, [Short()])
    prompt = PromptStream(tasks, 0).prompt(0)
    asked = model.tokenizer.render(prompt)
    tokens = np.array([*asked, *model.tokenizer.encode("cba"), model.tokenizer.eos_id])
    logp = log_softmax(logits(model.config, params, tokens))
    return float(sum(logp[t - 1, tokens[t]] for t in range(len(asked), len(tokens))))


@pytest.mark.slow
def test_it_raises_the_likelihood_of_reference_answers(small: Model):
    params = small.init(0)
    before = answer_logp(small, params)
    assert before < -8
    assert answer_logp(small, start(small, params)) > before + 2


@pytest.mark.slow
def test_it_is_a_function_of_its_seed_and_no_step_is_no_change(small: Model):
    params = small.init(0)
    assert start(small, params, steps=0) is params
    assert same_bits(start(small, params, steps=2), start(small, params, steps=2))
