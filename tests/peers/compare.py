"""Our update, log-prob pass and decoding beside PyTorch's, Tunix's and llama.cpp's, in turn; prints JSON.

    python tests/peers/compare.py {update,logprob,skewed} {5m,smollm2-135m} [ROUNDS]
    python tests/peers/compare.py decode {5m,smollm2-135m} [ROUNDS] SLOTS {float32,bfloat16} [TOKENS]

PEER_TORCH, PEER_TUNIX and PEER_LLAMA name the interpreters that have the peers (default of the first: this
one; the others are left out where they are not given). All have the allocator setting of GLIBC_TUNABLES, huge
pages by default. A ratio above 1 says that we are faster: medians of all runs of all rounds, of wall seconds,
of CPU seconds and of the processes' peak resident bytes. skewed: 64 sequences of lognormal lengths, ours
packed, Tunix's padded; PyTorch is left out. decode: `seconds` are of a bare step, `engine` of our whole
engine's, `whole_s` of prompts of 64 tokens and their answers; Tunix decodes in float32 only, llama.cpp a file
of F16 (PEER_GGUF).
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
REPEATS = 3
DEADLINE_S = 1800
PROMPT = 64


def main(what: str, shape: str, rounds: int, *of_decode: str) -> None:
    interpreters = {
        "our": sys.executable,
        "torch": os.environ.get("PEER_TORCH", sys.executable),
        "tunix": os.environ.get("PEER_TUNIX"),
        "llama": os.environ.get("PEER_LLAMA") if what == "decode" else None,
    }
    if what == "skewed":
        del interpreters["torch"]
    if "bfloat16" in of_decode:
        del interpreters["tunix"]
    script, words = "update", [what, shape]
    if what == "decode":
        slots, dtype, tokens = [*of_decode, "32"][:3]
        script, words = "decode", [shape, slots, dtype, str(PROMPT), tokens]
    present = {name: path for name, path in interpreters.items() if path}
    runs: dict[str, dict[str, list[float]]] = {name: {} for name in present}
    environment = {
        **os.environ,
        "GLIBC_TUNABLES": os.environ.get("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"),
        "PYTHONPATH": str(HERE.parents[1]),
    }
    for _ in range(rounds):
        for name, interpreter in present.items():
            command = [interpreter, str(HERE / f"{name}_{script}.py"), *words, str(REPEATS)]
            done = subprocess.run(
                command, env=environment, stdout=subprocess.PIPE, timeout=DEADLINE_S, check=True, text=True
            )
            result = json.loads(done.stdout.splitlines()[-1])
            for key, values in result.items():
                runs[name].setdefault(key, []).extend(values)
    medians = {
        name: {key: statistics.median(values) for key, values in of.items()} for name, of in runs.items()
    }
    ratios = {
        f"{name}_{key}": medians[name][key] / medians["our"][key]
        for name in present
        if name != "our"
        for key in medians[name]
    }
    out = {"what": what, "shape": shape, "medians": medians, "peer_over_our": ratios, "runs": runs}
    sys.stdout.write(json.dumps(out | {"load": os.getloadavg()}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 2, *sys.argv[4:])
