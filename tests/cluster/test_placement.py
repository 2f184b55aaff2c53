"""Which process is on which machine and devices."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_jax.cluster.placement import LaunchError, Process, environment, make_plan
from areal_jax.config.loading import load_config


def plan_of(*words: str, accelerator: str = "gpu", **more):
    return make_plan(load_config(*words), accelerator, **more)


def where(plan) -> dict[str, tuple[int, tuple[int, ...]]]:
    return {process.name: (process.machine, process.devices) for process in plan.processes}


def of(plan, role: str) -> list[Process]:
    return [process for process in plan.processes if process.role == role]


def test_what_fits_on_one_machine_runs_on_one_and_shares_no_device():
    plan = plan_of(
        "trainer.mesh.fsdp=4", "runtime.trainer_processes=2", "runtime.hosts=2", "runtime.host_tensor=2"
    )
    assert where(plan) == {
        "controller": (0, ()),
        "reward-0": (0, ()),
        "trainer-0": (0, (0, 1)),
        "trainer-1": (0, (2, 3)),
        "generate-0": (0, (4, 5)),
        "generate-1": (0, (6, 7)),
    }
    assert (plan.trainer_machines, plan.generation_machines, plan.devices_on(0)) == (1, 0, 8)


def test_otherwise_trainer_and_hosts_have_machines_of_their_own():
    plan = plan_of(
        "trainer.mesh.fsdp=8", "runtime.trainer_processes=2", "runtime.hosts=3", "launch.machine_devices=4"
    )
    placed = where(plan)
    assert [placed[f"trainer-{i}"] for i in (0, 1)] == [(0, (0, 1, 2, 3)), (1, (0, 1, 2, 3))]
    assert [placed[f"generate-{i}"] for i in (0, 1, 2)] == [(2, (0,)), (2, (1,)), (2, (2,))]
    assert (plan.trainer_machines, plan.generation_machines) == (2, 1)


def test_an_evaluation_host_is_one_more_host_and_exports_alone_need_no_device():
    split = ("trainer.mesh.fsdp=4", "runtime.hosts=2", "runtime.host_tensor=2")
    assert where(plan_of(*split))["generate-1"] == (0, (6, 7))
    plan = plan_of(*split, "observe.evaluate=64", "launch.machine_devices=10", "observe.exports=1")
    assert where(plan)["evaluate-0"] == (0, (8, 9))
    plan = plan_of(*split, "observe.evaluate=64")  # ten devices do not fit on a machine of eight
    placed = where(plan)
    assert [placed[name] for name in ("generate-0", "generate-1", "evaluate-0")] == [
        (1, (0, 1)), (1, (2, 3)), (1, (4, 5)),
    ]  # fmt: skip
    assert (plan.devices_on(0), plan.devices_on(1), plan.devices_on(0, 1)) == (4, 6, 6)
    plan = plan_of(*split, "observe.exports=3")
    (alone,) = of(plan, "evaluate")
    assert where(plan)["evaluate-0"] == (0, ()) and environment(plan, alone)["JAX_PLATFORMS"] == "cpu"
    assert (plan.machines, plan.devices_on(0), alone.devices) == (1, 8, ())


@settings(max_examples=40)
@given(
    processes=st.integers(1, 5),
    share=st.integers(1, 8),
    hosts=st.integers(1, 9),
    host_share=st.integers(1, 8),
    is_one=st.booleans(),
)
def test_no_two_processes_share_a_device_and_every_one_has_its_share(
    processes, share, hosts, host_share, is_one
):
    words = (f"trainer.mesh.fsdp={processes * share}", f"runtime.trainer_processes={processes}")
    plan = plan_of(
        *words, f"runtime.hosts={hosts}", f"runtime.host_tensor={host_share}", "algorithm.group_size=8",
        one_machine=is_one,
    )  # fmt: skip
    owned = [(p.machine, device) for p in plan.processes for device in p.devices]
    assert len(owned) == len(set(owned)) == processes * share + hosts * host_share
    assert all(len(p.devices) == share for p in of(plan, "trainer"))
    assert all(len(p.devices) == host_share for p in of(plan, "generate"))
    assert is_one or all(device < 8 for _, device in owned)
    machines = {machine for machine, _ in owned}
    assert machines == set(range(plan.machines)) and (plan.machines == 1 or not is_one)
    assert {p.machine for p in of(plan, "trainer")}.isdisjoint({p.machine for p in of(plan, "generate")}) or (
        plan.machines == 1
    )


def test_a_process_sees_its_own_devices_and_falls_back_to_no_other_kind():
    plan = plan_of("runtime.hosts=2")
    seen = {process.name: environment(plan, process) for process in plan.processes}
    assert seen["controller"]["JAX_PLATFORMS"] == seen["reward-0"]["JAX_PLATFORMS"] == "cpu"
    assert seen["generate-1"]["JAX_PLATFORMS"] == "cuda"
    assert [seen[n]["CUDA_VISIBLE_DEVICES"] for n in ("trainer-0", "generate-0", "generate-1")] == [
        "0",
        "1",
        "2",
    ]
    assert seen["generate-1"]["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.92"
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" not in seen["controller"]
    # The controller writes its flags into the journal's header.
    assert len({seen[name]["XLA_FLAGS"] for name in ("controller", "trainer-0", "generate-0")}) == 1
    assert "--xla_gpu_enable_latency_hiding_scheduler=true" in seen["trainer-0"]["XLA_FLAGS"]
    on_cpu = plan_of("trainer.mesh.fsdp=4", "runtime.trainer_processes=2", accelerator="cpu")
    trainer = environment(on_cpu, of(on_cpu, "trainer")[1])
    assert (trainer["JAX_PLATFORMS"], trainer["JAX_NUM_CPU_DEVICES"]) == ("cpu", "2")
    assert "XLA_FLAGS" not in trainer


@pytest.mark.parametrize(
    ("words", "accelerator", "message"),
    [
        (["runtime.placement=shared"], "gpu", r"runtime.placement=shared.*areal-jax run"),
        (
            ["trainer.mesh.fsdp=4", "runtime.trainer_processes=3"],
            "gpu",
            r"trainer_processes=3 does not divide the 4",
        ),
        (
            ["trainer.mesh.fsdp=16"],
            "gpu",
            r"gives one process 16 devices, but a machine has only 8",
        ),
        (["runtime.host_tensor=16"], "gpu", r"runtime.host_tensor gives one process 16 devices"),
        (["run.name=7th-try"], "gpu", r"run.name=7th-try.*begins with a letter"),
        (
            ["runtime.hosts=2", "launch.machine_devices=4"],
            "tpu",
            r"generate-0, generate-1 would share.*host_tensor=4",
        ),
    ],
)
def test_what_cannot_be_placed_is_refused_with_the_key(words, accelerator, message):
    with pytest.raises(LaunchError, match=message):
        plan_of(*words, accelerator=accelerator)
