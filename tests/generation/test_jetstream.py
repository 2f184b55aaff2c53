"""Our engine as JetStream's: its Driver serves tokens, its columns carry ours."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from areal_jax.assembly.run_folder import open_journal
from areal_jax.control.events import VersionCommitted
from areal_jax.generation import jetstream
from areal_jax.generation.engine import Engine
from areal_jax.tasks.tokenizers import ByteTokenizer
from areal_jax.types import ArealError, SampleId, Sampling
from tests.generation.conftest import LENGTH, SLOTS, STEPS, make_engine
from tests.generation.decoding import Asked, decode
from tests.hangs import HANG_S

ROOT = Path(__file__).parents[2]
PROMPT = (5, 9, 2, 14, 3)


@pytest.fixture(scope="module")
def greedy(model) -> Engine:
    return make_engine(model, sampling=Sampling(temperature=0.0, max_tokens=9))


def started(engine, params, prompt=PROMPT, slot=1):
    prefix = engine.prefill(params=params, padded_tokens=np.array(prompt), true_length=len(prompt))
    return engine.insert(prefix, engine.init_decode_state(), slot=slot)


@pytest.fixture
def loaded(engine, versions):
    """Version -> its parameters, as a host loads them."""
    return lambda version: engine.load_params(versions(version))


@pytest.mark.slow
def test_the_stock_driver_and_a_bare_loop_get_the_hosts_tokens_from_a_runs_own_engine():
    done = subprocess.run(
        [sys.executable, "-m", "tests.generation.stock_driver"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.startswith("{"), done.stdout + done.stderr[-4000:]
    found = json.loads(done.stdout)
    by_tokens, by_text = found["driver"]["tokens"], found["driver"]["text"]
    assert [*by_tokens, *(tokens for tokens, _ in by_text)] == found["host"] == found["loop"]
    assert all(len(tokens) == 12 for tokens in found["host"])
    assert len({tuple(tokens) for tokens in found["host"]}) == len(found["host"])
    for tokens, text in by_text:  # a token at a time, so a character of several bytes is never whole
        assert text == "".join(found["decoded"][token] for token in tokens)


@pytest.mark.slow
def test_the_engine_is_jetstreams_and_importing_it_brings_no_more_of_the_package():
    report = """
import json, logging, sys
from areal_jax.generation.engine import Engine
from areal_jax.generation.programs import ResultTokens
root, absent = logging.getLogger(), {"seqio", "tensorflow", "jetstream.core.orchestrator"}
print(json.dumps({
    "bases": [base.__module__ for kind in (Engine, ResultTokens) for base in kind.__bases__],
    "modules": sorted(absent & set(sys.modules)), "level": root.level, "handlers": len(root.handlers)}))
"""
    done = subprocess.run(
        [sys.executable, "-c", report], cwd=ROOT, capture_output=True, text=True, timeout=HANG_S
    )
    assert json.loads(done.stdout) == {
        "bases": ["jetstream.engine.engine_api"] * 2,
        "modules": [],
        "level": logging.WARNING,
        "handlers": 0,
    }


def test_it_implements_jetstreams_twelve_members(engine):
    assert isinstance(engine, jetstream.engine_api().Engine)
    assert len(jetstream.engine_api().Engine.__abstractmethods__) == 12
    assert Engine.__abstractmethods__ == frozenset()
    assert engine.max_concurrent_decodes == SLOTS
    assert engine.samples_per_slot == 1
    assert engine.max_prefill_length == LENGTH


def test_log_probs_and_the_version_ride_along_in_the_columns(greedy, versions, loaded):
    _, results = greedy.generate(loaded(1), started(greedy, loaded(1)))
    results = results.convert_to_numpy()
    assert isinstance(results, jetstream.engine_api().ResultTokens)
    data = results.get_result_at_slot(1)
    assert isinstance(data, jetstream.engine_api().SlotData)
    asked = Asked(PROMPT, SampleId(0, 0), Sampling(0.0, max_tokens=9))
    same = decode(greedy, versions(1), {1: asked})[1]
    own = slice(len(PROMPT), len(PROMPT) + STEPS)
    np.testing.assert_array_equal(data.tokens[0], same.tokens[own])
    np.testing.assert_array_equal(data.logp[0], same.behavior_logp[own])
    assert (data.logp < 0).all() and data.version.tolist() == [1]
    assert data.valid.tolist() == [[1] * STEPS]
    assert data.lengths.tolist() == [STEPS]  # of the completion, which is what max_tokens bounds
    assert results.get_result_at_slot(0).valid.tolist() == [[0] * STEPS]


def test_a_sample_without_a_request_ends_at_the_default_number_of_tokens_or_at_the_eos(
    greedy, versions, loaded
):
    asked = Asked(PROMPT, SampleId(0, 0), Sampling(0.0, max_tokens=9), (greedy.tokenizer.eos_id,))
    expected = decode(greedy, versions(0), {1: asked})[1].tokens[len(PROMPT) :].tolist()
    state, found = started(greedy, loaded(0)), []
    for _ in range(LENGTH):
        state, results = greedy.generate(loaded(0), state)
        data = results.convert_to_numpy().get_result_at_slot(1)
        found += data.tokens[0][data.valid[0] == 1].tolist()
    assert found == expected


def test_a_fresh_decode_state_counts_samples_without_a_request_anew(engine, versions, loaded):
    """Sampled, not greedy: the two samples differ, and a fresh state draws both again."""
    alike = []
    for _ in range(2):
        state = started(engine, loaded(0), slot=0)
        prefix = engine.prefill(params=loaded(0), padded_tokens=np.array(PROMPT), true_length=len(PROMPT))
        state = engine.insert(prefix, state, slot=1)
        found: list[list[int]] = [[], []]
        for _ in range(4):
            state, results = engine.generate(loaded(0), state)
            rows = results.rows
            for slot in (0, 1):
                found[slot] += rows["tokens"][slot][rows["valid"][slot] == 1].tolist()
        alike.append(found)
    assert alike[0] == alike[1] and alike[0][0] != alike[0][1]
    stops = (engine.tokenizer.eos_id,)
    asked = {slot: Asked(PROMPT, SampleId(slot, 0), stops=stops) for slot in (0, 1)}
    named = decode(engine, versions(0), asked)
    assert alike[0] == [named[slot].tokens[len(PROMPT) :][: 4 * STEPS].tolist() for slot in (0, 1)]


def test_converting_twice_changes_nothing(greedy, loaded):
    _, results = greedy.generate(loaded(0), started(greedy, loaded(0)))
    once = results.convert_to_numpy()
    np.testing.assert_array_equal(once.convert_to_numpy().data, once.data)


def test_the_later_signatures_fit_too(greedy, loaded):
    prefix = greedy.prefill(
        params=loaded(0), padded_tokens=np.array(PROMPT), true_length=5, sampler=None, request_id="a", rng=0
    )
    state = greedy.insert(prefix, greedy.init_decode_state(), slot=2, request_id="a")
    state, _ = greedy.generate(loaded(0), state, sampler=None)
    assert np.flatnonzero(state.is_live).tolist() == [2]
    greedy.free_resource(2)
    state, results = greedy.generate(loaded(0), state)
    assert not np.asarray(state.is_live).any()
    assert not results.convert_to_numpy().get_result_at_slot(2).valid.any()


def test_a_freed_slot_that_is_filled_again_stays_live(greedy, loaded):
    state = started(greedy, loaded(0), slot=2)
    greedy.free_resource(2)
    prefix = greedy.prefill(params=loaded(0), padded_tokens=np.array(PROMPT), true_length=5)
    state = greedy.insert(prefix, state, slot=2)
    state, _ = greedy.generate(loaded(0), state)
    assert np.flatnonzero(state.is_live).tolist() == [2]


def test_a_sampler_and_a_prompt_cut_on_the_left_are_refused(engine, versions):
    with pytest.raises(ArealError, match=r"sampler=.*is not supported"):
        engine.generate(versions(0), engine.init_decode_state(), sampler=print)
    with pytest.raises(ArealError, match=r"true_length=6 exceeds the 5 given tokens.*cut"):
        engine.prefill(params=versions(0), padded_tokens=np.array(PROMPT), true_length=6)


def test_jetstream_is_imported_in_one_file():
    lines = re.compile(r"""^\s*(from|import) jetstream\b|import_module\(f?"jetstream""", re.MULTILINE)
    found = [path.name for path in (ROOT / "areal_jax").rglob("*.py") if lines.search(path.read_text())]
    assert found == ["jetstream.py"]


BLOCKED = """
import sys
sys.modules["jetstream"] = None  # its import fails, as where the package is absent
from areal_jax.generation import jetstream
from areal_jax.generation.engine import Engine
assert Engine.__bases__[0].__module__ == jetstream.__name__
from areal_jax.cli.main import app
app()
"""


@pytest.mark.slow
def test_without_the_package_a_run_ends_with_the_same_digests(tmp_path):
    """The quickstart at eta = 0, with fewer steps."""
    words = ["quickstart", "control.max_staleness=0", "run.steps=6", "observe.report=false"]
    finals = []
    for name, program in {"with": ["-m", "areal_jax.cli.main"], "without": ["-c", BLOCKED]}.items():
        words_of = [*words, f"run.dir={tmp_path / name}"]
        done = subprocess.run(
            [sys.executable, *program, *words_of],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=3 * HANG_S,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        with open_journal(tmp_path / name) as journal:
            events = [row.event for row in journal.rows()]
        finals.append([event.digest for event in events if isinstance(event, VersionCommitted)])
    assert len(finals[0]) == 6 and finals[0] == finals[1]


def test_bos_is_prepended_once_and_only_where_asked():
    tokenizer = jetstream.TokenizerAdapter(ByteTokenizer())
    tokens, length = tokenizer.encode("hi", max_prefill_length=16, jax_padding=False)
    assert (tokens[:length].tolist(), len(tokens)) == ([256, 104, 105], 16)
    tokens, length = tokenizer.encode("hi", is_bos=False, max_prefill_length=16, jax_padding=False)
    assert tokens[:length].tolist() == [104, 105]
    assert tokenizer.stop_tokens == {257}


@pytest.mark.parametrize("found", ["0.2.1", "0.3.0", "1.0"])
def test_another_version_is_refused_with_the_remedy(monkeypatch, found):
    monkeypatch.setattr(jetstream.metadata, "version", lambda _: found)
    with pytest.raises(ArealError, match=rf"google-jetstream {found} is installed.*pip install"):
        jetstream.require_version()


@pytest.mark.parametrize("found", ["0.2.2", "0.2.9", "0.2.2.post1"])
def test_versions_from_0_2_2_on_are_taken(monkeypatch, found):
    monkeypatch.setattr(jetstream.metadata, "version", lambda _: found)
    assert jetstream.require_version() == found


def test_a_missing_package_is_an_error_that_says_how_to_get_it():
    with pytest.raises(ArealError, match=r"no-such-package is not installed; pip install '\.\[se"):
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
