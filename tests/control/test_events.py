"""The wire form of events and actions: what goes in comes out, through msgpack and from older journals."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_jax.control import events as e
from areal_jax.types import SampleId, VersionSpan

numbers = st.integers(0, 2**40)
names = st.text(max_size=8)
samples = st.builds(SampleId, numbers, numbers, numbers)
spans = st.lists(st.builds(VersionSpan, numbers, numbers, numbers), max_size=3).map(tuple)


def records(kinds: dict[str, type]) -> st.SearchStrategy:
    """Any record of these kinds, its fields drawn by their annotations."""
    fields = {
        "int": numbers,
        "str": names,
        "SampleId": samples,
        "tuple[SampleId, ...]": st.lists(samples, max_size=3).map(tuple),
        "tuple[VersionSpan, ...]": spans,
        "tuple[str, ...]": st.lists(names, max_size=3).map(tuple),
        "tuple[int, ...]": st.lists(numbers, max_size=3).map(tuple),
        "tuple[float, ...]": st.lists(st.floats(allow_nan=False), max_size=3).map(tuple),
        "tuple[tuple[tuple[str, float], ...], ...]": st.lists(
            st.lists(st.tuples(names, st.floats(allow_nan=False)), max_size=2).map(tuple), max_size=2
        ).map(tuple),
        "tuple[tuple[str, float], ...]": st.lists(
            st.tuples(names, st.floats(allow_nan=False)), max_size=2
        ).map(tuple),
        "float | None": st.none() | st.floats(allow_nan=False),
        "int | None": st.none() | numbers,
        "tuple[tuple[str, int], ...]": st.lists(st.tuples(names, numbers), max_size=2).map(tuple),
        "tuple[tuple[str, bool], ...]": st.lists(st.tuples(names, st.booleans()), max_size=2).map(tuple),
        "dict[str, Any]": st.dictionaries(names, st.one_of(numbers, names), max_size=2),
    }
    return st.one_of(
        st.builds(kind, **{name: fields[hint] for name, hint in kind.__annotations__.items()})
        for kind in kinds.values()
    )


@pytest.mark.parametrize("kinds", [e.EVENTS, e.ACTIONS], ids=["events", "actions"])
@given(data=st.data())
def test_a_record_survives_msgpack(kinds, data):
    record = data.draw(records(kinds))
    name, values = msgpack.unpackb(msgpack.packb(e.to_wire(record)))
    restored = e.from_wire(name, values, kinds)
    assert restored == record
    assert type(restored) is type(record)
    for attribute in ("sample", "samples", "spans"):
        assert repr(getattr(restored, attribute, None)) == repr(getattr(record, attribute, None))


def test_a_journal_written_before_a_field_was_added_reads_on():
    assert e.from_wire("RunStarted", ["d0"], e.EVENTS) == e.RunStarted("d0", steps=0)


def test_an_unknown_name_is_an_error():
    with pytest.raises(KeyError):
        e.from_wire("Surprise", [], e.EVENTS)
