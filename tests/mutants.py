#!/usr/bin/env python
"""Changes one line of the package at a time and lists the test that fails; ends with 1 if a change survives.

tests/mutants.py [TEXT]: all changes of MUTANTS, or those with the text in their file or sentence. Each is
made in a copy of the checkout. There the fast tests of ROOMS run once, to find those that execute each line;
then, for each change, these run until the first failure.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]

ROOMS = (
    "control", "trajectories", "weights", "generation", "lab/simulation", "cluster", "runtime", "replay",
    "models",
)  # fmt: skip
"""Folders of the tests that may execute the changed lines."""

ENOUGH_S = 60.0
"""So many seconds of the tests that execute a line run: those of its own room first, the shortest first."""
LIMIT_S = 300.0
"""Longest run of them."""

# fmt: off
MUTANTS = {  # file below areal_jax -> (what the change breaks, the old text, the new text)
    "models/experts.py": [
        ("the weights of a token's experts do not sum to 1", "if has_unit_weights:", "if False:"),
        ("of equally likely experts the higher number is taken",
         "own = jax.lax.top_k(jax.lax.stop_gradient(probabilities), k)[1]",
         "own = jnp.argsort(probabilities)[..., : -k - 1 : -1]"),
        ("a token's given experts are chosen anew",
         "jnp.where(experts[..., :1] == NO_EXPERT, own, experts.astype(own.dtype))", "own"),
        ("a block keeps the rows of the next expert that it has computed",
         "fori_loop(0, blocks.count, one, jnp.zeros((len(rows)",
         "fori_loop(0, blocks.count, lambda i, out: one(blocks.count - 1 - i, out), jnp.zeros((len(rows)"),
    ],
    "models/mlp.py": [
        ("the MLP that all tokens pass is added without its gate",
         "return mixed + jax.nn.sigmoid(gate)[..., None] * self.shared(x)", "return mixed + self.shared(x)"),
        ("a padding token passes through experts",
         "jnp.where(live_tokens(attend, x)[..., None], chosen.experts, -1)", "chosen.experts"),
    ],
    "control/machine.py": [
        ("late and duplicate events are applied",
         "if self.state.is_stale(event):", "if False:"),
        ("a resumed run counts on the hosts that it had before",
         "yield from self._lose(name)", "pass"),
        ("a host that joins again counts as holding the samples of its former process",
         "if event.host in self.state.hosts:", "if False:"),
        ("batches are formed in the order in which groups are scored",
         "insort(s.complete, event.ordinal)", "s.complete.append(event.ordinal)"),
        ("the trainer does not wait for groups that would become too old",
         "if len(ordinals) < size or not self._strategy.trains(s, ordinals):", "if len(ordinals) < size:"),
    ],
    "control/state.py": [
        ("a sample of an attempt before the restart of its group counts",
         "and group.attempt == sample.attempt", "and True"),
        ("a group that moves to another host counts as begun there",
         "first = self.version if group.min_version < 0 else group.min_version", "first = self.version"),
        ("one_step trains before the hosts hold the newest version",
         "return self.admitted >= needed and not self.waiting and not self.hosts_behind",
         "return self.admitted >= needed and not self.waiting"),
    ],
    "control/gate.py": [
        ("dropped groups close the gate",
         "return (admitted - dropped - 1) // batch_size <= version + max_staleness",
         "return (admitted - 1) // batch_size <= version + max_staleness"),
        ("a group may be one version older than the bound",
         "step + 1 + place // batch_size <= version + max_staleness for",
         "step + place // batch_size <= version + max_staleness for"),
    ],
    "control/over_age.py": [
        ("a group as old as the bound starts again",
         "if age(ordinal) > bound]", "if age(ordinal) >= bound]"),
    ],
    "control/orchestrator.py": [
        ("a host that awaits samples of its version goes on to the newest one",
         "if name not in awaited:", "if True:"),
    ],
    "runtime/core.py": [
        ("a batch that is reported twice gets two rows of metrics",
         "if not (isinstance(event, e.BatchTrained) and is_stale):", "if True:"),
        ("a late trajectory replaces the one that counts",
         "trajectory = None  # too late: it must not replace the payload that counts", "pass"),
        ("commits of versions and checkpoints are not synced to the disk",
         "self._journal.append(entries, durable=is_durable)", "self._journal.append(entries)"),
    ],
    "runtime/driver.py": [
        ("trajectories go that a resume from the older checkpoint would train again",
         "is_needed_from = kept[0] if len(kept) >=", "is_needed_from = kept[-1] if len(kept) >="),
    ],
    "runtime/recovery.py": [
        ("a batch that trains to other bits after a resume is not reported",
         "if now == was:", "if True:"),
    ],
    "cluster/controller.py": [
        ("an event that arrives twice is handled twice",
         "if message.number <= self._confirmed.get(mailbox, -1):",
         "if message.number < self._confirmed.get(mailbox, -1):"),
        ("a host's event of an earlier epoch is handled",
         "is_valid = is_member and message.epoch == self._epoch", "is_valid = is_member"),
        ("a trainer's event of before Redis lost its data is handled",
         "return [(event, None)] if message.epoch in self._epochs else []", "return [(event, None)]"),
        ("a host that joins again is not declared lost first",
         'if is_again and hello.role == "generate":', "if False:"),
        ("a late sample's payload is accepted",
         "if not is_valid or self._control.state.is_stale(event):", "if not is_valid:"),
    ],
    "generation/admission.py": [
        ("a host continues KV of other weights",
         "if mine is None or mine.digest != work.digest:", "if mine is None:"),
        ("a sample starts under an older version than that of its dispatch",
         "while free and self.waiting and self.waiting[0].start.min_version <= current.version:",
         "while free and self.waiting:"),
        ("samples that start again change their order",
         "for slot in reversed(unbegun):", "for slot in unbegun:"),
        ("a sample shares the pages of a prompt that was computed under an older version",
         "if (prompt_key(other), other.start.is_request, other.prompt_version) == wanted:",
         "if (prompt_key(other), other.start.is_request) == wanted[:2]:"),
        ("a host changes the samples that the other one may take back",
         "return [replace(work) for work in works]", "return works"),
    ],
    "generation/moving/receiver.py": [
        ("damaged KV is taken over",
         "if zlib.crc32(data) != place.checksum:", "if False:"),
    ],
    "generation/moving/page_runs.py": [
        ("the last page of a sample's KV stays behind",
         "return -(-(int(kv.true_length) - 1) // kv.cache.page_tokens)",
         "return (int(kv.true_length) - 1) // kv.cache.page_tokens"),
    ],
    "generation/moving/sender.py": [
        ("the KV of samples that have moved stays on the disk",
         "path.unlink(missing_ok=True)", "pass"),
    ],
    "trajectories/sqlite.py": [
        ("a second trajectory replaces the first one",
         'kind = "REPLACE" if isinstance(event, EPISODE) else "IGNORE"', 'kind = "REPLACE"'),
        ("a controller that was replaced goes on to write",
         "self.require_owner()", "pass"),
        ("nothing that the journal holds is synced to the disk",
         "is_flushed = durable or self._owner is not None", "is_flushed = False"),
    ],
    "weights/staged.py": [
        ("a version is committed before its files are synced to the disk",
         "_sync(staged)", "pass"),
        ("a version's rename is not synced to the disk",
         "_sync_one(final.parent)", "pass"),
        ("a leaf with other bits than those written is read",
         "if digest != manifest.leaves[name]:", "if False:"),
    ],
    "weights/store.py": [
        ("other bits are published under the number of a published version",
         "if known is None or value.version > known.version:",
         "if known is None or value.version >= known.version:"),
    ],
    "weights/orbax.py": [
        ("a version that was removed during a read counts as damaged",
         "if self._identity(version) != identity:", "if False:"),
    ],
    "weights/prefetch.py": [
        ("a host gets another version than it asks for",
         "if here is None or here[0] != version:", "if here is None:"),
    ],
    "weights/publishing.py": [
        ("parameters that changed after the publication are committed",
         "if (found := combine(leaves)) != self.wire.digest:", "if (found := combine(leaves)) == \"\":"),
    ],
}
# fmt: on

FAILED = re.compile(r"^(?:FAILED|ERROR) (.*?)(?: \((?:setup|call|teardown)\)| - .*)?$", re.MULTILINE)
"""A line of pytest's output that names a failed test, or a file that cannot be read."""

MARKS = '''
"""Appends to marks.txt which test executes which line, and how each test ended."""
import os
from pathlib import Path

SEEN = set()

def write(*fields):
    with Path(__file__).with_name("marks.txt").open("a") as file:
        file.write("\\t".join(fields) + "\\n")

def line(breaks):  # a test's child processes inherit its name
    key = breaks, os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    if key not in SEEN:
        SEEN.add(key)
        write("line", *key)

def pytest_runtest_logreport(report):
    if not hasattr(report, "node"):  # xdist repeats what its workers have written
        write("test", report.nodeid, report.outcome, str(report.duration))
'''


class Mutant(NamedTuple):
    file: str
    breaks: str
    old: str
    new: str

    def path(self, tree: Path) -> Path:
        return tree / "areal_jax" / self.file

    def is_in(self, tree: Path) -> bool:
        path = self.path(tree)
        return path.is_file() and path.read_text().count(self.old) == 1


class Copy:
    """A copy of a checkout in the folder `tree`: its tracked files, as they are now."""

    def __init__(self, checkout: Path, tree: Path, is_whole: bool) -> None:
        """`is_whole`: all fast tests may run, for as long as they take."""
        self._tree, self._is_whole = tree, is_whole
        self._reached: dict[str, list[str]] = defaultdict(list)
        """What a mutant breaks -> the tests that execute its line."""
        self._seconds: dict[str, float] = defaultdict(float)
        """Test that passes without a mutant -> the seconds that it takes."""
        self._writes = 0
        git = ["git", "ls-files", "-z"]
        listed = subprocess.run(git, cwd=checkout, capture_output=True, text=True, check=True).stdout
        for name in filter(lambda name: name and os.path.lexists(checkout / name), listed.split("\0")):
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(checkout / name, tree / name, follow_symlinks=False)

    def look(self, mutants: Sequence[Mutant]) -> None:
        """Runs fast tests with marks in the lines to change, to find the tests that execute each."""
        sources = {path: path.read_text() for path in (mutant.path(self._tree) for mutant in mutants)}
        for path, source in sources.items():
            self._write(path, marked(source, [one for one in mutants if one.path(self._tree) == path]))
        (self._tree / "marks.py").write_text(MARKS)
        rooms = [f"tests/{room}" for room in ROOMS]
        which = ["-n", "auto", "--dist", "loadfile"] if self._is_whole else rooms
        output = self._run(None, "-p", "marks", *which)
        for path, source in sources.items():
            self._write(path, source)
        ended = set()
        if not (self._tree / "marks.txt").exists():
            sys.exit(f"no test runs without a change, so first correct what pytest reports:\n{output}")
        for line in (self._tree / "marks.txt").read_text().splitlines():
            kind, name, *rest = line.split("\t")
            if kind == "line":
                self._reached[name].append(rest[0])
            else:
                self._seconds[name] += float(rest[1])
                ended |= {(rest[0], name)}
        for outcome, test in sorted(ended):
            if outcome != "passed":
                self._seconds.pop(test, None)
                sys.stderr.write(f"{outcome} without a change: {test}\n")

    def catcher(self, mutant: Mutant) -> str:
        """Returns the first test that fails with the mutant, or SURVIVED."""
        path, which = mutant.path(self._tree), self._tests_of(mutant)
        source = path.read_text()
        (self._tree / "which.txt").write_text("\n".join(which))
        self._write(path, source.replace(mutant.old, mutant.new))
        output = self._run(None if self._is_whole else LIMIT_S, "-x", "@which.txt") if which else ""
        self._write(path, source)
        found = FAILED.search(output)
        return found[1] if found else "SURVIVED"

    def _tests_of(self, mutant: Mutant) -> list[str]:
        room = f"tests/{mutant.file.partition('/')[0]}/"
        known = {test for test in self._reached[mutant.breaks] if test in self._seconds}
        chosen, total_s = [], 0.0
        for test in sorted(known, key=lambda test: (not test.startswith(room), self._seconds[test])):
            total_s += self._seconds[test]
            if not chosen or total_s <= ENOUGH_S or self._is_whole:
                chosen.append(test)
        return chosen

    def _write(self, path: Path, source: str) -> None:
        path.write_text(source)
        # Python takes a compiled module for that of a source of equal size and time.
        self._writes += 1
        os.utime(path, (self._writes, self._writes))

    def _run(self, limit_s: float | None, *arguments: str) -> str:
        """Runs tests in the copy; returns their output. The test that runs at the limit counts as failed."""
        data = str(ROOT.parent / "shared" / "data")
        environment = {"AREAL_JAX_DATA": data, **os.environ, "PYTHONPATH": str(self._tree)}
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-v", *arguments]
        with tempfile.TemporaryFile("w+") as output:  # a pipe would wait for processes that tests left behind
            tests = subprocess.Popen(
                command,
                cwd=self._tree,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                with suppress(subprocess.TimeoutExpired):
                    tests.wait(limit_s)
                is_ended = tests.poll() is not None
            finally:
                if tests.poll() is None:
                    os.killpg(tests.pid, signal.SIGKILL)
                    tests.wait()
            output.seek(0)
            text = output.read()
        return text if is_ended else f"{text}\nFAILED {text.splitlines()[-1].strip()} (still running)"


def marked(source: str, mutants: Sequence[Mutant]) -> str:
    """Returns the source with a call of `line` before each statement that a mutant changes."""
    lines, calls = source.split("\n"), []
    for mutant in mutants:
        at = source[: source.index(mutant.old)].count("\n") + 1
        around = [
            node
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.stmt)
            and node.lineno <= at <= (node.end_lineno or at)
            and not lines[node.lineno - 1].lstrip().startswith("elif")
        ]
        first = max(node.lineno for node in around) - 1
        indent = lines[first][: len(lines[first]) - len(lines[first].lstrip())]
        calls.append((first, f'{indent}__import__("marks").line({mutant.breaks!r})'))
    for first, call in sorted(calls, reverse=True):
        lines.insert(first, call)
    return "\n".join(lines)


def rows(checkout: Path, mutants: Sequence[Mutant], is_whole: bool) -> Iterator[tuple[str, str, str]]:
    """Yields a row of the table for each mutant: file and what it breaks, what catches it, seconds."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(checkout, Path(folder), is_whole)
        there = [mutant for mutant in mutants if mutant.is_in(checkout)]
        copy.look(there)
        for mutant in mutants:
            begun_s = time.monotonic()
            caught = copy.catcher(mutant) if mutant in there else "not there"
            yield f"`{mutant.file}`: {mutant.breaks}", caught, f"{time.monotonic() - begun_s:.0f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", nargs="?", default="")
    parser.add_argument("--checkout", type=Path, default=ROOT, help="another one; lines may be missing there")
    parser.add_argument("--whole-tier", action="store_true", help="all fast tests, for as long as they take")
    options = parser.parse_args()
    checkout = options.checkout.resolve()
    mutants = [Mutant(file, *one) for file, own in MUTANTS.items() for one in own]
    for mutant in mutants:
        if checkout == ROOT and not mutant.is_in(ROOT):
            sys.exit(
                f"areal_jax/{mutant.file} does not hold exactly once the text that tests/mutants.py changes, "
                f"so that {mutant.breaks}: {mutant.old!r}; put there what that line reads now"
            )
    mutants = [mutant for mutant in mutants if options.text in f"{mutant.file}: {mutant.breaks}"]
    is_survived = False
    sys.stdout.write("| change | caught by | s |\n|---|---|---|\n")
    for row in rows(checkout, mutants, options.whole_tier):
        is_survived |= row[1] == "SURVIVED"
        sys.stdout.write(f"| {' | '.join(row)} |\n")
        sys.stdout.flush()
    return int(is_survived)


if __name__ == "__main__":
    sys.exit(main())
