"""JetStream's engine API, which our engine implements; no other file imports the package JetStream.

If JetStream is installed, our engine derives from JetStream's base classes, else from plain stand-ins; a run
needs nothing else of JetStream. JetStream 0.2.2 imports seqio, and with seqio TensorFlow, for two classes
that only JetStream's text vocabularies use. While this module imports JetStream, a stand-in takes the place
of seqio; the stand-in is removed afterwards, so that other code can import the real seqio. JetStream's
orchestrator is not imported here, because importing it changes the root logger.
"""

from __future__ import annotations

import abc
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module, metadata
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
from flax import struct

from areal_jax.plugin import install_extra
from areal_jax.types import ArealError

PACKAGE = "google-jetstream"
OLDEST, BELOW = (0, 2, 2), (0, 3)
REMEDY = (
    f"{install_extra('serve')}; then pip install --no-deps google-jetstream==0.2.2 (the extra jetstream "
    "installs it with TensorFlow, 3 GB)"
)


def require_version(name: str = PACKAGE) -> str:
    """Returns the installed version of the package `name`.

    Raises ArealError unless 0.2.2 <= version < 0.3.
    """
    try:
        found = metadata.version(name)
    except metadata.PackageNotFoundError:
        raise ArealError(f"{name} is not installed; {REMEDY}") from None
    numbers = tuple(int(part) for part in found.split(".")[:3] if part.isdigit())
    if not OLDEST <= numbers < BELOW:
        raise ArealError(
            f"{name} {found} is installed, but only 0.2.2 up to below 0.3 is known to work; {REMEDY}"
        )
    return found


@contextmanager
def without_seqio() -> Iterator[None]:
    """In the `with` block, `import seqio` imports a stand-in, unless the real seqio is already imported."""
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


def _module(name: str) -> Any:
    require_version()
    try:
        with without_seqio():
            return import_module(f"jetstream.{name}")
    except ModuleNotFoundError as error:
        raise ArealError(f"{PACKAGE} needs the package {error.name}; {REMEDY}") from None


def engine_api() -> Any:
    """Returns JetStream's module engine_api.

    Raises ArealError if JetStream or a package that JetStream needs is missing, or for another version than
    0.2.2 up to below 0.3.
    """
    return _module("engine.engine_api")


def protocol() -> Any:
    """Returns JetStream's module of protobuf messages for the Orchestrator service.

    Raises ArealError if JetStream or a package that JetStream needs is missing, or for another version than
    0.2.2 up to below 0.3.
    """
    return _module("core.proto.jetstream_pb2")


# --- the bases ----------------------------------------------------------------------------------------------


class Engine(abc.ABC):  # noqa: B024 - its members are those that JetStream's documentation names
    """Stand-in for JetStream's Engine if the package is not installed."""


@struct.dataclass
class SlotData:
    """One slot's results of a decode call: k tokens, whether each is valid, and the completion's length."""

    tokens: Any
    valid: Any
    lengths: Any


@struct.dataclass
class ResultTokens:
    """The results of one `generate` call: `data` is int32, with a row per slot.

    `tokens_idx`, `valid_idx` and `length_idx` are column ranges of `data`: (first, one after the last).
    """

    data: Any
    tokens_idx: tuple[int, int] = struct.field(pytree_node=False)
    valid_idx: tuple[int, int] = struct.field(pytree_node=False)
    length_idx: tuple[int, int] = struct.field(pytree_node=False)
    samples_per_slot: int = struct.field(pytree_node=False)


if not TYPE_CHECKING:
    # The package may be absent here: `engine_api` and `protocol` raise when a caller needs it.
    with suppress(ArealError):
        Engine, SlotData, ResultTokens = (
            getattr(engine_api(), name) for name in ("Engine", "SlotData", "ResultTokens")
        )


class TokenizerAdapter:
    """Adapts one of our tokenizers to JetStream's interface; `bos_id` is the EOS id if there is no BOS."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.pad_id, self.eos_id = tokenizer.pad_id, tokenizer.eos_id
        self.bos_id = getattr(tokenizer, "bos_id", tokenizer.eos_id)
        self.stop_tokens = {*tokenizer.end_ids, self.pad_id}

    def encode(self, s: str, **kwargs: Any) -> tuple[Any, int]:
        """Returns (padded token ids of `s`, with BOS first; number of ids without the padding).

        JetStream's function `pad_tokens` adds BOS and padding, and receives `kwargs`.
        """
        kwargs.setdefault("is_bos", True)
        tokens = np.array(self._tokenizer.encode(s), np.int64)
        return engine_api().token_utils.pad_tokens(tokens, self.bos_id, self.pad_id, **kwargs)

    def decode(self, token_ids: list[int], **kwargs: Any) -> str:
        return self._tokenizer.decode(token_ids)
