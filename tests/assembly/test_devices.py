"""Who gets which devices, and what lies on them."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError

import jax
import pytest

from areal_jax import plugin
from areal_jax.assembly import devices, doctor, parts
from areal_jax.assembly.devices import header, overwrites_serving, place
from areal_jax.assembly.doctor import diagnose
from areal_jax.assembly.gpus import gpu_environment
from areal_jax.assembly.memory_table import memory_table, served_bytes
from areal_jax.config.loading import load_config
from areal_jax.config.tree import Config
from areal_jax.generation.engine import Engine
from areal_jax.models.config import Lora, model_config
from areal_jax.models.model import Model
from areal_jax.sandbox.runner import require_sandbox
from areal_jax.tasks.tokenizers import CharTokenizer
from areal_jax.types import ArealError
from tests.hangs import HANG_S


def config(*settings: str) -> Config:
    return load_config({"tasks": {"countdown": {}}}, *settings)


@pytest.fixture
def four(monkeypatch) -> list[jax.Device]:
    """The four devices of the tests; nothing makes others of them."""
    assert jax.device_count() >= 4
    monkeypatch.setattr(devices, "use_virtual_cpus", lambda count: None)
    return jax.devices()[:4]


def ids(mesh) -> list[int]:
    return [device.id for device in mesh.devices.flat]


# --- placement ----------------------------------------------------------------------------------------------


APART = (
    "algorithm.preset=grpo",
    "runtime.reference={mesh: {tensor: 2}, dtype: bfloat16}",
    "observe.evaluate=0",
)


def test_reference_and_teacher_lie_between_the_trainer_and_the_hosts(four):
    placed = place(config(*APART, "runtime.placement=split"))
    assert placed.reference is not None and placed.teacher is None
    assert [ids(mesh) for mesh in (placed.trainer, placed.reference, *placed.hosts)] == [[0], [1, 2], [3]]
    assert placed.reference.shape["tensor"] == 2
    teacher = ("algorithm.preset=distillation", "algorithm.teacher=tiny", "runtime.teacher.mesh={data: 2}")
    placed = place(config(*teacher, "runtime.placement=split"))
    assert placed.teacher is not None and (ids(placed.teacher), ids(placed.hosts[0])) == ([1, 2], [3])


def test_an_executor_of_its_own_needs_devices_of_its_own(four):
    with pytest.raises(
        ArealError, match="needs 3 devices for the trainer and 2 for the hosts, but there are 4"
    ):
        place(config(*APART, "runtime.placement=split", "runtime.hosts=2"))
    with pytest.raises(ArealError, match=r"runtime\.reference\.mesh and .* need devices of their own"):
        place(config(*APART, "runtime.placement=shared"))


def test_an_executor_apart_is_forecast_on_its_own_devices():
    n = model().parameter_count
    rows = memory_table(config(*APART), model(), "split")
    found = {(owner, what): size for owner, what, size in rows if "reference" in what}
    assert found == {("the reference's devices", "reference policy, bfloat16"): 2 * n // 2}


def test_split_gives_everybody_devices_of_their_own(four):
    placed = place(config("runtime.placement=split", "trainer.mesh.fsdp=2", "runtime.hosts=2"))
    assert placed.placement == "split"
    assert ids(placed.trainer) == [0, 1]
    assert [ids(host) for host in placed.hosts] == [[2], [3]]
    assert dict(placed.trainer.shape) == {"data": 1, "fsdp": 2, "tensor": 1, "context": 1, "expert": 1}


def test_a_host_may_have_several_devices(four):
    placed = place(config("runtime.placement=split", "runtime.host_tensor=3"))
    assert (ids(placed.trainer), [ids(host) for host in placed.hosts]) == ([0], [[1, 2, 3]])
    assert dict(placed.hosts[0].shape) == {"tensor": 3}


def test_shared_puts_everybody_on_the_same_devices(four):
    placed = place(config("runtime.placement=shared", "runtime.hosts=2", "trainer.mesh.fsdp=2"))
    assert placed.placement == "shared"
    assert ids(placed.trainer) == [0, 1]
    assert [ids(host) for host in placed.hosts] == [[0], [0]]


@pytest.mark.parametrize("count, expected", [(4, "split"), (2, "split"), (1, "shared")])
def test_auto_splits_where_there_are_devices_for_it(four, monkeypatch, count, expected):
    monkeypatch.setattr(devices.jax, "devices", lambda: four[:count])
    assert place(config("runtime.placement=auto")).placement == expected


@pytest.mark.parametrize(
    "settings, message",
    [
        (
            ["runtime.placement=split", "trainer.mesh.data=4"],
            "needs 4 devices for the trainer and 1 for the hosts",
        ),
        (
            ["runtime.placement=split", "runtime.hosts=4"],
            "but there are 4; use runtime.placement=shared, or reduce trainer.mesh",
        ),
        (
            ["runtime.placement=shared", "trainer.mesh.tensor=8"],
            "the trainer's mesh tensor=8 needs 8 devices, but only 4 are there",
        ),
        (
            ["runtime.placement=shared", "runtime.host_tensor=5"],
            "generation host 0's mesh tensor=5 needs 5 devices",
        ),
    ],
)
def test_too_few_devices_are_an_error_with_a_remedy(four, monkeypatch, settings, message):
    monkeypatch.setattr(devices.jax, "devices", lambda: four)
    with pytest.raises(ArealError) as error:
        place(config(*settings))
    assert message in str(error.value)
    assert "smaller" in str(error.value) or "reduce" in str(error.value)


def test_a_call_ahead_on_a_shared_device_is_refused_with_a_remedy(four):
    with pytest.raises(ArealError, match=r"calls_ahead=1 .* set generation\.calls_ahead=auto, or runtime\."):
        place(config("runtime.placement=shared", "generation.calls_ahead=1"), four)


FRESH = """
import json, sys
from areal_jax.config.loading import load_config
from areal_jax.assembly.devices import place
out = []
for settings in json.loads(sys.argv[1]):
    placed = place(load_config({"tasks": {"countdown": {}}}, *settings))
    meshes = [placed.trainer, *placed.hosts]
    out.append([placed.placement, [[d.id for d in mesh.devices.flat] for mesh in meshes]])
print(json.dumps(out))
"""


def placed_in_a_fresh_process(*settings: list[str], **environment: str) -> list:
    """Placement on a CPU of which nobody has made devices yet."""
    inherited = {
        key: value for key, value in os.environ.items() if key not in ("JAX_NUM_CPU_DEVICES", "XLA_FLAGS")
    }
    done = subprocess.run(
        [sys.executable, "-c", FRESH, json.dumps(settings)],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
        env={**inherited, "JAX_PLATFORMS": "cpu", **environment},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_cpu_becomes_as_many_devices_as_the_run_needs():
    """And stays so: a second run in the process takes what there is."""
    first, second = placed_in_a_fresh_process(
        ["runtime.hosts=2"], ["runtime.placement=auto", "runtime.hosts=3"]
    )
    assert first == ["split", [[0], [1], [2]]]
    assert second == ["shared", [[0], [0], [0], [0]]]


def test_what_the_environment_says_of_devices_stands():
    (placed,) = placed_in_a_fresh_process(
        ["runtime.placement=auto"], XLA_FLAGS="--xla_force_host_platform_device_count=1"
    )
    assert placed == ["shared", [[0], [0]]]


# --- memory -------------------------------------------------------------------------------------------------


def model(**sizes: int) -> Model:
    tokenizer = CharTokenizer("abcdefgh>")
    return Model(model_config("tiny", tokenizer.vocab_size, **sizes), tokenizer)


def figures(placement: str, *settings: str) -> dict[str, int]:
    rows = memory_table(config("algorithm.kl.coef=0", *settings), model(), placement)
    return {f"{who}: {what.split(',')[0]}": size for who, what, size in rows}


def test_a_shared_device_holds_18_bytes_a_parameter_and_the_kv():
    """float32 master 4, Adam 8, gradient 4, and the one bfloat16 copy that publishing overwrites."""
    settings = ["weights.wire_dtype=bfloat16", "generation.slots=4", "generation.length=64"]
    table = figures("shared", *settings)
    n, c = model().parameter_count, model().config
    kv = table.pop("each host: KV pages")
    assert table.pop("the host's memory: all but the gradient") == 12 * n
    assert sum(table.values()) == 18 * n
    assert kv == 2 * c.layers * (4 + 1) * 64 * c.kv_heads * c.head_dim * 4
    assert table["each host: serving weights"] == 2 * n


def test_other_placements_hold_the_published_copy_and_two_served_ones():
    n = model().parameter_count
    for placement, settings in [
        ("split", []),
        ("shared", ["runtime.hosts=2"]),
        ("shared", ["control.strategy=sync"]),
    ]:
        table = figures(placement, *settings)
        assert table["trainer: published weights"] == 4 * n
        assert table["each host: serving weights"] == 8 * n
    for bound in (1, 3):  # DORA's K, and the next version while it arrives
        table = figures("shared", "control.strategy=pinned", f"control.max_staleness={bound}")
        assert table["each host: serving weights"] == 4 * n * (bound + 1)
    table = figures("split", "control.strategy=pinned", "runtime.redis=redis://127.0.0.1:1/0")
    assert table["each host: serving weights"] == 4 * n * (2 + 1 + 1), "one waits in its process"


def test_a_bfloat16_model_is_served_in_bfloat16():
    """By default; a host of another dtype would cast every matrix at every step."""
    n = model().parameter_count
    for backend, copies in (("memory", 1), ("orbax", 2)):
        table = figures("split", "model.dtype=bfloat16", f"weights.backend={backend}")
        assert table["trainer: published weights"] == 2 * n * copies
        assert table["each host: serving weights"] == 2 * 2 * n
    assert figures("split")["each host: serving weights"] == 2 * 4 * n


def test_staged_weights_hold_one_version_being_written_and_one_waiting():
    n = model().parameter_count
    for placement in ("split", "shared"):
        table = figures(placement, "weights.backend=orbax", "weights.wire_dtype=bfloat16")
        assert table["trainer: published weights"] == 2 * 2 * n
        assert table["each host: serving weights"] == 2 * 2 * n
    assert not overwrites_serving(config("weights.backend=orbax"), "shared")
    assert overwrites_serving(config(), "shared")


def test_an_evaluation_host_holds_what_it_reads_and_what_it_serves():
    n = model().parameter_count
    one = figures("split", "observe.evaluate=8", "weights.wire_dtype=bfloat16", "generation.slots=4")
    assert one["evaluation host: a checkpoint's weights"] == 6 * n
    assert one["evaluation host: KV pages"] == one["each host: KV pages"]
    assert figures("split", "observe.evaluate=8")["evaluation host: a checkpoint's weights"] == 4 * n
    assert not any("evaluation" in who for who in figures("split"))


def test_it_has_devices_after_the_hosts(four):
    devices = place(config("runtime.hosts=2", "observe.evaluate=8", "runtime.placement=split"))
    assert [mesh.devices.flat[0].id for mesh in (devices.trainer, *devices.hosts)] == [0, 1, 2]
    assert devices.evaluation is not None and devices.evaluation.devices.flat[0].id == 3
    assert place(config("runtime.hosts=2")).evaluation is None


def test_moments_in_the_hosts_memory_are_counted_there():
    """10 of the 18 bytes a parameter stay on the device."""
    settings = ["weights.wire_dtype=bfloat16", "trainer.optimizer_memory=host"]
    table = figures("shared", *settings)
    n = model().parameter_count
    assert table["the trainer's host memory: Adam moments"] == 8 * n
    on_device = [size for name, size in table.items() if "memory" not in name and "KV" not in name]
    assert sum(on_device) == 10 * n


def test_shards_pages_and_a_reference_policy_are_counted():
    n = model().parameter_count
    plain = figures("split")
    table = figures(
        "split",
        "trainer.mesh.fsdp=2",
        "trainer.mesh.tensor=2",
        "runtime.host_tensor=2",
        "algorithm.kl.coef=0.1",
        "generation.page_tokens=16",
    )
    assert table["trainer: master weights"] == 4 * n // 4
    assert table["trainer: reference policy"] == 4 * n // 4
    assert "trainer: reference policy" not in plain
    assert table["each host: serving weights"] == plain["each host: serving weights"] // 2
    page = plain["each host: KV pages"] // (8 + 1)  # 8 slots of one page, and the scratch page
    assert table["each host: KV pages"] == page * (8 * 4 + 1) // 4 // 2


def test_only_trained_parameters_have_moments_a_gradient_and_a_reference():
    """The base is held once and served; 16 bytes of gradient, moments and reference are of adapters."""
    lora = Lora(4, 8.0, "q|down")
    tuned = Model(dataclasses.replace(model().config, lora=lora), model().tokenizer)
    c, n = tuned.config, model().parameter_count
    adapters = c.layers * 4 * (c.width + c.heads * c.head_dim + c.mlp_width + c.width)
    words = ["algorithm.kl.coef=0.1", "model.lora={rank: 4, alpha: 8, targets: q|down}"]
    table = {f"{who}: {what}": size for who, what, size in memory_table(config(*words), tuned, "split")}
    few = f"of {adapters:,} trained parameters"
    assert table["trainer: master weights, float32"] == 4 * (n + adapters)
    assert table[f"trainer: Adam moments, float32, {few}"] == 8 * adapters
    assert table[f"trainer: gradient, float32, {few}"] == 4 * adapters
    assert table[f"trainer: reference policy, float32, {few}"] == 4 * adapters
    packed = Model(dataclasses.replace(tuned.config, quantize="int4"), tuned.tokenizer)
    table = {f"{who}: {what}": size for who, what, size in memory_table(config(*words), packed, "split")}
    attention, mlp = 4 * c.width**2, 3 * c.width * c.mlp_width  # half a byte each, and 4 a tile
    halves, scales = (attention + mlp) // 2, 4 * ((attention * 3 // 4 + mlp) // 64 + c.width**2 // 16)
    floats = n + adapters - c.layers * (attention + mlp)
    assert table["trainer: master weights, float32"] == 4 * floats + c.layers * (halves + scales)
    assert table[f"trainer: gradient, float32, {few}"] == 4 * adapters


def test_quantised_hosts_are_forecast_with_their_codes_and_a_version_as_it_arrives():
    """The forecast is the size of what an engine loads; publishing never overwrites what a host quantises."""
    words = ("model.dtype=bfloat16", "generation.quantize=int8", "generation.weight_layout=stacked")
    table = figures("shared", *words)
    engine = Engine(model(), slots=1, length=16, quantize="int8", weight_layout="stacked")
    loaded = jax.tree.leaves(engine.load_params(engine.blank("bfloat16")).params)
    size = sum(leaf.nbytes for leaf in loaded)
    assert served_bytes(model(), "bfloat16", "int8") == size < 2 * model().parameter_count
    assert table["each host: serving weights"] == 2 * size
    assert table["each host: a version as it arrives"] == 2 * model().parameter_count
    assert not overwrites_serving(config(*words), "shared")


def test_a_critic_and_a_teacher_are_counted():
    """A critic of its own is as large as the policy and trained like it; a shared one is a head."""
    n, width = model().parameter_count, model().config.width
    preset = ["algorithm.preset=ppo", "generation.slots=4"]
    plain = figures("split", "generation.slots=4")
    own = figures("split", *preset, "algorithm.critic.kind=separate")
    shared = figures("split", *preset, "algorithm.critic.kind=shared")
    for what, size in (("critic", 4), ("the critic's Adam moments", 8), ("the critic's gradient", 4)):
        assert own[f"trainer: {what}"] == size * (n + width + 1)
        assert shared[f"trainer: {what}"] == size * (width + 1)
        assert f"trainer: {what}" not in plain
    kept = "the host's memory: all but the gradient"
    assert own[kept] == plain[kept] + 12 * (n + width + 1)
    larger = model(layers=3)
    rows = memory_table(config("algorithm.kl.coef=0"), model(), "split", larger)
    assert ("trainer", "teacher, float32", 4 * larger.parameter_count) in rows
    assert (plain[kept]) in [size for _, what, size in rows if "checkpoint" in what]  # teachers are in none


@pytest.mark.parametrize(
    "placement, settings, expected",
    [
        ("shared", [], True),
        ("split", [], False),
        ("shared", ["runtime.hosts=2"], False),
        ("shared", ["trainer.mesh.fsdp=2"], False),
        ("shared", ["runtime.host_tensor=2"], False),
        ("shared", ["control.strategy=sync"], False),  # drains: the old version is decoded with meanwhile
        ("shared", ["generation.on_update=drain"], False),
        ("shared", ["control.strategy=sync", "generation.on_update=recompute"], True),
        ("shared", ["control.strategy=keep"], True),  # the KV is old, the parameters are not
        ("shared", ["control.strategy=pinned"], False),  # live samples hold theirs
    ],
)
def test_what_is_served_is_overwritten_only_where_nobody_else_reads_it(placement, settings, expected):
    assert overwrites_serving(config(*settings), placement) is expected


@pytest.mark.parametrize(
    ("platform", "placement", "words", "expected"),
    [
        ("gpu", "shared", [], "stacked"),  # a converted copy would be a second one
        ("gpu", "split", [], "auto"),
        ("gpu", "shared", ["generation.weight_layout=split"], "split"),
        ("cpu", "shared", [], "auto"),
    ],
)
def test_weights_that_are_overwritten_in_place_stay_stacked(
    monkeypatch, platform, placement, words, expected
):
    monkeypatch.setattr(parts, "platform_of", lambda mesh: platform)
    placed = place(config(f"runtime.placement={placement}", *words))
    assert placed.placement == placement
    assert parts.with_layout(config(*words), placed).weight_layout == expected


# --- this machine -------------------------------------------------------------------------------------------


def test_the_header_names_what_bits_depend_on():
    found = header(config())
    assert set(found) == {
        "device_kind", "devices", "usable_cores", "jaxlib", "xla_flags", "weight_layout",
    }  # fmt: skip
    assert found["devices"] == jax.device_count()
    assert found["usable_cores"] >= 1
    assert json.loads(json.dumps(found)) == found


def test_the_header_of_a_run_on_gpus_names_their_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert header(config())["gpu_environment"] == gpu_environment(config())


def test_diagnose_names_versions_and_devices():
    found = diagnose()
    assert found["jax"] == jax.__version__
    assert found["devices"] == [f"cpu {jax.devices()[0].device_kind}"] * jax.device_count()
    assert found["placement"] == "split"
    assert found["missing"] == []  # `make` installs them all
    assert {found[of]["path"] for of in ("attention", "decode_attention", "expert_products")} == {"blocks"}


def test_a_checkout_that_is_not_installed_can_be_measured(monkeypatch):
    def of_installed(package: str) -> str:
        if package == "areal-jax":
            raise PackageNotFoundError(package)
        return "1.2.3"

    monkeypatch.setattr(plugin, "version", of_installed)
    found = devices.machine("tiny", "float32", [2.0, 1.0, 3.0])
    assert found["versions"] == dict.fromkeys(("jax", "jaxlib", "flax"), "1.2.3") | {
        "areal-jax": "not installed"
    }
    assert (found["seconds"], found["seconds_min"], found["seconds_max"]) == (2.0, 1.0, 3.0)


def test_diagnose_says_what_code_tasks_lack(monkeypatch):
    monkeypatch.setattr(doctor, "require_sandbox", require_sandbox.__wrapped__)  # what it found is kept
    monkeypatch.setenv("PATH", "nowhere")
    assert "install bubblewrap" in diagnose()["code_sandbox"]


def test_cores_are_counted_where_the_system_does_not_say(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity")
    assert devices.usable_cores() == os.cpu_count()
