"""The comparison of two checkouts: when it says that one is slower, and which one it runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import cycle

import pytest

from tests.peers import checkouts

MOVES = (0.0, 0.3, -0.2, 0.1, -0.1, 0.2, -0.3, 0.05, -0.05)
"""Of the machine's speed, which both of a pair share."""


def test_the_interval_covers_the_median_as_often_as_it_says():
    """Of nine ratios the second least and the second largest: 1 - 2 * 10 / 512 = 0.961."""
    assert checkouts.interval([9, 1, 8, 2, 7, 3, 6, 4, 5]) == (2, 8)
    assert checkouts.interval(range(1, 21)) == (6, 15)  # 0.9586, as tables of the sign test give it
    with pytest.raises(ValueError, match="measure at least 6 pairs"):
        checkouts.interval([1, 2, 3, 4, 5])


@pytest.mark.parametrize(("factor", "status"), [(1.0, 0), (1.02, 0), (1.06, 1), (0.5, 0)])
def test_a_checkout_that_is_slower_fails(tmp_path, monkeypatch, capsys, factor, status):
    order, asked = [], []
    moves: Iterator[float] = (move for move in cycle(MOVES) for _ in range(2))

    def seconds_of(name, checkout, settings):
        order.append(checkout == checkouts.HERE)
        asked.append(settings)
        noise = 1 + 0.002 * len(order) / 18
        return {name: (2 + next(moves)) * noise * (factor if checkout == checkouts.HERE else 1)}

    monkeypatch.setattr(checkouts, "seconds_of", seconds_of)
    monkeypatch.setattr(sys, "argv", ["", str(tmp_path), "--bench", "update", "update.shape=tiny"])
    assert checkouts.main() == status
    found = json.loads(capsys.readouterr().out)["figures"]["update"]
    assert found["low"] <= found["median"] <= found["high"] and len(found["ratios"]) == 9
    assert found["median"] == pytest.approx(factor, rel=0.003) and found["is_slower"] == bool(status)
    assert order == [False, True, True, False] * 4 + [False, True]
    assert all(each["shape"] == "tiny" and each["rows"] == 16 for each in asked)


@pytest.mark.soak
def test_each_checkout_runs_its_own_code(tmp_path):
    settings = {"shape": "tiny", "rows": 2, "length": 32, "repeats": 1}
    assert checkouts.seconds_of("update", checkouts.HERE, settings)["update"] > 0
    (tmp_path / "areal_jax").mkdir()
    (tmp_path / "areal_jax" / "__init__.py").touch()
    with pytest.raises(
        checkouts.subprocess.CalledProcessError
    ):  # it has no command line, and no other is run
        checkouts.seconds_of("update", tmp_path, settings)
