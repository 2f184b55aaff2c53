"""Step times of synchronous and asynchronous RL by a cost model: shared devices against split devices.

Synchronous: trainer and generator take turns on all devices, with one parallel degree, and the state of both
stays in memory. Asynchronous: a part of the devices trains while the others generate; each role has its own
parallel degree, its own micro-batch and all the memory of its devices.

A replica of m devices processes a micro-batch of b samples in a(m) + b c(m) seconds, so the time per sample
falls with b. A role with D devices has D / m replicas and needs

    T(D, m, b) = B m / D (a(m) / b + c(m))    seconds for a batch of B samples,

    T_sync  = min over m of (min over b T_t(G, m, b) + min over b T_g(G, m, b))
    T_async = min over θ of max(min over m, b T_t(θ G, m, b), min over m, b T_g((1 - θ) G, m, b)).

T_async <= T_sync: the synchronous optimum's degree and micro-batches also fit on split devices, because they
leave more memory free and give each replica a larger share of the batch. With θ in proportion to the two
times, either role then takes at most T_sync. T_async < T_sync where memory limits a micro-batch: without the
other role's state it can grow. Numbers of devices and samples are real numbers, as in the theory.

LlamaRL, Wu et al. (https://arxiv.org/abs/2505.24034), whose theorem this models.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from areal_jax.types import ArealError

SPLIT_STEPS = 40
"""Bisections of the device split θ: each halves the interval, to 1e-12 in the end."""


@dataclass(frozen=True, kw_only=True)
class DeviceCosts:
    """The devices of a run and the links between them."""

    count: int
    memory_bytes: float
    """Bytes that a program may use on one device."""
    degrees: tuple[int, ...] = tuple(2**power for power in range(11))
    """Parallel degrees to choose from; those above `count` are left out."""
    node: int = 8
    """Devices of one node (machine)."""
    link: float = math.inf
    """Bytes per second that a device sends to the others of its node."""
    network: float = math.inf
    """Bytes per second that a node sends to other nodes in one all-reduce."""
    start_s: float = 0.0
    """Seconds of an all-reduce without data between two devices of a node, whatever their number."""
    device_s: float = 0.0
    """Seconds that each further device of a node adds to an all-reduce."""
    doubling_s: float = 0.0
    """Seconds that each doubling of the number of nodes adds to an all-reduce."""

    def latency_s(self, degree: int) -> float:
        """Return the seconds of an all-reduce without data among `degree` devices."""
        if degree == 1:
            return 0.0
        within = self.device_s * (min(degree, self.node) - 1)
        return self.start_s + within + self.doubling_s * math.log2(max(1.0, degree / self.node))

    def transfer_s(self, degree: int, sent_bytes: float) -> float:
        """Return the seconds that `sent_bytes` of all-reduced data spend on the links of `degree` devices.

        DeviceCosts of a node reduce first; then each node exchanges the result with the others.
        """
        within, nodes = min(degree, self.node), max(1.0, degree / self.node)
        exchanged = (1 - 1 / within) / self.link + (1 - 1 / nodes) / self.network
        return 2 * sent_bytes * exchanged


@dataclass(frozen=True, kw_only=True)
class RoleCost:
    """Time and memory of one role, trainer or generator.

    Device-seconds are seconds times devices: m devices need 1 / m of them each.
    """

    fixed_s: float
    """Device-seconds of a micro-batch of any size, such as for reading the weights."""
    sample_s: float
    """Device-seconds per sample."""
    sample_read_s: float = 0.0
    """Device-seconds per sample for reading its own memory, divided by at most `sample_split` devices."""
    messages: float = 0.0
    """All-reduces of a micro-batch, one after the other, if the degree is above 1."""
    sent_bytes: float = 0.0
    """Bytes per sample that these all-reduces reduce."""
    state_bytes: float
    """Bytes of weights, gradients and optimiser state that a replica's devices divide among them."""
    device_bytes: float = 0.0
    """Bytes that each device holds at any degree, such as its part of a state that all replicas divide."""
    sample_bytes: float
    """Bytes per sample of a micro-batch: activations or KV."""
    sample_split: float = math.inf
    """Largest number of devices that divide a sample's memory; beyond it they hold copies."""
    most_samples: float = math.inf
    """Largest micro-batch of a replica."""

    def times_s(self, devices: DeviceCosts, degree: int) -> tuple[float, float]:
        """Return a(m), seconds of a micro-batch, and c(m), further seconds for each of its samples."""
        fixed_s = self.fixed_s / degree + self.messages * devices.latency_s(degree)
        read_s = self.sample_read_s / min(degree, self.sample_split)
        return fixed_s, self.sample_s / degree + read_s + devices.transfer_s(degree, self.sent_bytes)

    def resident_bytes(self, degree: int) -> float:
        """Return the bytes of state on each of a replica's devices."""
        return self.state_bytes / degree + self.device_bytes


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Devices, roles and batch. Raises ArealError for a figure that is not above 0, or negative."""

    devices: DeviceCosts
    trainer: RoleCost
    generator: RoleCost
    samples: float
    """Samples of a batch, which is one training step."""
    shared_generator: RoleCost | None = None
    """The generator on shared devices if its engine is another one, at least as costly; None: the same."""
    longest: float = 1.0
    """Longest completion of a batch over its mean: a synchronous step decodes until the longest has ended,
    an asynchronous generator starts other samples meanwhile. 1: all are equally long, as in the theory.
    """

    def __post_init__(self) -> None:
        figures = {"samples": self.samples, "devices.count": self.devices.count}
        figures |= {"devices.link": self.devices.link, "devices.network": self.devices.network}
        for name in ("trainer", "generator", "shared_generator"):
            if (role := getattr(self, name)) is None:
                continue
            positive = ("sample_s", "sample_bytes", "sample_split", "most_samples")
            figures |= {f"{name}.{one}": getattr(role, one) for one in positive}
            for one in fields(role):
                if not getattr(role, one.name) >= 0:
                    raise ArealError(f"{name}.{one.name}={getattr(role, one.name)}; give 0 or more")
        for name, figure in figures.items():
            if not figure > 0:
                raise ArealError(f"{name}={figure}; give a number above 0")
        if not self.longest >= 1:
            raise ArealError(f"longest={self.longest} is below the mean; give a ratio of at least 1")


@dataclass(frozen=True)
class RolePlan:
    """How one role works: on `devices` devices, in replicas of `degree`, `samples` samples at a time."""

    devices: float
    degree: int
    samples: float
    step_s: float
    """Seconds for a batch; math.inf: the state and one sample do not fit."""
    is_memory_bound: bool
    """Whether memory, and nothing else, limits the micro-batch."""


@dataclass(frozen=True)
class StepPlan:
    """A step's time, and the plan of each role."""

    step_s: float
    trainer: RolePlan
    generator: RolePlan

    @property
    def theta(self) -> float:
        """Fraction θ of the split devices that train."""
        return self.trainer.devices / (self.trainer.devices + self.generator.devices)

    @property
    def is_memory_bound(self) -> bool:
        return self.trainer.is_memory_bound or self.generator.is_memory_bound


def plan_role(model: CostModel, role: RoleCost, count: float, degree: int, resident: float) -> RolePlan:
    """Return the role's fastest plan at this degree: the largest micro-batch that fits.

    `count`: number of devices of the role; `resident`: bytes of state on each device.
    """
    room_bytes = (model.devices.memory_bytes - resident) * min(degree, role.sample_split)
    fitting = room_bytes / role.sample_bytes
    share = model.samples * degree / count
    wanted = min(share, model.samples, role.most_samples)
    samples = min(fitting, wanted)
    if fitting < min(1.0, wanted) or samples <= 0:
        return RolePlan(count, degree, 0.0, math.inf, True)
    fixed_s, sample_s = role.times_s(model.devices, degree)
    return RolePlan(count, degree, samples, share * (fixed_s / samples + sample_s), fitting < wanted)


def synchronous(model: CostModel) -> StepPlan:
    """Return the fastest step with shared devices.

    Activations and KV use the memory beside both states in turn. Raises ArealError if no degree fits.
    """
    steps = [_shared(model, degree) for degree in _degrees(model)]
    return _fitting(model, min(steps, key=lambda step: step.step_s))


def asynchronous(model: CostModel) -> StepPlan:
    """Return the fastest step with split devices, at the balanced split: both roles take equally long.

    Raises ArealError if no degree fits.
    """
    low, high = 0.0, 1.0
    step = _split(model, 0.5)
    # The trainer's time falls with θ and the generator's rises, so they are equal at one θ.
    for _ in range(SPLIT_STEPS):
        theta = (low + high) / 2
        step = _split(model, theta)
        low, high = (theta, high) if step.trainer.step_s > step.generator.step_s else (low, theta)
    return _fitting(model, step)


def speedup(model: CostModel) -> float:
    """Return T_sync / T_async. Raises ArealError if no degree fits."""
    return synchronous(model).step_s / asynchronous(model).step_s


def _degrees(model: CostModel) -> list[int]:
    return [degree for degree in model.devices.degrees if degree <= model.devices.count]


def _shared(model: CostModel, degree: int) -> StepPlan:
    count, shared = model.devices.count, model.shared_generator or model.generator
    roles = (model.trainer, shared)
    resident = sum(role.resident_bytes(degree) for role in roles)
    trainer, generator = (plan_role(model, role, count, degree, resident) for role in roles)
    fixed_s, _ = shared.times_s(model.devices, degree)
    wait_s = (model.longest - 1) * fixed_s
    return StepPlan(trainer.step_s + generator.step_s + wait_s, trainer, generator)


def _split(model: CostModel, theta: float) -> StepPlan:
    count = model.devices.count
    trainer = _fastest(model, model.trainer, theta * count)
    generator = _fastest(model, model.generator, (1 - theta) * count)
    return StepPlan(max(trainer.step_s, generator.step_s), trainer, generator)


def _fastest(model: CostModel, role: RoleCost, count: float) -> RolePlan:
    plans = [plan_role(model, role, count, degree, role.resident_bytes(degree)) for degree in _degrees(model)]
    return min(plans, key=lambda plan: plan.step_s)


def _fitting(model: CostModel, step: StepPlan) -> StepPlan:
    if math.isinf(step.step_s):
        raise ArealError(
            f"state and one sample fit at no parallel degree of {_degrees(model)} into "
            f"devices.memory_bytes={model.devices.memory_bytes:.4g}; "
            "give more devices, higher degrees or more memory"
        )
    return step
