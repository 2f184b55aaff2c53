"""`model.source`: what can be named, and what is refused before anything starts."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from areal_jax.assembly.api import load_model
from areal_jax.assembly.conversion import convert
from areal_jax.assembly.sources import _other_ids, open_source, open_teacher
from areal_jax.assembly.tokenizer_source import open_tokenizer
from areal_jax.config.loading import load_config
from areal_jax.config.tree import Config
from areal_jax.jobs.local import run
from areal_jax.models.config import ModelConfig
from areal_jax.models.io.huggingface import export_folder
from areal_jax.models.model import Model
from areal_jax.replay.folder_audit import audit_run
from areal_jax.report.reading import view_sample
from areal_jax.tasks.errors import TaskError
from areal_jax.tasks.hf_tokenizer import HFTokenizer
from areal_jax.tasks.source import load_tasks
from areal_jax.tasks.tokenizers import ByteTokenizer, CharTokenizer
from areal_jax.types import ArealError
from areal_jax.weights.digest import digest
from tests.tasks.test_hf_tokenizer import write

SIZES = dict(family="llama", layers=2, width=16, heads=2, kv_heads=1, head_dim=8, mlp_width=24)


def make_folder(parent: Path, vocab_size: int = 272, is_empty: bool = False) -> Path:
    """A random or empty model with a byte-level tokenizer of 264 ids, as transformers would write it."""
    tokenizer = write(parent / "tokenizer")
    sizes = ModelConfig(vocab_size=vocab_size, **SIZES)
    model = Model(sizes, HFTokenizer.from_folder(tokenizer))
    params = (
        jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), model.abstract_params)
        if is_empty
        else model.init(3)
    )
    export_folder(parent / "model", sizes, params, tokenizer_from=tokenizer)
    return parent / "model"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("source"))


def configured(source: object, *words: str) -> Config:
    return load_config("tasks=arithmetic", f"model.source={source}", *words)


def opened(config: Config):
    return open_source(config, load_tasks(config.tasks))


def test_a_folder_gives_its_own_sizes_tokenizer_and_parameters(folder):
    source = opened(configured(folder, "model.dtype=bfloat16"))
    dtypes = dict(dtype="bfloat16", params_dtype="bfloat16")
    assert source.model.config == ModelConfig(vocab_size=272, **dtypes, **SIZES)
    assert (source.model.tokenizer.vocab_size, source.folder) == (264, folder)
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(source.load(None)))
    model, params = load_model(str(folder))
    want = Model(model.config, model.tokenizer).init(3)
    jax.tree.map(np.testing.assert_array_equal, params, want)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model.overrides={layers: 3}"], "model.overrides=.*cannot change the sizes of model.source"),
        (["model.tokenizer=byte"], "model.tokenizer=byte contradicts model.source"),
        (["tasks=countdown"], "tasks.countdown requires its own tokenizer"),
    ],
)
def test_settings_that_contradict_a_pretrained_model_are_refused(folder, words, message):
    with pytest.raises(ArealError, match=message):
        opened(configured(folder, *words))


def test_a_source_that_does_not_exist_names_what_can_be_given():
    with pytest.raises(
        ArealError, match=r"model.source=smolm2: .*random, smollm2, a folder.*GGUF.*run's folder"
    ):
        opened(configured("smolm2"))


def test_a_package_that_is_missing_is_named_with_its_extra(folder, monkeypatch):
    for name in ("areal_jax.models.io.huggingface", "areal_jax.tasks.hf_tokenizer"):
        monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.delattr(name, raising=False)  # the end puts both back
    monkeypatch.setitem(sys.modules, "tokenizers", None)  # Python's way of saying that it is not there
    with pytest.raises(ArealError, match=r"needs the package tokenizers: pip install '\.\[pretrained\]'"):
        opened(configured(folder))
    with pytest.raises(ArealError, match=r"needs the package tokenizers: pip install '\.\[pretrained\]'"):
        open_tokenizer(configured(folder), {})
    assert isinstance(
        open_tokenizer(load_config("run.name=random"), {}), ByteTokenizer
    )  # it needs no package


def test_readers_and_the_model_have_one_tokenizer(folder):
    tokens = HFTokenizer.from_folder(folder).encode("a b")
    assert open_tokenizer(configured(folder), {}).encode("a b") == tokens
    assert opened(configured(folder)).model.tokenizer.encode("a b") == tokens


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(tmp_path):
    with pytest.raises(TaskError, match=r"ids up to 263.* 260 embeddings"):
        opened(configured(make_folder(tmp_path, vocab_size=260, is_empty=True)))


@pytest.mark.slow
def test_a_run_trains_a_pretrained_model_and_reads_its_own_tokens(folder, tmp_path):
    config = configured(
        folder,
        f"run.dir={tmp_path / 'run'}",
        "run.steps=2",
        "algorithm.group_size=2",
        "trainer.batch_size=2",
        "trainer.rows=4",
        "algorithm.entropy_coef=0.01",  # rewards are all 0: the bonus moves the parameters
        "generation.length=160",
        "generation.max_tokens=8",
        "observe.tensorboard=false",
        "runtime.deadline_s=600",
    )
    rows = run(config, stream=io.StringIO()).metrics
    assert len({row["params_digest"] for row in rows}) == 2
    assert audit_run(tmp_path / "run").ok
    again, params = load_model(str(tmp_path / "run"))  # the run as a source of its own
    assert (again.config, again.tokenizer) == (opened(config).model.config, opened(config).model.tokenizer)
    assert digest(params) == rows[-1]["params_digest"]
    convert(str(tmp_path / "run"), tmp_path / "out")
    assert digest(load_model(str(tmp_path / "out"))[1]) == rows[-1]["params_digest"]
    view = view_sample(tmp_path / "run", "0/0")
    assert "Answer with a number." in view.prompt and "What is" in view.prompt
    assert view.reward == 0


def taught(teacher: object, *words: str):
    config = load_config(
        "tasks=arithmetic", "algorithm.preset=distillation", f"algorithm.teacher={teacher}", *words
    )
    tasks = load_tasks(config.tasks)
    return open_teacher(config, tasks, open_source(config, tasks).model)


def test_a_teacher_is_a_source_of_its_own_sizes(folder):
    teacher = taught(folder, f"model.source={folder}", "model.dtype=bfloat16")
    assert teacher.model.config == ModelConfig(vocab_size=272, dtype="bfloat16", **SIZES)


def test_a_teacher_of_another_vocabulary_is_refused(folder):
    with pytest.raises(
        ArealError, match=r"algorithm.teacher=.* a different vocabulary.*vocab_size is 264.* 258"
    ):
        taught(folder)


def test_a_teacher_that_is_not_there_is_named_by_its_key():
    with pytest.raises(ArealError, match=r"algorithm.teacher=nowhere: .*no such file or folder"):
        taught("nowhere")
    with pytest.raises(ArealError, match=r"algorithm.teacher=random is untrained and cannot be a teacher"):
        taught("random")


def test_vocabularies_are_compared_id_by_id():
    assert _other_ids(CharTokenizer("abc"), CharTokenizer("abc")) is None
    assert (
        _other_ids(CharTokenizer("abc"), CharTokenizer("acb"))
        == "the token id 3 stands for 'c' in the teacher, but for 'b' in the student"
    )
    assert "vocab_size is 258" in str(_other_ids(CharTokenizer("abc"), ByteTokenizer()))
