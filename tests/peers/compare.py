"""Our update and log-prob pass beside PyTorch's and Tunix's, in turn, one allocator setting; prints JSON.

    python tests/peers/compare.py {update,logprob,skewed} {5m,smollm2-135m} [ROUNDS]

PEER_TORCH and PEER_TUNIX name the interpreters that have the peers (default of the first: this one; the
second is left out where it is not given). A ratio above 1 says that we are faster: medians of all runs of all
rounds, of wall seconds, of CPU seconds and of the processes' peak resident bytes. skewed: 64 sequences of
lognormal lengths, ours packed, Tunix's padded; PyTorch is left out.
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
MEASURED = ("seconds", "cpu_s", "peak_bytes")


def main(what: str, shape: str, rounds: int) -> None:
    interpreters = {
        "our": sys.executable,
        "torch": os.environ.get("PEER_TORCH", sys.executable),
        "tunix": os.environ.get("PEER_TUNIX"),
    }
    if what == "skewed":
        del interpreters["torch"]
    present = {name: path for name, path in interpreters.items() if path}
    runs = {name: {key: [] for key in MEASURED} for name in present}
    environment = {
        **os.environ,
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
        "PYTHONPATH": str(HERE.parents[1]),
    }
    for _ in range(rounds):
        for name, interpreter in present.items():
            command = [interpreter, str(HERE / f"{name}_update.py"), what, shape, str(REPEATS)]
            done = subprocess.run(
                command, env=environment, stdout=subprocess.PIPE, timeout=DEADLINE_S, check=True, text=True
            )
            result = json.loads(done.stdout.splitlines()[-1])
            for key in MEASURED:
                runs[name][key].extend(result[key])
    medians = {
        name: {key: statistics.median(values) for key, values in of.items()} for name, of in runs.items()
    }
    ratios = {
        f"{name}_{key}": medians[name][key] / medians["our"][key]
        for name in present
        if name != "our"
        for key in MEASURED
    }
    out = {"what": what, "shape": shape, "medians": medians, "peer_over_our": ratios, "runs": runs}
    sys.stdout.write(json.dumps(out | {"load": os.getloadavg()}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 2)
