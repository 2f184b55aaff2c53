"""One of several processes that need one program, for test_compile_once; prints when it compiles the program.

`python -m tests.parallel.compiling SECONDS`: how long it takes to compile. It begins with a line of input.
"""

from __future__ import annotations

import sys
import time

import jax
import jax.numpy as jnp
from jax._src import compiler

from areal_jax.assembly.devices import use_compilation_cache


def say(what: object) -> None:
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


def main(seconds: float) -> None:
    use_compilation_cache()
    compiles = compiler.backend_compile_and_load

    def slowly(*args):
        say("compiles")
        time.sleep(seconds)
        return compiles(*args)

    numbers = jnp.arange(5.0)
    jax.block_until_ready(numbers)
    compiler.backend_compile_and_load = slowly
    say("ready")
    sys.stdin.readline()
    say(jax.jit(lambda x: (x * x).sum())(numbers).item())


if __name__ == "__main__":
    main(float(sys.argv[1]))
