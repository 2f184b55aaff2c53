"""Beside a run: each finished checkpoint is exported, and evaluated on devices that do nothing else.

The run waits for this only at its end, so that its report holds the last checkpoint's figures. Where an
evaluation takes longer than checkpoints are apart, the newest one is next and those between are left out.
What was done before, by this process or another, is not done again.
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

from areal_jax.models.model import Params
from areal_jax.observe.evals import append_eval, read_evals
from areal_jax.observe.waits import WaitTimeout
from areal_jax.runtime.assembly import Inputs
from areal_jax.runtime.committed import CHECKPOINTS, EXPORTS, checkpoint_params
from areal_jax.runtime.evaluator import Evaluator, as_served, settings_of
from areal_jax.runtime.sources import explained
from areal_jax.trainer.checkpoint import MANIFEST, committed
from areal_jax.types import ArealError, PolicyVersion, VersionedParams

POLL_S = 1.0


class _Stopped(Exception):
    """Told to end in the middle."""


class Follower:
    """`start()`, then `finish()` once no checkpoint follows; `stop()` whatever ended the run."""

    def __init__(
        self,
        inputs: Inputs,
        folder: Path,
        mesh: Mesh | None,
        note: Callable[[str], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        """`mesh`: what evaluations decode on; None where nothing is evaluated. `note` hears what was done,
        and what could not be; `fail` what ended the thread otherwise.
        """
        c = self._config = inputs.config
        self._folder, self._source, self._note, self._fail = folder, inputs.source, note, fail
        self._evaluator: Evaluator | None = None
        if mesh is not None:
            assert inputs.held_out is not None
            settings = settings_of(c, c.observe.evaluate)
            self._evaluator = Evaluator(c, inputs.model, inputs.held_out, settings, mesh)
        if c.observe.exports:
            with explained("observe.exports"):  # now, and not at the first checkpoint
                import_module("areal_jax.models.huggingface")
        self.steps = 0
        """Grows while it gets on."""
        self._error: BaseException | None = None
        self._seen: tuple[PolicyVersion, int] | None = None
        self._is_last, self._is_stopped, self._ended = (threading.Event() for _ in range(3))
        self._thread = threading.Thread(target=self._run, name="checkpoints", daemon=True)

    def start(self) -> None:
        """Once; a second call does nothing."""
        if self._thread.ident is None:
            self._thread.start()

    def finish(self, deadline_s: float) -> None:
        """Until the newest checkpoint is dealt with. Raises what ended the thread, and WaitTimeout where for
        so long nothing gets on.
        """
        self.start()
        self._is_last.set()
        seen, end_s = self.steps, time.monotonic() + deadline_s
        while not self._ended.wait(POLL_S):
            if self.steps != seen:
                seen, end_s = self.steps, time.monotonic() + deadline_s
            elif time.monotonic() > end_s:
                raise WaitTimeout(
                    f"the evaluation of the last checkpoint got no further for {deadline_s:g} s"
                )
        if self._error is not None:
            raise self._error

    def stop(self, deadline_s: float) -> None:
        """Give up what it is at; nothing half-done stays."""
        self._is_stopped.set()
        self._is_last.set()
        if self._thread.ident is not None:
            self._thread.join(deadline_s)

    # --- the thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_stopped.is_set():
                is_last = self._is_last.is_set()
                if (version := self._new_checkpoint()) is not None:
                    self._take(version)
                elif is_last:
                    return
                else:
                    self._is_last.wait(POLL_S)
        except _Stopped:
            return
        except Exception as error:  # noqa: BLE001 - handed to whoever owns the thread, which raises it
            self._error = error
            self._fail(error)
        finally:
            self._ended.set()

    def _new_checkpoint(self) -> PolicyVersion | None:
        """The newest one, unless it is the one seen last; a resumed run may write other bits under a name."""
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
        """What fails with one checkpoint is said, and tried again with the next."""
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
            if (self._folder / CHECKPOINTS / str(version)).exists():  # otherwise a newer one took its place
                self._note(f"checkpoint {version} could not be evaluated or exported: {error}")

    def _shardings(self) -> Any:
        if self._evaluator is not None:
            return self._evaluator.shardings
        try:
            here = jax.local_devices(backend="cpu")[0]
        except RuntimeError:  # JAX_PLATFORMS names others alone
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
        """exports/<version>, whole or not at all; a newer one is of a version that is void by now."""
        from areal_jax.models.huggingface import export_folder

        c, source = self._config, self._source
        target, dtype = self._folder / EXPORTS / str(version), c.weights.wire_dtype
        if _digest_of(target) != digest:
            for _, path in (one for one in _exports(target.parent) if one[0] >= version):
                shutil.rmtree(path)
            about = {"run": c.run.name, "version": version, "digest": digest}
            merged = source.model.merged(params)
            export_folder(target, source.model.base.config, merged, dtype, source.folder, about=about)
            self._note(f"exported version {version}: {target} ({dtype})")
        for _, path in _exports(target.parent)[: -c.observe.exports]:
            shutil.rmtree(path)


def _exports(folder: Path) -> list[tuple[PolicyVersion, Path]]:
    """Oldest first."""
    return sorted((int(path.name), path) for path in folder.glob("*") if path.name.isdecimal())


def _digest_of(folder: Path) -> str | None:
    """Of the parameters that an export was made of."""
    from areal_jax.models.safetensors_folder import ABOUT, CONFIG

    try:
        return json.loads((folder / CONFIG).read_text())[ABOUT]["digest"]
    except (FileNotFoundError, KeyError, ValueError):
        return None
