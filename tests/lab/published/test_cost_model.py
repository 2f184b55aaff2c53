"""Cost models: the fit of measured figures, and figures that are missing or make no sense."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest

from areal_jax.lab.published.cost_model import FIGURES, fitted
from areal_jax.types import ArealError


def figures(**other: Any) -> dict[str, Any]:
    """A call of 4 steps takes 0.08 s and, for each live slot, 0.002 s more."""
    calls = {live: 0.08 + 0.002 * live for live in (1, 8, 32)}
    plain = dict.fromkeys(FIGURES, 0.5) | {"decode_call_s": calls, "decode_steps": 4}
    return plain | other


def test_the_fit_finds_the_parameters_of_calls_that_follow_the_model():
    found = fitted(figures(train_s=1.5, move_s=0.25))
    assert found.token_s == pytest.approx(0.02)
    assert found.crowd_slots == pytest.approx(40.0)
    assert (found.train_s, found.move_s, found.swap_s, found.jitter, found.faults) == (
        1.5,
        0.25,
        0.5,
        0.0,
        (),
    )


def test_a_file_names_numbers_of_slots_as_text():
    calls = {str(live): seconds for live, seconds in figures()["decode_call_s"].items()}
    assert fitted(figures(decode_call_s=calls)) == fitted(figures())


def test_calls_that_do_not_grow_with_live_slots_have_no_crowd():
    found = fitted(figures(decode_call_s={1: 0.5, 16: 0.3}))
    assert (found.token_s, found.crowd_slots) == (pytest.approx(0.1), inf)


@pytest.mark.parametrize("name", FIGURES)
def test_a_missing_figure_is_named_with_its_meaning_and_a_remedy(name: str):
    with pytest.raises(ArealError, match=rf"lacks {name} \(.*`areal-jax bench costs`"):
        fitted({key: value for key, value in figures().items() if key != name})


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"train_s": "fast"}, "train_s='fast' is not a number of at least 0"),
        ({"swap_s": -1}, "swap_s=-1 is not a number of at least 0"),
        ({"reward_s": float("nan")}, "reward_s=nan is not a number"),
        ({"decode_call_s": {4: 0.1}}, "at least two numbers of live slots"),
    ],
)
def test_a_figure_that_makes_no_sense_is_refused(wrong: dict[str, Any], says: str):
    with pytest.raises(ArealError, match=says):
        fitted(figures(**wrong))
