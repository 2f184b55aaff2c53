"""Exports and evaluates the checkpoints of a run while it trains, on devices that do not train.

An export is a Hugging Face folder. Training does not wait for an evaluation; only the end of the run waits
until the last checkpoint is evaluated, because the report shows that checkpoint's figures. If several
checkpoints are written during an evaluation, only the newest of them is evaluated next. An export or
evaluation that already exists, also from another process, is not repeated.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh, SingleDeviceSharding

from areal_jax.assembly.committed import checkpoint_params
from areal_jax.assembly.parts import Inputs
from areal_jax.assembly.run_folder import CHECKPOINTS, EXPORTS
from areal_jax.assembly.tokenizer_source import explained
from areal_jax.episodes.workflow_runner import Gateway
from areal_jax.evaluation.evaluator import Evaluator, as_served
from areal_jax.evaluation.run import EvalSettings
from areal_jax.models.model import Params
from areal_jax.observe.evals import append_eval, read_evals
from areal_jax.observe.waits import WaitTimeout
from areal_jax.types import ArealError, PolicyVersion, VersionedParams
from areal_jax.weights.manifest import MANIFEST, committed

POLL_S = 1.0


class _Stopped(Exception):
    """Raised by the progress callback of an evaluation after `Follower.stop`, to end the evaluation."""


class Follower:
    """Exports and evaluates a run's checkpoints in a thread; of several that wait, takes only the newest.

    Call `start()`; after the last checkpoint, call `finish()`, which waits until that checkpoint is
    evaluated; at the end, even after an error, call `stop()`.
    """

    def __init__(
        self,
        inputs: Inputs,
        folder: Path,
        mesh: Mesh | None,
        note: Callable[[str], None],
        fail: Callable[[BaseException], None],
        *,
        make_gateway: Callable[[], Gateway] | None = None,
    ) -> None:
        """`inputs`: the run's config, model and held-out tasks; `folder`: the run's folder.

        `mesh`: the devices for evaluations; None: checkpoints are exported, not evaluated. The thread calls
        `note` with a line of text for every result and every failed checkpoint, and `fail` with an unexpected
        exception, which ends the thread. `make_gateway`: see `EvalSettings`.
        """
        c = self._config = inputs.config
        self._folder, self._source, self._note, self._fail = folder, inputs.source, note, fail
        self._evaluator: Evaluator | None = None
        if mesh is not None:
            assert inputs.held_out is not None
            settings = EvalSettings(c, c.observe.evaluate, make_gateway=make_gateway)
            self._evaluator = Evaluator(inputs.model, inputs.held_out, settings, mesh)
        if c.observe.exports:
            with explained("observe.exports"):  # a missing package fails now, not at the first checkpoint
                import_module("areal_jax.models.io.huggingface")
        self.steps = 0
        """Count of progress calls and of checkpoints begun; while it grows, an evaluation is not stuck."""
        self._error: BaseException | None = None
        self._seen: tuple[PolicyVersion, int] | None = None
        self._is_last, self._is_stopped, self._ended = (threading.Event() for _ in range(3))
        self._thread = threading.Thread(target=self._run, name="checkpoints", daemon=True)

    def start(self) -> None:
        """Starts the thread; a second call does nothing."""
        if self._thread.ident is None:
            self._thread.start()

    def finish(self, deadline_s: float) -> None:
        """Waits until the newest checkpoint is exported and evaluated, and the thread has ended.

        Raises the exception that ended the thread early, or WaitTimeout if the evaluation finishes no prompt
        for `deadline_s` seconds.
        """
        self.start()
        self._is_last.set()
        seen, end_s = self.steps, time.monotonic() + deadline_s
        while not self._ended.wait(POLL_S):
            if self.steps != seen:
                seen, end_s = self.steps, time.monotonic() + deadline_s
            elif time.monotonic() > end_s:
                raise WaitTimeout(
                    "the run ends, because the evaluation of the last checkpoint made no progress for "
                    f"{deadline_s:g} s; raise runtime.deadline_s, or evaluate fewer prompts "
                    "(observe.evaluate)"
                )
        if self._error is not None:
            raise self._error

    def stop(self, deadline_s: float) -> None:
        """Cancels the evaluation in progress, and waits up to `deadline_s` seconds for the thread to end."""
        self._is_stopped.set()
        self._is_last.set()
        if self._thread.ident is not None:
            self._thread.join(deadline_s)

    # --- the thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_stopped.is_set():
                # Read before the folder: the newest checkpoint before `finish` is found in any case.
                is_last = self._is_last.is_set()
                if (version := self._new_checkpoint()) is not None:
                    self._take(version)
                elif is_last:
                    return
                else:
                    self._is_last.wait(POLL_S)
        except _Stopped:
            return
        except Exception as error:  # noqa: BLE001 - `finish` raises it
            self._error = error
            self._fail(error)
        finally:
            self._ended.set()

    def _new_checkpoint(self) -> PolicyVersion | None:
        """Returns the newest checkpoint's version; None if the last call returned that very checkpoint.

        Also returns None if the run has no checkpoint.
        """
        # Compared by time as well: a resumed run may write other bits under the same version.
        folder = self._folder / CHECKPOINTS
        for version in reversed(committed(folder)):
            try:
                identity = version, (folder / str(version) / MANIFEST).stat().st_mtime_ns
            except FileNotFoundError:  # pruned just now
                continue
            if identity == self._seen:
                return None
            self._seen = identity
            return version
        return None

    def _take(self, version: PolicyVersion) -> None:
        """Exports and evaluates one checkpoint; `note` reports a failure, after which the thread goes on."""
        self.steps += 1
        try:
            found = checkpoint_params(self._folder, version, self._source.model, self._shardings())
            value = as_served(found, self._config)
            if self._config.observe.exports:
                self._export(found.params, value.digest, version)
            del found
            if self._evaluator is not None:
                self._evaluate(value, self._evaluator)
        except (ArealError, OSError) as error:
            if (self._folder / CHECKPOINTS / str(version)).exists():  # otherwise pruned for a newer one
                self._note(
                    f"checkpoint {version} could not be evaluated or exported, and the run continues "
                    f"without it: {error}"
                )

    def _shardings(self) -> Any:
        if self._evaluator is not None:
            return self._evaluator.shardings
        try:
            here = jax.local_devices(backend="cpu")[0]
        except RuntimeError:  # JAX_PLATFORMS excludes the CPU
            here = jax.local_devices()[0]
        return jax.tree.map(lambda _: SingleDeviceSharding(here), self._source.model.abstract_params)

    def _evaluate(self, value: VersionedParams, evaluator: Evaluator) -> None:
        done = {(line["version"], line["digest"], line["limit"]) for line in read_evals(self._folder)}
        if (value.version, value.digest, self._config.observe.evaluate) in done:
            return
        figures = evaluator.figures(value, self._progress)
        append_eval(self._folder, {"model": None, "run": str(self._folder), "refused": []} | figures)
        greedy = figures["overall"]["greedy"]
        right = greedy["accuracy"]
        shown = "no reward" if right["value"] is None else f"{right['value']:.3f}"
        within = "" if right["low"] is None else f" ({right['low']:.3f} to {right['high']:.3f})"
        self._note(
            f"evaluated version {value.version}: greedy accuracy {shown}{within} on {greedy['scored']} "
            f"prompts, in {figures['seconds']:.0f} s"
        )

    def _progress(self, *_: object) -> None:
        self.steps += 1
        if self._is_stopped.is_set():
            raise _Stopped

    def _export(self, params: Params, digest: str, version: PolicyVersion) -> None:
        """Writes the parameters to exports/<version>, unless an export with this `digest` is there already.

        Before writing, deletes exports of this and later versions: the run wrote those exports before it was
        resumed at an earlier version. At the end, deletes all but the newest `observe.exports` exports, and
        exports that a killed process left unfinished: a run has one process that exports.
        """
        from areal_jax.models.io.huggingface import export_folder
        from areal_jax.models.io.safetensors_folder import remove_unfinished

        c, source = self._config, self._source
        target, dtype = self._folder / EXPORTS / str(version), c.wire_dtype
        if _digest_of(target) != digest:
            for _, path in (one for one in _exports(target.parent) if one[0] >= version):
                shutil.rmtree(path)
            about = {"run": c.run.name, "version": version, "digest": digest}
            merged = source.model.merged(params)
            export_folder(target, source.model.base.config, merged, dtype, source.folder, about=about)
            self._note(f"exported version {version}: {target} ({dtype})")
        for _, path in _exports(target.parent)[: -c.observe.exports]:
            shutil.rmtree(path)
        remove_unfinished(target.parent)


def _exports(folder: Path) -> list[tuple[PolicyVersion, Path]]:
    """Returns (version, folder of its export) for each export in `folder`, the oldest version first."""
    return sorted((int(path.name), path) for path in folder.glob("*") if path.name.isdecimal())


def _digest_of(folder: Path) -> str | None:
    """Returns the digest recorded in the export `folder`; None if the export is missing or incomplete."""
    from areal_jax.models.io.safetensors_folder import ABOUT, CONFIG

    try:
        return json.loads((folder / CONFIG).read_text())[ABOUT]["digest"]
    except (FileNotFoundError, KeyError, ValueError):
        return None
