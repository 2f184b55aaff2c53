"""Conversion of a GGUF file's tokenizer to `tokenizer.json` and `tokenizer_config.json`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from areal_jax.models.io.safetensors_folder import write_json
from areal_jax.types import ArealError

CONTROL, USER_DEFINED = 3, 4
"""llama.cpp's token types: CONTROL for special tokens, USER_DEFINED for added text tokens."""

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def write_tokenizer(folder: Path, fields: Callable[..., Any]) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` into `folder` from a GGUF file's metadata.

    `fields(key, default)` returns a metadata field. Raises ArealError if the kind of tokenizer is not
    implemented or the file is damaged.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

    if (model := fields("tokenizer.ggml.model")) != "gpt2":
        raise ArealError(f"tokenizer.ggml.model={model} is not implemented; use a model with gpt2")
    kind = fields("tokenizer.ggml.pre")
    tokens, types = fields("tokenizer.ggml.tokens"), fields("tokenizer.ggml.token_type")
    ids = {token: number for number, token in enumerate(tokens)}
    if not len(ids) == len(tokens) == len(types):
        raise ArealError(
            f"the vocabulary has {len(tokens)} tokens, {len(ids)} of them distinct, and "
            f"{len(types)} token types, but the three numbers must be equal; download the GGUF file again"
        )
    merges = _merges(fields("tokenizer.ggml.merges"), ids)
    tokenizer = Tokenizer(models.BPE(ids, merges, ignore_merges=kind == "llama-bpe"))
    tokenizer.pre_tokenizer = _pre_tokenizer(kind)
    if kind == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(
        [
            AddedToken(token, special=type_ == CONTROL, normalized=False)
            for token, type_ in zip(tokens, types, strict=True)
            if type_ in (CONTROL, USER_DEFINED)
        ]
    )
    named = {
        role: _token(tokens, f"tokenizer.ggml.{key}_token_id", number)
        for role, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown"))
        if (number := fields(f"tokenizer.ggml.{key}_token_id", None)) is not None
    }
    # Files of Llama 3 from 2024 lack the field, and llama.cpp puts bos first there.
    if fields("tokenizer.ggml.add_bos_token", kind == "llama-bpe") and "bos" in named:
        bos = named["bos"]
        tokenizer.post_processor = processors.TemplateProcessing(f"{bos} $A", None, [(bos, ids[bos])])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{f"{role}_token": token for role, token in named.items()},
        "chat_template": fields("tokenizer.chat_template", None),
        "clean_up_tokenization_spaces": False,
    }
    write_json(folder / "tokenizer_config.json", config)


def _merges(lines: Sequence[str], ids: Mapping[str, int]) -> list[tuple[str, str]]:
    merges = []
    for number, line in enumerate(lines):
        left, _, right = line.partition(" ")
        if not {left, right, left + right} <= ids.keys():
            raise ArealError(
                f"tokenizer.ggml.merges[{number}]={line!r:.80} joins pieces that are not tokens; the "
                f"GGUF file is damaged, download it again"
            )
        merges.append((left, right))
    return merges


def _token(tokens: Sequence[str], key: str, number: int) -> str:
    if not 0 <= number < len(tokens):
        raise ArealError(
            f"{key}={number} is not among the ids of the {len(tokens)} tokens; the GGUF file "
            f"is damaged, download it again"
        )
    return tokens[number]


def _pre_tokenizer(kind: str) -> Any:
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

    if kind == "smollm":
        return Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    patterns = {"llama-bpe": _LLAMA3, "qwen2": _QWEN2}
    if kind not in patterns:
        there = ", ".join(["smollm", *patterns])
        raise ArealError(f"tokenizer.ggml.pre={kind} is not implemented; use a model with one of: {there}")
    split = Split(Regex(patterns[kind]), "isolated")
    return Sequence([split, ByteLevel(add_prefix_space=False, use_regex=False)])
