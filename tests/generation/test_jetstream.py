"""JetStream's own classes over our engine: its Driver serves tokens, its columns carry ours."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from areal_jax.generation import jetstream
from areal_jax.generation.jetstream import JetStreamEngine, engine_api
from areal_jax.tasks.tokenizers import ByteTokenizer
from areal_jax.types import ArealError, Sampling
from tests.generation.conftest import LENGTH, STEPS

ROOT = Path(__file__).parents[2]
PROMPT = (5, 9, 2, 14, 3)


@pytest.fixture
def served(engine) -> JetStreamEngine:
    return JetStreamEngine(engine, Sampling(temperature=0.0, max_tokens=9))


def started(served, params, prompt=PROMPT, slot=1):
    prefix = served.prefill(params=params, padded_tokens=np.array(prompt), true_length=len(prompt))
    return served.insert(prefix, served.init_decode_state(), slot=slot)


def test_the_stock_driver_serves_the_tokens_of_our_host():
    done = subprocess.run(
        [sys.executable, "-m", "tests.generation.stock_driver"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.startswith("{"), done.stdout + done.stderr[-4000:]
    found = json.loads(done.stdout)
    by_tokens, by_text = found["driver"]["tokens"], found["driver"]["text"]
    assert [*by_tokens, *(tokens for tokens, _ in by_text)] == found["host"]
    assert all(len(tokens) == 12 for tokens in found["host"])
    for tokens, text in by_text:  # a token at a time, so a character of several bytes is never whole
        assert text == "".join(ByteTokenizer().decode([token]) for token in tokens)
    assert found["process"] == {"modules": [], "level": logging.WARNING, "handlers": []}


def test_it_is_an_engine_of_jetstreams(served, engine):
    assert isinstance(served, engine_api.Engine)
    assert len(engine_api.Engine.__abstractmethods__) == 12
    assert JetStreamEngine.__abstractmethods__ == frozenset()
    assert served.max_concurrent_decodes == engine.slots
    assert served.samples_per_slot == 1
    assert served.max_prefill_length == LENGTH


def test_log_probs_and_the_version_ride_along_in_the_columns(served, engine, versions):
    state = started(served, versions(1))
    _, theirs = served.generate(versions(1), state)
    _, ours = engine.generate(versions(1), started(served, versions(1)))
    theirs, ours = theirs.convert_to_numpy(), ours.convert_to_numpy()
    assert isinstance(theirs, engine_api.ResultTokens)
    data = theirs.get_result_at_slot(1)
    np.testing.assert_array_equal(data.tokens, ours.tokens[1:2])
    np.testing.assert_array_equal(data.logp, ours.logp[1:2])
    assert (data.logp < 0).all() and data.version.tolist() == [1]
    assert data.valid.tolist() == [[1] * STEPS]
    assert data.lengths.tolist() == [STEPS]  # of the completion, which is what max_tokens bounds
    assert theirs.get_result_at_slot(0).valid.tolist() == [[0] * STEPS]


def test_converting_twice_changes_nothing(served, versions):
    _, results = served.generate(versions(0), started(served, versions(0)))
    once = results.convert_to_numpy()
    np.testing.assert_array_equal(once.convert_to_numpy().data, once.data)


def test_the_later_signatures_fit_too(served, versions):
    prefix = served.prefill(
        params=versions(0), padded_tokens=np.array(PROMPT), true_length=5, sampler=None, request_id="a", rng=0
    )
    state = served.insert(prefix, served.init_decode_state(), slot=2, request_id="a")
    state, _ = served.generate(versions(0), state, sampler=None)
    assert np.flatnonzero(state.is_live).tolist() == [2]
    served.free_resource(2)
    state, results = served.generate(versions(0), state)
    assert not np.asarray(state.is_live).any()
    assert not results.convert_to_numpy().get_result_at_slot(2).valid.any()


def test_a_freed_slot_that_is_filled_again_stays_live(served, versions):
    state = started(served, versions(0), slot=2)
    served.free_resource(2)
    prefix = served.prefill(params=versions(0), padded_tokens=np.array(PROMPT), true_length=5)
    state = served.insert(prefix, state, slot=2)
    state, _ = served.generate(versions(0), state)
    assert np.flatnonzero(state.is_live).tolist() == [2]


def test_a_sampler_and_a_prompt_cut_on_the_left_are_refused(served, versions):
    with pytest.raises(ArealError, match=r"sampler=.*on the device"):
        served.generate(versions(0), served.init_decode_state(), sampler=print)
    with pytest.raises(ArealError, match=r"true_length=6 with 5 tokens.*cut"):
        served.prefill(params=versions(0), padded_tokens=np.array(PROMPT), true_length=6)


def test_jetstream_is_imported_in_one_file():
    lines = re.compile(r"^\s*(from|import) jetstream\b", re.MULTILINE)
    found = [path.name for path in (ROOT / "areal_jax").rglob("*.py") if lines.search(path.read_text())]
    assert found == ["jetstream.py"]


def test_bos_is_prepended_once_and_only_where_asked():
    tokenizer = jetstream.Tokenizer(ByteTokenizer())
    tokens, length = tokenizer.encode("hi", max_prefill_length=16, jax_padding=False)
    assert (tokens[:length].tolist(), len(tokens)) == ([256, 104, 105], 16)
    tokens, length = tokenizer.encode("hi", is_bos=False, max_prefill_length=16, jax_padding=False)
    assert tokens[:length].tolist() == [104, 105]
    assert tokenizer.stop_tokens == {257}


@pytest.mark.parametrize("found", ["0.2.1", "0.3.0", "1.0"])
def test_another_version_is_refused_with_the_remedy(monkeypatch, found):
    monkeypatch.setattr(jetstream.metadata, "version", lambda _: found)
    with pytest.raises(ArealError, match=rf"google-jetstream is {found}.*pip install"):
        jetstream.require_version()


@pytest.mark.parametrize("found", ["0.2.2", "0.2.9", "0.2.2.post1"])
def test_versions_from_0_2_2_on_are_taken(monkeypatch, found):
    monkeypatch.setattr(jetstream.metadata, "version", lambda _: found)
    assert jetstream.require_version() == found


def test_a_missing_package_is_an_error_that_says_how_to_get_it():
    with pytest.raises(ArealError, match=r"no-such-package is not installed; pip install 'areal-jax\[se"):
        jetstream.require_version("no-such-package")


def test_a_real_seqio_stays_importable_and_an_imported_one_is_left_alone(tmp_path, monkeypatch):
    (tmp_path / "seqio").mkdir()
    (tmp_path / "seqio" / "__init__.py").write_text("is_real = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "seqio", raising=False)
    with jetstream.without_seqio():
        assert not hasattr(sys.modules["seqio"], "is_real")
    assert "seqio.vocabularies" not in sys.modules
    import seqio  # pyright: ignore[reportMissingImports]

    assert seqio.is_real
    with jetstream.without_seqio():
        assert sys.modules["seqio"] is seqio
    assert sys.modules.pop("seqio") is seqio


def test_the_root_logger_is_put_back():
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    with jetstream.root_logger_kept():
        root.setLevel(logging.DEBUG)
        root.addHandler(logging.StreamHandler())
    assert (root.level, root.handlers) == (level, handlers)
