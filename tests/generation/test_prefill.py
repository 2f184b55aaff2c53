"""Prompts prefilled together: each has the bits that it has alone, and few calls compute them all."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import numpy as np
import pytest

from areal_jax.control.events import SampleFailed
from areal_jax.generation.commands import Start, Stop
from areal_jax.generation.engine import Engine, Prefilling
from areal_jax.generation.slots import ExistingPrefix
from areal_jax.types import ArealError, SampleId, Sampling, VersionedParams
from tests.generation.conftest import LENGTH, make_engine
from tests.generation.decoding import Heard, make_host, start

pytestmark = pytest.mark.all_optimizations  # the other files' programs of this model

ROWS, WIDTH = 3, 4
LENGTHS = (3, 8, 1, 6)
"""Of prompts: 1, 2, 0 and 2 rows, and a page each."""


@pytest.fixture(scope="module")
def in_rows(model) -> Engine:
    return make_engine(model, slots=2, prefill_chunk=ROWS * WIDTH + 1, prefill_row=WIDTH)


def prompts(lengths: tuple[int, ...] = LENGTHS) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 17, count, np.int32) for count in lengths]


def finished(engine: Engine, params: VersionedParams, prefilling: Prefilling) -> Iterator[list[int]]:
    """Yields how many tokens of each prompt are computed after each call; at the end all prefixes are equal
    to those of prompts that are prefilled alone, to the bit.
    """
    while not prefilling.is_complete:
        prefilling = engine.prefill_next(params, prefilling)
        yield [prompt.done for prompt in prefilling.prompts]
    for prompt, prefix in zip(prefilling.prompts, engine.prefixes(prefilling), strict=True):
        tokens = prompt.tokens[: prompt.count]
        alone = engine.prefill(params=params, padded_tokens=tokens, true_length=prompt.count)
        np.testing.assert_array_equal(prefix.tokens, alone.tokens)
        assert prefix.true_length == alone.true_length == prompt.count
        known = prompt.count - 1
        for one, other in zip(kv(prefix.cache, known), kv(alone.cache, known), strict=True):
            np.testing.assert_array_equal(one, other)
            assert not known or np.abs(one).min() > 0


def kv(cache, count: int) -> list[np.ndarray]:
    """Keys and values of the first `count` tokens, (layers, kv heads, count, head_dim)."""
    leaves = (np.moveaxis(np.asarray(leaf)[:, 1:], 1, 2) for leaf in jax.tree.leaves(cache))
    return [leaf.reshape(*leaf.shape[:2], -1, leaf.shape[-1])[:, :, :count] for leaf in leaves]


def test_a_call_computes_the_next_rows_of_the_first_prompts_that_lack_some(in_rows, versions):
    assert (in_rows.prefill_rows, in_rows.prefill_width) == (ROWS, WIDTH)
    assert [in_rows.prefill_rows_for(count) for count in LENGTHS] == [1, 2, 0, 2]
    calls = list(finished(in_rows, versions(0), in_rows.begin_prefill(prompts())))
    assert calls == [[4, 8, 0, 0], [4, 8, 0, 8]]


def test_all_rows_of_a_call_may_be_of_one_prompt(in_rows, versions):
    calls = list(finished(in_rows, versions(0), in_rows.begin_prefill(prompts((23,)))))
    assert calls == [[12], [24]]


def test_a_prompt_goes_on_after_what_is_kept_of_it_beside_others(in_rows, versions):
    tokens = prompts((14, 5))
    alone = in_rows.prefill(params=versions(0), padded_tokens=tokens[0], true_length=14)
    kept = ExistingPrefix(jax.device_get(alone.cache), tokens[0][:10])
    begun = in_rows.begin_prefill(tokens, [kept, None])
    assert [prompt.done for prompt in begun.prompts] == [10, 0]
    assert list(finished(in_rows, versions(0), begun)) == [[14, 4]]


def test_prompts_of_more_pages_than_a_slot_are_refused(in_rows):
    with pytest.raises(ArealError, match="3 prompts of 26 tokens need more than the 4 KV pages, of 8 tokens"):
        in_rows.begin_prefill(prompts((9, 9, 8)))


def test_where_a_slot_is_a_page_a_prefill_has_a_page_for_each_row(model, versions):
    engine = make_engine(model, page_tokens=None, prefill_chunk=ROWS * WIDTH, prefill_row=WIDTH)
    assert (engine.pages_per_slot, engine.prefill_pages) == (1, ROWS)
    assert list(finished(engine, versions(0), engine.begin_prefill(prompts((5, 3, 4))))) == [[4, 4, 4]]


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_host_prefills_the_next_prompts_with_the_first(in_rows, store, versions, dense, monkeypatch, ahead):
    """Six prompts in two slots: calls of three, of which each sample is as if its prompt were alone."""
    calls = counted(in_rows, monkeypatch)
    heard = Heard()
    host = make_host(in_rows, store, heard, sampling=Sampling(max_tokens=6), calls_ahead=ahead)
    for ordinal, prompt in enumerate(prompts((4, 5, 3, 5, 2, 5))):
        host.inbox.put(start(ordinal, 2, prompt.tolist()))
    host.take_commands()
    while host.has_work:
        host.step()
    assert calls == [[4, 5, 3], [5, 2, 5]]
    now = host.statistics()
    assert (now.prefills, now.prefilled_tokens) == (6, 4 + 5 + 3 + 5 + 2 + 5 - 6)
    assert not host._admission.rollouts.prefixes
    assert len(heard.done) == 12
    for one in heard.done.values():
        gap = np.abs(one.behavior_logp - dense(versions(0).params, one))
        assert gap[one.loss_mask].max() < 1e-5


def counted(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The lengths of the prompts of each prefill that began."""
    found, begin = [], engine.begin_prefill

    def counting(prompts, existing=()):
        found.append([len(prompt) for prompt in prompts])
        return begin(prompts, existing)

    monkeypatch.setattr(engine, "begin_prefill", counting)
    return found


def test_only_prompts_that_can_start_now_are_prefilled_together(in_rows, store, versions, monkeypatch):
    """The third needs a version that is not there, and a swap begins what no sample has used again."""
    calls, heard = counted(in_rows, monkeypatch), Heard()
    host = make_host(in_rows, store, heard, sampling=Sampling(max_tokens=6))
    for ordinal, (prompt, version) in enumerate(zip(prompts((4, 5, 3)), (0, 0, 1), strict=True)):
        host.inbox.put(start(ordinal, 2, prompt.tolist(), min_version=version))
    host.take_commands()
    host.step()
    assert calls == [[4, 5]]
    store.publish(versions(1))
    while host.has_work:
        host.step()
    assert calls == [[4, 5], [5, 3]]
    spans = {sample.ordinal: [span.version for span in one.spans] for sample, one in heard.done.items()}
    assert spans == {0: [0, 1], 1: [1], 2: [1]}


def test_what_no_waiting_sample_needs_is_not_kept(in_rows, store, monkeypatch):
    """One prompt is cancelled in the middle of its prefill beside another one, and one after it."""
    calls, heard = counted(in_rows, monkeypatch), Heard()
    host = make_host(in_rows, store, heard, sampling=Sampling(max_tokens=6))
    rollouts = host._admission.rollouts
    for ordinal, prompt in enumerate(prompts((3, 4, 5))):
        host.inbox.put(start(ordinal, 2, prompt.tolist()))
    host.take_commands()
    host.step()
    assert calls == [[3, 4, 5]] and [key[0] for key in rollouts.prefixes] == [1, 2]
    host.inbox.put(Stop((SampleId(2, 0), SampleId(2, 1))))
    host.take_commands()
    assert [key[0] for key in rollouts.prefixes] == [1]
    while host.has_work:
        host.step()
    assert calls == [[3, 4, 5]] and not rollouts.prefixes
    assert {sample.ordinal for sample in heard.done} == {0, 1}


def test_a_prompt_that_is_cancelled_in_the_middle_of_a_prefill_stops_no_other(
    in_rows, store, versions, dense, monkeypatch
):
    calls, heard = counted(in_rows, monkeypatch), Heard()
    monkeypatch.setattr("areal_jax.generation.admission.CHUNKS", 1)
    host = make_host(in_rows, store, heard, sampling=Sampling(max_tokens=6))
    rollouts = host._admission.rollouts
    for ordinal, prompt in enumerate(prompts((2, 19, 3))):  # 5 of 6 rows
        host.inbox.put(start(ordinal, 1, prompt.tolist()))
        host.take_commands()
        if not ordinal:
            host.step()
    host.step()
    assert calls == [[2], [19, 3]] and rollouts.begun is not None
    host.inbox.put(Stop((SampleId(2, 0),)))
    host.take_commands()
    assert rollouts.begun is not None
    while host.has_work:
        host.step()
    assert calls == [[2], [19, 3]] and not rollouts.prefixes and rollouts.begun is None
    assert {sample.ordinal for sample in heard.done} == {0, 1}
    for one in heard.done.values():
        gap = np.abs(one.behavior_logp - dense(versions(0).params, one))
        assert gap[one.loss_mask].max() < 1e-5


def test_later_turns_are_prefilled_together_after_what_is_kept_of_each(in_rows, store, versions, dense):
    heard, ended = Heard(), {}
    host = make_host(in_rows, store, heard, sampling=Sampling(max_tokens=3))
    for turn in range(2):
        for member, prompt in enumerate(prompts((5, 4))):
            before = ended.get(member, prompt.tolist()) + [member] * turn
            assert len(before) < LENGTH
            host.inbox.put(Start((SampleId(0, member),), tuple(before), 0, turn=turn))
        host.take_commands()
        while host.has_work:
            host.step()
        for member in range(2):
            one = heard.done.pop(SampleId(0, member))
            gap = np.abs(one.behavior_logp - dense(versions(0).params, one))
            assert gap[one.loss_mask].max() < 1e-5
            ended[member] = one.tokens.tolist()
    now = host.statistics()
    assert (now.prefills, now.prefilled_tokens, now.reused_tokens) == (4, 5 + 4 - 2 + 2, 5 + 4 + 2 * 2)
    assert not heard.of(SampleFailed)
