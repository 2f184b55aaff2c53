"""Hugging Face folders: what transformers computes of them, where their tensors land, what is refused."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

from areal_jax.generation.engine import Engine
from areal_jax.models.attention import PackedAttention
from areal_jax.models.config import ModelConfig
from areal_jax.models.io.families import axis_sizes, tensors_of
from areal_jax.models.io.huggingface import export_folder, open_folder
from areal_jax.models.io.safetensors_folder import Stored, staged
from areal_jax.models.lora import leaves_of
from areal_jax.models.model import Model
from areal_jax.parallel.mesh import make_mesh, param_shardings
from areal_jax.types import ArealError
from tests.models.golden import (
    GOLDEN,
    MIXTURES,
    NAMES,
    SEGMENTS,
    abstract_of,
    copy_of,
    expected,
    greedy,
    model_of,
)

pytestmark = pytest.mark.few_optimizations


@cache
def loaded(name: str) -> tuple[Model, Any]:
    pretrained = open_folder(GOLDEN / name)
    return model_of(pretrained.config), pretrained.load(abstract_of(pretrained.config))


@partial(jax.jit, static_argnums=0)
def forward(model: Model, params: Any, tokens: Any, positions: Any, segments: Any) -> tuple[Any, Any]:
    hidden, _ = model.hidden(params, tokens, positions, PackedAttention(segments))
    return hidden, model.logits(params, hidden.reshape(-1, hidden.shape[-1])).reshape(*tokens.shape, -1)


def is_equal(tree: Any, other: Any) -> bool:
    return jax.tree.all(jax.tree.map(np.array_equal, tree, other))


def all_bytes(folder: Path) -> dict[str, tuple[Any, ...]]:
    """Every tensor of the folder by name: dtype, shape, bytes."""
    return {
        name: (value.dtype, value.shape, value.tobytes())
        for path in folder.glob("*.safetensors")
        for name, value in load_file(path).items()
    }


PLACES = ((0, slice(0, 9)), (0, slice(9, 14)), (1, slice(1, 15)))
"""Row and columns of each segment."""


def packed(name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A fixture's three segments in two rows: tokens, positions, segments."""
    tokens, positions, segments = np.zeros((3, 2, 16), np.int32)
    pieces = np.split(expected(name)["tokens"], np.cumsum(SEGMENTS)[:-1])
    for number, (place, piece) in enumerate(zip(PLACES, pieces, strict=True), 1):
        tokens[place], positions[place], segments[place] = piece, np.arange(len(piece)), number
    return tokens, positions, segments


# --- parity with transformers -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_the_files_fill_the_tree_of_the_model(name: str):
    model, params = loaded(name)
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, model.abstract_params)


@pytest.mark.parametrize("name", NAMES)
def test_packed_forward_is_that_of_transformers(name: str):
    """Hidden states after the last norm, and logits."""
    model, params = loaded(name)
    want = expected(name)
    hidden, logits = map(np.asarray, forward(model, params, *packed(name)))
    got_hidden = np.concatenate([hidden[place] for place in PLACES])
    got_logits = np.concatenate([logits[place] for place in PLACES])
    assert np.abs(want["logits"]).max() > 1
    np.testing.assert_allclose(got_hidden, want["hidden"], rtol=0, atol=1e-4)
    np.testing.assert_allclose(got_logits, want["logits"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", MIXTURES)
def test_loss_and_gradients_are_those_of_transformers(name: str):
    """The mean cross entropy of next tokens, and the norm of its gradient for each tensor in the files."""
    model, params = loaded(name)
    want, inputs = expected(name), packed(name)

    @jax.jit
    @jax.value_and_grad
    def loss_and_gradients(params: Any) -> Any:
        logp = jax.nn.log_softmax(forward(model, params, *inputs)[1])
        nexts = [logp[row, columns][:-1] for row, columns in PLACES]
        tokens = [inputs[0][row, columns][1:] for row, columns in PLACES]
        return -jnp.take_along_axis(jnp.concatenate(nexts), np.concatenate(tokens)[:, None], 1).mean()

    loss, slopes = loss_and_gradients(params)
    leaves, sizes = leaves_of(slopes, sep="."), axis_sizes(model.config)
    norms = {
        stored: np.linalg.norm(np.asarray(leaves[tensor.path])[index])
        for tensor in tensors_of(model.config)
        for index, stored in tensor.names(sizes).items()
    }
    np.testing.assert_allclose(loss, want["loss"], rtol=1e-5)
    np.testing.assert_allclose(
        [norms[each] for each in sorted(norms)], want["gradients"], rtol=1e-3, atol=1e-6
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_greedy_decoding_is_that_of_transformers(name: str):
    """Prefill in chunks, then decode through pages."""
    model, params = loaded(name)
    want = expected(name)
    engine = Engine(model, slots=1, length=24, decode_steps=8, page_tokens=8, prefill_chunk=4)
    assert greedy(engine, params, want["prompt"], len(want["greedy"])) == want["greedy"].tolist()


# --- where tensors land -----------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["rules", "last axes"])
def test_each_leaf_lands_on_its_sharding_with_equal_bits(layout: str):
    """A 2 x 2 mesh: by the rules for parameters, and cut along layers and along each leaf's last axis."""
    model, whole = loaded("llama3-scaled")
    mesh = make_mesh({"fsdp": 2, "tensor": 2}, jax.devices(), "a test")
    shardings = param_shardings(model.logical_axes, model.abstract_params, mesh)
    if layout == "last axes":
        shardings = jax.tree.map(
            lambda leaf: NamedSharding(mesh, PartitionSpec(*["fsdp", None, None][: leaf.ndim - 1], "tensor")),
            model.abstract_params,
        )
    placed = open_folder(GOLDEN / "llama3-scaled").load(model.abstract_params, shardings)
    assert jax.tree.map(lambda leaf: leaf.sharding, placed) == shardings
    assert (
        placed["blocks"]["attention"]["q"].addressable_shards[0].data.size * 4
        == whole["blocks"]["attention"]["q"].size
    )
    for leaf, want in zip(jax.tree.leaves(placed), jax.tree.leaves(whole), strict=True):
        assert leaf.dtype == jnp.float32
        assert np.asarray(leaf).tobytes() == np.asarray(want).tobytes()


@pytest.mark.parametrize("name", MIXTURES)
def test_a_device_reads_only_its_own_experts(name: str, monkeypatch: pytest.MonkeyPatch):
    """A 2 x 2 mesh: each device reads one layer of half of the experts, so that each tensor is read once."""
    _, whole = loaded(name)
    mesh = make_mesh({"fsdp": 2, "tensor": 2}, jax.devices(), "a test")
    shardings = jax.tree_util.tree_map_with_path(
        lambda path, _: NamedSharding(
            mesh, PartitionSpec(*["fsdp", "tensor"] if "expert" in str(path) else [])
        ),
        whole,
    )
    reads: Counter[str] = Counter()

    def counted(stored: Stored, *index: slice) -> np.ndarray:
        reads[stored.name] += 1
        return read(stored, *index)

    read = Stored.read
    monkeypatch.setattr(Stored, "read", counted)
    pretrained = open_folder(GOLDEN / name)
    placed = pretrained.load(abstract_of(pretrained.config), shardings)
    assert is_equal(placed, whole)
    count = {number for stored, number in reads.items() if ".experts." in stored}
    assert count == {1}


@pytest.mark.parametrize("name", NAMES)
def test_both_forms_of_a_config_say_the_same(name: str, tmp_path: Path):
    folder = copy_of(name, tmp_path)
    shutil.move(folder / "config.v4.json", folder / "config.json")
    assert open_folder(folder).config == loaded(name)[0].config


# --- and back ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama-tied", "float32"),
        ("llama3-scaled", "float32"),
        ("qwen2-sharded", "bfloat16"),
        ("qwen3-untied", "float16"),
        ("qwen3-moe", "bfloat16"),
        ("qwen3-moe-single", "float16"),
        ("qwen2-moe", "bfloat16"),
        ("olmoe", "float16"),
        ("mixtral", "bfloat16"),
    ],
)
def test_a_round_trip_moves_no_bit(name: str, dtype: str, tmp_path: Path):
    """Names, dtypes, shapes, bytes; and the config that transformers accepted when the fixture was made."""
    model, params = loaded(name)
    out = tmp_path / "out"
    export_folder(out, model.config, params, dtype, GOLDEN / name)
    assert all_bytes(out) == all_bytes(GOLDEN / name)
    written = json.loads((out / "config.json").read_text())
    assert written.pop("torch_dtype") == dtype
    accepted = json.loads((GOLDEN / name / "exported.json").read_text())
    assert accepted.pop("torch_dtype") == "float32"
    assert written == accepted
    again = open_folder(out)
    assert again.config == model.config
    assert is_equal(again.load(abstract_of(model.config)), params)


SWIGLU = ("gate_proj", "up_proj", "down_proj")
ATTENTION = (
    "input_layernorm", "post_attention_layernorm", *(f"self_attn.{name}_proj" for name in "qkvo"),
)  # fmt: skip
QK_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
EXPERTS = ("mlp.gate", *(f"mlp.experts.{{}}.{name}" for name in SWIGLU))
SHARED = ("mlp.shared_expert_gate", *(f"mlp.shared_expert.{name}" for name in SWIGLU))
MIXTURE = dict(
    vocab_size=11, layers=2, width=7, heads=6, kv_heads=3, head_dim=4, mlp_width=9, experts=12,
    experts_per_token=2, expert_width=5,
)  # fmt: skip
WRITTEN: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "qwen3_moe": (dict(has_qk_norm=True), (*QK_NORMS, *EXPERTS)),
    "qwen2_moe": (dict(shared_width=13), (*EXPERTS, *SHARED)),
    "olmoe": (dict(has_qk_norm=True, is_qk_norm_joint=True, mlp_width=5), (*QK_NORMS, *EXPERTS)),
    "mixtral": (
        dict(has_unit_weights=True, mlp_width=5),
        ("block_sparse_moe.gate", *(f"block_sparse_moe.experts.{{}}.{name}" for name in ("w1", "w2", "w3"))),
    ),
}
"""Family -> options of a model, and modules with a weight; `{}` stands for the number of an expert."""


@pytest.mark.parametrize("family", WRITTEN)
def test_a_mixture_is_written_a_tensor_for_each_expert_and_read_again(family: str, tmp_path: Path):
    options, modules = WRITTEN[family]
    config = ModelConfig(**{**MIXTURE, "family": family, **options})
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: rng.random(leaf.shape, np.float32), abstract_of(config))
    export_folder(tmp_path / "out", config, params)
    names = {
        f"model.layers.{layer}.{module.format(expert)}.weight"
        for layer in range(config.layers)
        for module in (*ATTENTION, *modules)
        for expert in range(config.experts)
    }
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert tensors.keys() == names | {"model.embed_tokens.weight", "model.norm.weight"}
    (gate,) = (module for module in modules if module.endswith(("{}.gate_proj", "{}.w1")))
    np.testing.assert_array_equal(
        tensors[f"model.layers.1.{gate.format(11)}.weight"], params["blocks"]["mlp"]["expert_gate"][1, 11].T
    )
    again = open_folder(tmp_path / "out")
    assert again.config == config
    assert is_equal(again.load(abstract_of(config)), params)


def test_an_export_beyond_the_limit_is_sharded_and_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("areal_jax.models.io.safetensors_folder.SHARD_BYTES", 30_000)
    model, params = loaded("llama-tied")
    out = tmp_path / "out"
    export_folder(out, model.config, params)
    files = sorted(out.glob("*.safetensors"))
    assert [path.name for path in files] == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    assert max(path.stat().st_size for path in files) < 32_000
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * model.parameter_count
    assert {path.name for path in files} == set(index["weight_map"].values())
    assert all_bytes(out) == all_bytes(GOLDEN / "llama-tied")
    assert open_folder(out).config == model.config


def test_an_export_takes_the_tokenizer_and_special_ids_along(tmp_path: Path):
    model, params = loaded("llama-tied")
    source = copy_of("llama-tied", tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "notes.txt"):
        (source / name).write_text(f"content of {name}")
    export_folder(tmp_path / "out", model.config, params, tokenizer_from=source)
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert files == {
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
    }  # fmt: skip
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "content of tokenizer.json"
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (written["eos_token_id"], written["max_position_embeddings"]) == (2, 64)


def test_an_export_that_fails_leaves_nothing_behind(tmp_path: Path):
    model, params = loaded("llama-tied")
    large = {**params, "norm": params["norm"].at[0].set(1e6)}
    with pytest.raises(
        ArealError, match=r"model\.norm\.weight has values beyond float16's range; use --dtype"
    ):
        export_folder(tmp_path / "out", model.config, large, "float16")
    assert list(tmp_path.iterdir()) == []


def test_the_second_to_write_a_folder_leaves_the_first_ones(tmp_path: Path):
    with pytest.raises(ArealError, match="out exists already"), staged(tmp_path / "out") as stage:
        (stage / "mine").touch()
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "theirs").touch()
    assert [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.rglob("*"))] == ["out", "out/theirs"]


def test_an_export_is_as_readable_as_other_files(tmp_path: Path):
    model, params = loaded("llama-tied")
    export_folder(tmp_path / "out", model.config, params)
    (tmp_path / "other").touch()
    modes = {path.stat().st_mode for path in (tmp_path / "out").iterdir()}
    assert modes == {(tmp_path / "other").stat().st_mode}


def test_exports_that_cannot_be_are_refused(tmp_path: Path):
    model, params = loaded("llama-tied")
    (tmp_path / "there").mkdir()
    with pytest.raises(ArealError, match="there exists already; give another folder"):
        export_folder(tmp_path / "there", model.config, params)
    with pytest.raises(ArealError, match="dtype=int8 cannot be exported; choose one of: float32"):
        export_folder(tmp_path / "out", model.config, params, "int8")
    with pytest.raises(ArealError, match=r"tokenizer_from=.*nowhere is not a folder"):
        export_folder(tmp_path / "out", model.config, params, tokenizer_from=tmp_path / "nowhere")
    sizes: dict[str, Any] = dict(
        vocab_size=9, layers=1, width=8, heads=2, kv_heads=2, head_dim=4, mlp_width=8
    )
    both = ModelConfig(**sizes, has_qkv_bias=True, has_qk_norm=True)
    with pytest.raises(ArealError, match="no Hugging Face architecture has all of has_qkv_bias=True, has"):
        export_folder(tmp_path / "out", both, {})
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


# --- what is refused --------------------------------------------------------------------------------------


def edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the tensors of a one-file fixture."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def cut(folder: Path, size: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])


def index(folder: Path, value: Any) -> None:
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(value))


def test_a_single_file_is_read_though_an_old_index_names_shards(tmp_path: Path):
    folder = copy_of("llama-tied", tmp_path)
    index(folder, {"weight_map": {K_PROJ: "model-1.safetensors"}})
    tensors = load_file(folder / "model-1.safetensors")
    save_file(tensors | {"model.norm.weight": np.full(32, 7, np.float32)}, folder / "model.safetensors")
    np.testing.assert_array_equal(open_folder(folder).stored["model.norm.weight"].read(), np.full(32, 7))


FUSED = "model.layers.0.mlp.experts.gate_up_proj"
K_PROJ = "model.layers.1.self_attn.k_proj.weight"

BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no folder": (shutil.rmtree, "is not a folder; give one with config.json and safetensors files"),
    "no config": (lambda f: (f / "config.json").unlink(), "has no config.json; give a Hugging Face model"),
    "config no JSON": (
        lambda f: (f / "config.json").write_text("{,"),
        r"config.json is not JSON \(Expecting",
    ),
    "config a list": (
        lambda f: (f / "config.json").write_text("[]"),
        "config.json is not a JSON object",
    ),
    "config not UTF-8": (lambda f: (f / "config.json").write_bytes(b"\xff"), "config.json is not JSON"),
    "no weights": (
        lambda f: (f / "model.safetensors").unlink(),
        "has neither model.safetensors nor model.safetensors.index.json; its weights are missing",
    ),
    "tensors missing": (
        lambda f: edit(f, lambda t: (t.pop(K_PROJ), t.pop("model.norm.weight"))),
        rf"lacks 2 \(model.norm.weight, {K_PROJ}\) of 20 tensors; download the folder again",
    ),
    "tensors left over": (
        lambda f: edit(f, lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": np.ones(32)})),
        r"config.json does not use 1 \(model.layers.0.self_attn.q_proj.bias\) of the tensors",
    ),
    "fused experts": (
        lambda f: edit(f, lambda t: t.update({FUSED: np.ones((4, 32, 32), np.float32)})),
        rf"1 \({FUSED}\) of the tensors contain the matrices of all experts, which is not implemented; load",
    ),
    "another shape": (
        lambda f: edit(f, lambda t: t.update({K_PROJ: np.ones((32, 32), np.float32)})),
        rf"{K_PROJ} has the shape \[32, 32\], but config.json requires \[16, 32\]",
    ),
    "another dtype": (
        lambda f: edit(f, lambda t: t.update({K_PROJ: t[K_PROJ].astype(np.float64)})),
        f"{K_PROJ} is F64, which is not implemented; use a folder with only F32, F16, BF16",
    ),
    "header cut": (lambda f: cut(f, 100), "model.safetensors is truncated or not a safetensors file"),
    "data cut": (lambda f: cut(f, -1), "model.safetensors is truncated or not a safetensors file"),
    "empty": (lambda f: cut(f, 0), "model.safetensors is truncated or not a safetensors file"),
    "index names a missing file": (
        lambda f: index(f, {"weight_map": {K_PROJ: "model-2.safetensors"}}),
        "index.json names model-2.safetensors, which is missing in .*; download it too",
    ),
    "index leaves the folder": (
        lambda f: index(f, {"weight_map": {K_PROJ: "../llama-tied/model-1.safetensors"}}),
        "names model-1.safetensors, which is missing in",
    ),
    "index without a map": (
        lambda f: index(f, {"weight_map": [1]}),
        "has no weight_map from tensors to files",
    ),
}


@pytest.mark.parametrize(("breaking", "message"), BROKEN.values(), ids=BROKEN)
def test_broken_folders_are_named(breaking: Callable[[Path], Any], message: str, tmp_path: Path):
    folder = copy_of("llama-tied", tmp_path)
    breaking(folder)
    with pytest.raises(ArealError, match=message):
        open_folder(folder)


def test_rotary_buffers_and_an_equal_head_are_let_through(tmp_path: Path):
    folder = copy_of("llama-tied", tmp_path)
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    edit(folder, lambda t: t.update(buffer, **{"lm_head.weight": t["model.embed_tokens.weight"].copy()}))
    model, params = loaded("llama-tied")
    assert is_equal(open_folder(folder).load(model.abstract_params), params)


def test_a_head_that_contradicts_its_tie_is_refused(tmp_path: Path):
    folder = copy_of("llama-tied", tmp_path)
    edit(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] * np.float32(2)}))
    model, _ = loaded("llama-tied")
    with pytest.raises(ArealError, match=r"tie_word_embeddings is true, but lm_head\.weight differs"):
        open_folder(folder).load(model.abstract_params)


def test_sixteen_bit_files_are_read_exactly(tmp_path: Path):
    folder = copy_of("llama-tied", tmp_path)
    value = np.array([1 + 2.0**-7, -3.0, *[2.0**-20] * 30], ml_dtypes.bfloat16)
    edit(folder, lambda t: t.update({"model.norm.weight": value}))
    model, _ = loaded("llama-tied")
    params = open_folder(folder).load(model.abstract_params)
    np.testing.assert_array_equal(params["norm"], value.astype(np.float32))
