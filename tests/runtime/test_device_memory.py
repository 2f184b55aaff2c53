"""What a trainer says of its programs once it is under way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax

from areal_jax.runtime.device_memory import MemoryWatch
from areal_jax.trainer.compiled import Compiled


def test_programs_compiled_late_are_told_in_a_line_however_many_arguments_they_have():
    learner: Any = SimpleNamespace(compiled=[], mesh=SimpleNamespace(local_devices=jax.devices()))
    said: list[str] = []
    watch = MemoryWatch(learner, said.append)
    watch._forecasts["any"] = 1
    learner.compiled = [Compiled("step", ("a int32[2]",))]
    assert watch.after()["compiled_programs"] == 1 and said == [], "the first step compiles"
    shapes = tuple(f"{name} int32[2]" for name in "abcde")
    learner.compiled = [Compiled("step", shapes), Compiled("split", shapes[:3]), Compiled("finish", ())]
    assert watch.after()["compiled_programs"] == 3
    assert said == [
        f"the program {program} was compiled after the first step, because no earlier step called it with "
        f"these shapes ({now}); the run continues, but compiling took time"
        for program, now in (
            ("step", "a int32[2], b int32[2], c int32[2] and 2 more"),
            ("split", "a int32[2], b int32[2], c int32[2]"),
            ("finish", "a combination of earlier shapes"),
        )
    ]
