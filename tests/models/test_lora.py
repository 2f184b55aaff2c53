"""Adapters beside the projections: against float64 numpy, decoded, merged, in peft's files."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from areal_jax.models.config import PROJECTIONS, Lora, ModelConfig
from areal_jax.models.io.families import axis_sizes
from areal_jax.models.io.huggingface import export_folder, open_folder
from areal_jax.models.io.peft import export_adapter
from areal_jax.models.lora import adapters_of, base_of, with_adapters
from areal_jax.models.model import Model
from areal_jax.parallel.mesh import make_mesh, param_shardings
from areal_jax.tasks.tokenizers import CharTokenizer
from areal_jax.types import ArealError
from tests.algorithms.batches import positions_of, segments_of
from tests.models import reference
from tests.models.golden import GOLDEN, abstract_of
from tests.models.test_transformer import OPTIONS, SIZES, packed, paged, randomised

RANK, ALPHA = 3, 12.0
THEIRS = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "out": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def model_with(targets: str = ".*", option: str = "qwen2", dtype: str = "float32") -> Model:
    lora = Lora(RANK, ALPHA, targets)
    config = ModelConfig(**{**SIZES, **OPTIONS[option]}, lora=lora, dtype=dtype)
    return Model(config, CharTokenizer("abcdefghijk"))


@pytest.fixture(scope="module")
def model() -> Model:
    return model_with()


@pytest.fixture(scope="module")
def params(model: Model) -> Any:
    return randomised(model)


def by_hand(params: Any) -> Any:
    """The base with W + (alpha / rank) a b, in float64, an output and an input at a time by einsum."""

    def merged(block: dict[str, Any]) -> dict[str, Any]:
        out = {
            name: np.asarray(leaf, np.float64) for name, leaf in block.items() if not isinstance(leaf, dict)
        }
        for name in [name for name in out if f"{name}_lora" in block]:
            a, b = (np.asarray(block[f"{name}_lora"][part], np.float64) for part in "ab")
            rows = "lhkr" if name == "out" else "lir"
            columns = "lrhk" if b.ndim == 4 else "lro"
            if name == "out":
                out[name] += ALPHA / RANK * np.einsum(f"{rows},lro->lhko", a, b)
            else:
                out[name] += ALPHA / RANK * np.einsum(f"{rows},{columns}->li{columns[2:]}", a, b)
        return out

    blocks = params["blocks"]
    whole = {name: leaf for name, leaf in blocks.items() if not isinstance(leaf, dict)}
    whole |= {name: merged(blocks[name]) for name in ("attention", "mlp")}
    return {**params, "blocks": whole}


def with_half_of_a(adapters: Any) -> Any:
    def half(path: Any, leaf: Any) -> Any:
        return 0.5 * leaf if path[-1].key == "a" else leaf

    return jax.tree_util.tree_map_with_path(half, adapters)


# --- what is computed ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_forward_and_decode_are_those_of_the_merged_matrices(model: Model, params: Any):
    """The trainer's packed rows, and prefill and decode through pages: the same x W + (alpha / r) (x a) b."""
    # `a` is halved, since a b is scaled by alpha / rank = 4: with entries of 0.3 in both, the adapters are
    # larger than any real ones, and float32 alone errs by 1.4e-5 on a CPU without AVX-512. With half of `a`
    # it errs by 2.9e-6, and the adapters still change logits by 10.
    params = with_adapters(base_of(params), with_half_of_a(adapters_of(params)))
    segments = segments_of(((5, 7),), 12)
    tokens = np.random.default_rng(2).integers(0, 13, segments.shape).astype(np.int32)
    got = np.asarray(packed(model, params, tokens, positions_of(segments), segments))
    want = [reference.logits(model.config, by_hand(params), part) for part in np.split(tokens[0], [5])]
    np.testing.assert_allclose(got[0], np.concatenate(want), rtol=0, atol=1e-5)
    without = reference.logits(model.config, base_of(params), tokens[0, :5])
    assert np.abs(without - want[0]).max() > 0.1
    prompt, table = tokens[:, 5:], np.array([[1, 2]], np.int32)
    cache, positions = model.kv_pages(2, 6, "float32"), np.arange(7)[None]
    seen = positions < 6
    first, cache = paged(model, params, prompt, table, positions, seen, cache)
    last, _ = paged(model, params, prompt[:, 6:], table, positions[:, 6:], ~seen[:, 6:], cache)
    np.testing.assert_allclose(first[0, :6], want[1][:6], rtol=0, atol=1e-5)
    np.testing.assert_allclose(last[0, 0], want[1][6], rtol=0, atol=1e-5)


@pytest.mark.slow
def test_new_adapters_change_nothing_and_move_no_bit_of_the_base(model: Model):
    base, params = model.base.init(3), model.init(3)
    same = jax.tree.map(
        lambda a, b: np.asarray(a).tobytes() == np.asarray(b).tobytes(), base_of(params), base
    )
    assert jax.tree.all(same)
    adapters = adapters_of(params)["blocks"]
    for part, name in (("attention", "q"), ("attention", "out"), ("mlp", "down")):
        a, b = (np.asarray(adapters[part][f"{name}_lora"][leaf]) for leaf in "ab")
        inputs = a[0].size / RANK
        assert not b.any() and 0.5 < a.std() * np.sqrt(inputs) < 1.5
        assert not (a[0] == a[1]).any()  # layers draw apart
    segments = np.ones((1, 12), np.int32)
    tokens = np.arange(12, dtype=np.int32)[None]
    with_them = packed(model, params, tokens, positions_of(segments), segments)
    without = packed(model.base, base, tokens, positions_of(segments), segments)
    np.testing.assert_array_equal(np.asarray(with_them), np.asarray(without))


@pytest.mark.parametrize(
    "targets, names", [("q|v", {"q", "v"}), ("down", {"down"}), (".*", set(PROJECTIONS))]
)
def test_targets_name_whole_projections(targets: str, names: set[str]):
    blocks = model_with(targets).abstract_params["blocks"]
    found = {name for part in ("attention", "mlp") for name in blocks[part] if name.endswith("_lora")}
    assert found == {f"{name}_lora" for name in names}


def test_targets_that_match_nothing_are_refused():
    with pytest.raises(ArealError, match=r"targets=q_proj matches no .* q, k, v, out, gate, up, down"):
        Lora(RANK, ALPHA, "q_proj")


def test_a_mesh_splits_adapters_as_their_matrices_and_never_the_rank(model: Model):
    mesh = make_mesh({"fsdp": 2, "tensor": 2}, jax.devices(), "a test")
    placed = param_shardings(model.logical_axes, model.abstract_params, mesh)["blocks"]
    specs = {
        name: (tuple(block[f"{name}_lora"]["a"].spec), tuple(block[f"{name}_lora"]["b"].spec))
        for block, name in ((placed["attention"], "q"), (placed["attention"], "out"), (placed["mlp"], "down"))
    }
    assert specs == {
        "q": ((None, "fsdp", None), (None, None, "tensor", None)),
        "out": ((None, "tensor", None, None), (None, None, "fsdp")),
        "down": ((None, "tensor", None), (None, None, "fsdp")),
    }


def test_taken_apart_and_put_together(params: Any):
    again = with_adapters(base_of(params), adapters_of(params))
    assert jax.tree.structure(again) == jax.tree.structure(params)
    assert jax.tree.all(jax.tree.map(lambda a, b: a is b, again, params))


# --- files --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("option, targets", [("qwen2", ".*"), ("llama", "q|v|down")])
def test_adapter_on_its_base_is_the_merged_model_is_ours(option: str, targets: str, tmp_path: Path):
    """peft's formula in numpy: of each tensor W of the base's folder, W + (lora_alpha / r) lora_B lora_A."""
    model = model_with(targets, option)
    params = randomised(model)
    export_adapter(tmp_path / "adapter", model.config, params, "somewhere/base")
    export_folder(tmp_path / "base", model.base.config, base_of(params))
    export_folder(tmp_path / "merged", model.base.config, model.merged(params))
    about = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    adapter = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    names = [name for name in PROJECTIONS if name in model.config.lora.names]  # pyright: ignore
    assert (about["peft_type"], about["task_type"]) == ("LORA", "CAUSAL_LM")
    assert about["base_model_name_or_path"] == "somewhere/base"
    assert sorted(about["target_modules"]) == sorted(THEIRS[name].split(".")[1] for name in names)
    base, merged = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "merged"))
    expected = dict(base)
    for layer in range(2):
        for name in names:
            place = f"model.layers.{layer}.{THEIRS[name]}"
            a, b = (adapter.pop(f"base_model.model.{place}.lora_{part}.weight") for part in "AB")
            assert a.shape[0] == b.shape[1] == about["r"] == RANK
            update = about["lora_alpha"] / about["r"] * (b.astype(np.float64) @ a.astype(np.float64))
            assert np.abs(update).max() > 0.1
            expected[f"{place}.weight"] = base[f"{place}.weight"] + update
    assert not adapter
    assert expected.keys() == merged.keys()
    for name, want in expected.items():
        np.testing.assert_allclose(merged[name], want, rtol=0, atol=1e-5, err_msg=name)
    again = open_folder(tmp_path / "merged").load(model.base.abstract_params)
    segments = np.ones((1, 12), np.int32)
    tokens = np.arange(12, dtype=np.int32)[None]
    ours = packed(model, params, tokens, positions_of(segments), segments)
    theirs = packed(model.base, again, tokens, positions_of(segments), segments)
    np.testing.assert_allclose(np.asarray(theirs), np.asarray(ours), rtol=0, atol=1e-4)


def test_an_adapter_of_a_mixture_of_experts_has_the_matrices_of_attention(tmp_path: Path):
    lora = Lora(RANK, ALPHA, "q|k|v|out")
    config = dataclasses.replace(open_folder(GOLDEN / "qwen3-moe").config, lora=lora)
    rng, sizes = np.random.default_rng(0), axis_sizes(config)
    params = abstract_of(config)
    for name, inputs, outputs in (
        ("q", "D", "H h"),
        ("k", "D", "K h"),
        ("v", "D", "K h"),
        ("out", "H h", "D"),
    ):
        ins, outs = ([sizes[letter] for letter in axes.split()] for axes in (inputs, outputs))
        a, b = rng.random((2, *ins, RANK), np.float32), rng.random((2, RANK, *outs), np.float32)
        params["blocks"]["attention"][f"{name}_lora"] = {"a": a, "b": b}
    export_adapter(tmp_path / "adapter", config, params, "somewhere/base")
    about = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert about["target_modules"] == ["q_proj", "k_proj", "v_proj", "o_proj"]
    adapter = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert len(adapter) == 2 * 2 * 4
    stored = adapter["base_model.model.model.layers.1.self_attn.o_proj.lora_A.weight"]
    a = params["blocks"]["attention"]["out_lora"]["a"]
    np.testing.assert_array_equal(stored, a[1].reshape(-1, RANK).T)


def test_what_cannot_be_an_adapter_is_refused(model: Model, params: Any, tmp_path: Path):
    with pytest.raises(ArealError, match="no adapters to write"):
        export_adapter(tmp_path / "x", model.base.config, base_of(params), "base")
    with pytest.raises(ArealError, match=r"dtype=int8 cannot be exported; choose one of: float32"):
        export_adapter(tmp_path / "x", model.config, params, "base", "int8")
    assert not (tmp_path / "x").exists()
