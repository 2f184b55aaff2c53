"""The engine as google-jetstream's own classes: the one file that imports that package.

JetStream 0.2.2 imports seqio, and with it TensorFlow, for two names that only its text vocabularies use. So
it is imported beside stand-ins for those, which are gone afterwards: a real seqio stays importable. Its
orchestrator turns the root logger to DEBUG, which is put back, and calls `jax.tree_map`, which is gone from
jax: `delete_pytree`, the one name that does, is rebound here.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from types import ModuleType
from typing import Any

import jax
import numpy as np
from flax import struct

from areal_jax.generation.engine import DecodeState, Engine, Prefix
from areal_jax.types import ArealError, SampleId, Sampling, VersionedParams

PACKAGE = "google-jetstream"
OLDEST, BELOW = (0, 2, 2), (0, 3)
REMEDY = (
    "pip install 'areal-jax[serve]' and then pip install --no-deps google-jetstream==0.2.2; or, with "
    "TensorFlow and 3 GB of it, pip install 'areal-jax[jetstream]'"
)


def require_version(name: str = PACKAGE) -> str:
    """The installed version. Raises ArealError where there is none, or another than 0.2.2 to 0.3."""
    try:
        found = metadata.version(name)
    except metadata.PackageNotFoundError:
        raise ArealError(f"{name} is not installed; {REMEDY}") from None
    numbers = tuple(int(part) for part in found.split(".")[:3] if part.isdigit())
    if not OLDEST <= numbers < BELOW:
        raise ArealError(f"{name} is {found}, and 0.2.2 up to 0.3 is what is known to work; {REMEDY}")
    return found


@contextmanager
def without_seqio() -> Iterator[None]:
    """Stand-ins for seqio while the block imports, unless the process has imported the real one."""
    if "seqio" in sys.modules:
        yield
        return
    package, vocabularies = ModuleType("seqio"), ModuleType("seqio.vocabularies")
    package.vocabularies = vocabularies  # type: ignore[attr-defined]
    for name in ("Vocabulary", "SentencePieceVocabulary"):
        setattr(vocabularies, name, type(name, (), {}))
    stand_ins = {"seqio": package, "seqio.vocabularies": vocabularies}
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name in stand_ins:
            sys.modules.pop(name, None)


@contextmanager
def root_logger_kept() -> Iterator[None]:
    """What the block does to the root logger's level and handlers is undone."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    try:
        yield
    finally:
        root.setLevel(level)
        root.handlers[:] = handlers


require_version()
try:
    with without_seqio(), root_logger_kept():
        from jetstream.core import orchestrator
        from jetstream.core.proto import jetstream_pb2
        from jetstream.engine import engine_api, token_utils, tokenizer_api, tokenizer_pb2
except ModuleNotFoundError as error:
    raise ArealError(f"{PACKAGE} needs the package {error.name}; {REMEDY}") from None


def _delete_pytree(tree: Any) -> None:
    """Free the tree's device buffers at once."""
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array):
            leaf.delete()


orchestrator.delete_pytree = _delete_pytree

protocol: Any = jetstream_pb2
"""The messages of its Orchestrator service."""

__all__ = ["JetStreamEngine", "orchestrator", "protocol"]


@struct.dataclass
class SlotData(engine_api.SlotData):
    """One slot's columns: k tokens, and what JetStream has no word for."""

    logp: Any  # (1, k) float32
    version: Any  # (1,) int32


@struct.dataclass
class ResultTokens(engine_api.ResultTokens):
    """JetStream's three ranges of columns, and ours beside them: one device-to-host copy a call."""

    logp_idx: tuple[int, int] = struct.field(pytree_node=False)
    version_idx: int = struct.field(pytree_node=False)
    prompt_tokens: np.ndarray  # (N,): JetStream's length counts the completion alone

    def convert_to_numpy(self) -> ResultTokens:
        data = np.array(self.data)
        data[:, self.length_idx[0]] -= self.prompt_tokens
        return self.replace(data=data, prompt_tokens=np.zeros_like(self.prompt_tokens))  # type: ignore[attr-defined]

    def get_result_at_slot(self, slot: int) -> SlotData:
        shared = super().get_result_at_slot(slot)
        row = self.data[slot : slot + 1]
        logp = np.ascontiguousarray(row[:, slice(*self.logp_idx)]).view(np.float32)
        return SlotData(shared.tokens, shared.valid, shared.lengths, logp, row[:, self.version_idx])


class Tokenizer(tokenizer_api.Tokenizer):
    """A tokenizer of ours under JetStream's names; one without a BOS of its own begins with its EOS."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, s: str, **kwargs: Any) -> tuple[Any, int]:
        kwargs.setdefault("is_bos", True)
        tokens = np.array(self._tokenizer.encode(s), np.int64)
        return token_utils.pad_tokens(tokens, self.bos_id, self.pad_id, **kwargs)

    def decode(self, token_ids: list[int], **kwargs: Any) -> str:
        return self._tokenizer.decode(token_ids)

    @property
    def pad_id(self) -> int:
        return self._tokenizer.pad_id

    @property
    def eos_id(self) -> int:
        return self._tokenizer.eos_id

    @property
    def bos_id(self) -> int:
        return getattr(self._tokenizer, "bos_id", self.eos_id)


class JetStreamEngine(engine_api.Engine):
    """`engine` for JetStream's callers, which name no request: every sample is drawn with `sampling`.

    Takes 0.2.2's calls and those of the later main branch, whose further parameters are optional here; of
    those a `sampler` is refused. `engine.length` has to be a power of two in 16..32768 for the stock Driver,
    which pads prompts to such lengths only.
    """

    def __init__(self, engine: Engine, sampling: Sampling, seed: int = 0) -> None:
        self._engine, self._sampling, self._seed = engine, sampling, seed
        self._stops = (engine.get_tokenizer().eos_id,)
        self._prompt_tokens = np.zeros(engine.slots, np.int32)
        self._freed: set[int] = set()
        self._inserted = 0

    def prefill(
        self,
        *,
        params: VersionedParams,
        existing_prefix: Any = None,
        padded_tokens: Any,
        true_length: int,
        sampler: Any = None,
        request_id: Any = None,
        **later: Any,
    ) -> Prefix:
        """Raises ArealError where `true_length` exceeds the tokens: a caller that cut them on the left."""
        self._refuse(sampler)
        tokens = np.asarray(padded_tokens, np.int32)
        if true_length > len(tokens):
            raise ArealError(
                f"true_length={true_length} with {len(tokens)} tokens: the prompt was cut and its positions "
                f"with it; a prompt has to fit max_prefill_length={self.max_prefill_length}"
            )
        return self._engine.prefill(
            params=params, padded_tokens=tokens, true_length=true_length, existing_prefix=existing_prefix
        )

    def insert(
        self, prefix: Prefix, decode_state: DecodeState, slot: int, request_id: Any = None, **later: Any
    ) -> DecodeState:
        prompt_tokens = int(prefix.true_length)
        sample, self._inserted = SampleId(self._inserted, 0), self._inserted + 1
        request = self._engine.request(sample, self._seed, self._sampling, prompt_tokens, self._stops)
        self._prompt_tokens[slot] = prompt_tokens
        self._freed.discard(slot)
        return self._engine.insert(prefix, decode_state, slot, request=request)

    def generate(
        self, params: VersionedParams, decode_state: DecodeState, sampler: Any = None, **later: Any
    ) -> tuple[DecodeState, ResultTokens]:
        self._refuse(sampler)
        for slot in self._freed:
            decode_state = self._engine.free_resource(slot, decode_state)
        self._freed.clear()
        state, results = self._engine.generate(params, decode_state)
        k = results.steps
        columns = ResultTokens(
            results.data,
            tokens_idx=(0, k),
            valid_idx=(k, 2 * k),
            length_idx=(2 * k, 2 * k + 1),
            samples_per_slot=1,
            logp_idx=(2 * k + 1, 3 * k + 1),
            version_idx=3 * k + 1,
            prompt_tokens=self._prompt_tokens.copy(),
        )
        return state, columns

    def free_resource(self, slot: int) -> None:
        """The slot stops decoding before the next `generate`."""
        self._freed.add(slot)

    def load_params(self, value: VersionedParams) -> VersionedParams:
        return self._engine.load_params(value)

    def init_decode_state(self, *args: Any, **kwargs: Any) -> DecodeState:
        return self._engine.init_decode_state()

    def get_prefix_destination_sharding(self) -> Any:
        return self._engine.get_prefix_destination_sharding()

    def get_tokenizer(self) -> Any:
        """Names no file: `build_tokenizer` has the tokenizer at hand."""
        return tokenizer_pb2.TokenizerParameters(path="")  # type: ignore[attr-defined]

    def build_tokenizer(self, metadata: Any) -> Tokenizer:
        return Tokenizer(self._engine.get_tokenizer())

    @property
    def max_concurrent_decodes(self) -> int:
        return self._engine.max_concurrent_decodes

    @property
    def samples_per_slot(self) -> int:
        return self._engine.samples_per_slot

    @property
    def max_prefill_length(self) -> int:
        return self._engine.max_prefill_length

    @property
    def mesh(self) -> Any:
        return self._engine.mesh

    @property
    def colocated_cpus(self) -> None:
        return None

    def _refuse(self, sampler: Any) -> None:
        if sampler is not None:
            raise ArealError(
                f"sampler={sampler!r}: tokens are drawn on the device; give `sampling` to the JetStreamEngine"
            )
