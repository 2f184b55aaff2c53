"""What a compiled program does, counted from its optimised HLO: products, traffic, collectives, kernels.

A loop's body counts as often as the loop runs. Bytes are those that each kernel reads from and writes to
device memory, without caches between kernels: a slice counts as the slice, not as the array it is taken
from, and an update in place as the update. Only matrix products count as FLOPs.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import numpy as np

from areal_jax.plan.hlo import Array, Computation, Instruction, Module

FREE = frozenset((
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id",
    "replica-id", "opt-barrier", "while", "conditional", "call", "async-start", "async-update", "async-done",
))  # fmt: skip
"""Instructions that move no byte themselves."""

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
FUSIONS = ("fusion", "fusion-start")
"""One kernel of several instructions; XLA since jaxlib 0.11 starts some without waiting for them."""

SLICES = ("dynamic-slice", "slice", "gather")
SAME = ("bitcast", "reshape", "get-tuple-element")
"""Instructions whose result is (a part of) their operand's memory, inside a fusion."""
ELEMENTWISE = frozenset((
    "add", "subtract", "multiply", "divide", "maximum", "minimum", "negate", "exponential", "log", "rsqrt",
    "select", "compare", "convert", "and", "or", "not",
))  # fmt: skip
"""Instructions of which a fusion computes only what is needed, an element from one of each operand."""
HOST_SPACE = 5


@dataclass(frozen=True)
class Assumed:
    """What the text alone does not say, because it depends on data."""

    trips: Mapping[str, int] = field(default_factory=dict)
    """Name of a `jax.named_scope` -> trips of the while loop in it. A loop without one counts once."""
    takes_costlier: bool = True
    """Which branch of a conditional runs: the one with the most FLOPs and bytes, or that with the fewest.

    A branch with a kernel always runs, for the other one is only there for inputs that the kernel refuses.
    """
    keys: float = 0.0
    """Mean number of keys that a query sees in an attention kernel, padding queries included."""
    context: float = 0.0
    """Mean number of a slot's tokens that a call of the paged attention kernel reads."""
    expert_rows: float = 1.0
    """Share of the rows of a kernel for experts' products that are of the device's own experts."""
    experts_read: float = 1.0
    """Share of the device's experts that have a row."""


@dataclass(frozen=True)
class Collective:
    kind: str
    dtype: str
    """dtype of the largest operand."""
    bytes: int
    """Bytes of the whole array: of the result of an all-gather, of an operand of the others."""
    devices: int

    @property
    def sent(self) -> float:
        """Bytes that each device sends, at least: as a ring or a switch does it."""
        share = (self.devices - 1) / self.devices
        factor = {"all-reduce": 2 * share, "collective-permute": 1.0}.get(self.kind, share)
        return self.bytes * factor


class Moved(NamedTuple):
    array: str
    """dtype and shape, as "bf16[8,1536]"."""
    bytes: float
    """What is read or written of it."""


@dataclass(frozen=True)
class Traffic:
    """What one launch of a kernel moves; kernels that move the same for the same operation are equal."""

    opcode: str
    operation: str
    """`Instruction.operation`."""
    line: str
    """`Module.line`."""
    reads: tuple[Moved, ...]
    writes: tuple[Moved, ...]

    @property
    def bytes(self) -> float:
        return sum(one.bytes for one in (*self.reads, *self.writes))


@dataclass
class Costs:
    """One call of a program on one device."""

    flops: Counter[str] = field(default_factory=Counter)
    """dtype of the operands of matrix products -> FLOPs; "f32 highest" at jax's precision "highest"."""
    traffic: Counter[Traffic] = field(default_factory=Counter)
    """What kernels read from and write to device memory -> number of launches."""
    host_bytes: float = 0.0
    """Bytes moved between the device and the host's memory."""
    collectives: Counter[Collective] = field(default_factory=Counter)
    """Collective -> number of times."""
    kernels: Counter[str] = field(default_factory=Counter)
    """Kernel -> number of launches: custom calls that are not XLA's own."""
    dynamic_loops: int = 0
    """Number of while loops (in the text) whose trips depend on data."""
    conditionals: int = 0
    """Number of conditionals in the text."""

    def add(self, other: Costs, times: float = 1) -> None:
        """Add `other`, `times` over; loops and conditionals count once, as in the text."""
        self.host_bytes += times * other.host_bytes
        for mine, theirs in (
            (self.flops, other.flops),
            (self.traffic, other.traffic),
            (self.collectives, other.collectives),
            (self.kernels, other.kernels),
        ):
            for key, count in theirs.items():
                mine[key] += times * count  # pyright: ignore[reportArgumentType, reportCallIssue]
        self.dynamic_loops += other.dynamic_loops
        self.conditionals += other.conditionals

    @property
    def bytes(self) -> float:
        """Bytes read from and written to device memory."""
        return sum(one.bytes * count for one, count in self.traffic.items())

    def largest_traffic(self, share: float) -> list[tuple[Traffic, float]]:
        """Returns what moves most, with its launches, until `share` of all bytes are moved."""
        found, left = [], share * self.bytes
        for one, times in sorted(self.traffic.items(), key=lambda item: -item[0].bytes * item[1]):
            if left <= 0:
                break
            found.append((one, times))
            left -= one.bytes * times
        return found

    @property
    def sent(self) -> float:
        """Bytes that each device sends to others."""
        return sum(one.sent * count for one, count in self.collectives.items())

    @property
    def weight(self) -> float:
        """One number to compare branches by: bytes, and FLOPs at 100 per byte."""
        return self.bytes + sum(self.flops.values()) / 100


def costs_of(module: Module, assumed: Assumed | None = None) -> Costs:
    """Returns the costs of one call of the module."""
    assumed = assumed or Assumed()
    return _Counter(module, assumed).of(module.entry)


def written(module: Module, at_least: int) -> list[str]:
    """Returns "name: opcode" of each instruction that writes a new array of `at_least` bytes or more.

    An update in place writes none. Loops and branches are searched too.
    """
    found = []
    for computation in _executed(module):
        for one in computation:
            whole = [moved for moved in _writes(module, one) if moved.bytes >= at_least]
            if one.opcode not in FREE and not one.opcode.endswith("-done") and whole:
                found.append(f"{one.name}: {one.opcode}")
    return found


def _executed(module: Module) -> Iterable[Computation]:
    """Returns the computations whose instructions are kernels: not those inside of a fusion."""
    found: dict[str, Computation] = {}
    waiting = [module.entry]
    while waiting:
        computation = waiting.pop()
        if computation.name in found:
            continue
        found[computation.name] = computation
        for one in computation:
            if one.opcode in ("while", "conditional", "call", "async-start"):
                waiting += module.called(one)
    return found.values()


class _Counter:
    def __init__(self, module: Module, assumed: Assumed) -> None:
        self._module, self._assumed = module, assumed
        self.of = cache(self._of)

    def _of(self, computation: Computation) -> Costs:
        total = Costs()
        for one in computation:
            total.add(self._one(computation, one))
        return total

    def _one(self, computation: Computation, one: Instruction) -> Costs:
        called = self._module.called(one)
        if one.opcode == "conditional":
            return self._taken([self.of(branch) for branch in called])
        if one.opcode in ("while", "call", "async-start"):
            trips, total = 1, Costs()
            if one.opcode == "while":
                trips = self._module.trips(computation, one)
                total.dynamic_loops += trips is None
            for inner in called:  # of a while loop the condition and the body
                total.add(self.of(inner), self._assumed_trips(one) if trips is None else trips)
            return total
        own = Costs()
        kind = one.opcode.removesuffix("-start")
        if one.opcode in FUSIONS:
            for inner in called:
                self._inside(inner, own)
        elif kind in COLLECTIVES:
            self._communicate(computation, one, own)
        elif one.opcode == "custom-call":
            if _custom(self._module, computation, one, own, self._assumed):
                return own
        else:
            _multiply(computation, one, own)
        if one.opcode not in FREE and not one.opcode.endswith("-done"):
            moved = _reads(self._module, computation, one), _writes(self._module, one)
            own.traffic[_traffic(self._module, one, *moved)] += 1
            own.host_bytes += _to_or_from_host(computation, one)
        return own

    def _assumed_trips(self, one: Instruction) -> int:
        """Returns the trips assumed for the innermost of the named scopes that the loop is in."""
        scopes = one.operation
        at = {name: scopes.rfind(name) for name in self._assumed.trips if name in scopes}
        return self._assumed.trips[max(at, key=lambda name: at[name])] if at else 1

    def _taken(self, branches: list[Costs]) -> Costs:
        launches = [sum(branch.kernels.values()) for branch in branches]
        if max(launches) > min(launches):
            taken = branches[launches.index(max(launches))]
        else:
            choose = max if self._assumed.takes_costlier else min
            taken = choose(branches, key=lambda branch: branch.weight)
        total = Costs(
            dynamic_loops=sum(branch.dynamic_loops for branch in branches),
            conditionals=1 + sum(branch.conditionals for branch in branches),
        )
        total.add(Costs(
            taken.flops, taken.traffic, taken.host_bytes, taken.collectives, taken.kernels
        ))  # fmt: skip
        return total

    def _inside(self, computation: Computation, own: Costs) -> None:
        """Add the products and collectives inside of a fusion; its traffic is that of the fusion."""
        # A TPU's compiler repeats a collective in each fusion that carries a step of it.
        is_begun = any("AsyncCollectiveStart" in one.attributes for one in computation)
        for one in computation:
            if one.opcode.removesuffix("-start") in COLLECTIVES:
                if is_begun or "chain_id" not in one.attributes:
                    self._communicate(computation, one, own)
            elif one.opcode in (*FUSIONS, "call"):
                for inner in self._module.called(one):
                    self._inside(inner, own)
            else:
                _multiply(computation, one, own)

    def _communicate(self, computation: Computation, one: Instruction, own: Costs) -> None:
        arrays = [array for operand in computation.operands(one) for array in operand.arrays]
        devices = group_size(one.attributes)
        if not arrays or devices == 1:
            return
        kind = one.opcode.removesuffix("-start")
        size = sum(array.bytes for array in arrays) * (devices if kind == "all-gather" else 1)
        dtype = max(arrays, key=lambda array: array.bytes).dtype
        own.collectives[Collective(kind, dtype, size, devices)] += 1


def group_size(attributes: str) -> int:
    """Returns the number of devices that take part in each group of a collective.

    XLA writes the groups as {{0,1},{2,3}}, as [2,2]<=[4], or as mesh['a'=2,'b'=2] {'b'}.
    """
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", attributes):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", found[1]))
        return math.prod(int(sizes[name]) for name in re.findall(r"'(\w+)'", found[2]))
    if found := re.search(r"replica_groups=\[(\d+),(\d+)\]", attributes):
        return int(found[2])
    if found := re.search(r"replica_groups=\{\{([\d,]*)\}", attributes):
        return found[1].count(",") + 1
    if found := re.search(r"source_target_pairs=\{(.*?)\}\}", attributes):
        return found[1].count("{") or 1
    return 1


# --- products and kernels -----------------------------------------------------------------------------------


def _multiply(computation: Computation, one: Instruction, own: Costs) -> None:
    """Add the FLOPs of a matrix product, which some backends write as a convolution."""
    if one.opcode not in ("dot", "convolution"):
        return
    left, right = (operand.arrays[0] for operand in computation.operands(one))
    if one.opcode == "dot":
        terms = math.prod(left.shape[axis] for axis in one.dims("lhs_contracting_dims"))
        results = one.arrays[0].size
    else:
        results, terms = _of_convolution(left, right, one)
    own.flops[_speed(left, right, one)] += 2 * results * terms


def _of_convolution(left: Array, right: Array, one: Instruction) -> tuple[int, int]:
    """Returns two numbers whose product is the number of multiplications of a convolution.

    XLA's TPU compiler writes matrix products so. Positions in the padding do not count.
    """
    found = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", one.attributes)
    assert found is not None, one.attributes
    inputs, kernel, results = (
        dict(zip(labels, array.shape, strict=True))
        for labels, array in zip(found.groups(), (left, right, one.arrays[0]), strict=True)
    )
    axes = sorted(label for label in kernel if label.isdigit())

    def window(name: str, otherwise: str) -> list[str]:
        given = re.search(rf"window={{[^}}]*\b{name}=([\w\-]+)", one.attributes)
        return given[1].split("x") if given else [otherwise] * len(axes)

    pads, strides = window("pad", "0_0"), window("stride", "1")
    bases, steps = window("lhs_dilate", "1"), window("rhs_dilate", "1")
    pairs = 1
    for axis, pad, stride, base, step in zip(axes, pads, strides, bases, steps, strict=True):
        low, last = int(pad.split("_")[0]), (inputs[axis] - 1) * int(base)
        at = np.arange(results[axis])[:, None] * int(stride) - low + np.arange(kernel[axis]) * int(step)
        pairs *= int(((at >= 0) & (at <= last) & (at % int(base) == 0)).sum())
    return results["b"] * results["f"] * pairs, kernel["i"]


def _speed(left: Array, right: Array, one: Instruction) -> str:
    """Returns the key of `Costs.flops` for a product: the wider operand's dtype, and whether TF32 is off."""
    dtype = max(left, right, key=lambda array: array.bytes / max(1, array.size)).dtype
    is_highest = re.search(r"operand_precision\W+highest", one.attributes, re.IGNORECASE)
    return "f32 highest" if dtype == "f32" and is_highest else dtype


def _custom(module: Module, computation: Computation, one: Instruction, own: Costs, assumed: Assumed) -> bool:
    """Add a custom call: a product by cuBLAS, one of our kernels, or one that only marks its operands.

    Returns whether its traffic is counted: that of a product is not.
    """
    target = one.attribute("custom_call_target").strip('"')
    operands = [operand.arrays[0] for operand in computation.operands(one) if operand.arrays]
    if "cublas" in target:
        found = re.search(r'"lhs_contracting_dimensions":\["?([\d",]*)"?\]', one.attributes)
        axes = [int(axis) for axis in re.findall(r"\d+", found[1])] if found else []
        terms = math.prod(operands[0].shape[axis] for axis in axes)
        own.flops[_speed(operands[0], operands[1], one)] += 2 * one.arrays[0].size * terms
        return False
    kernel = kernel_name(one)
    if kernel is None:
        return True
    own.kernels[kernel] += 1
    if "expert" in kernel:
        _experts(module, one, operands, own, assumed)
        return True
    queries = operands[0]
    # Two products in the forward pass, five in the backward pass.
    products = 5 if "bwd" in kernel or "ackward" in kernel else 2
    own.flops[queries.dtype] += int(2 * products * queries.size * assumed.keys)
    reads = [Moved(str(x), x.bytes) for x in operands]
    if "paged" in kernel:  # it reads what the tables list, not the pool
        layers, count, _, page_tokens, _ = operands[1].shape
        listed = queries.shape[0] * assumed.context / (layers * count * page_tokens)
        for at, x in enumerate(operands[1:], 1):
            if x.shape[:4] == operands[1].shape[:4]:  # of numbers and of scales
                reads[at] = Moved(str(x), x.bytes * listed)
    own.traffic[_traffic(module, one, reads, [Moved(str(x), x.bytes) for x in one.arrays])] += 1
    return True


def _experts(
    module: Module, one: Instruction, operands: Sequence[Array], own: Costs, assumed: Assumed
) -> None:
    """Add a kernel for a mixture's experts, whose first operand are the sorted rows.

    It multiplies them by matrices or by other rows, or sums each token's.
    """
    (rows, other), (result,) = operands[:2], one.arrays
    is_sum = "sums" in (kernel_name(one) or "")
    if not is_sum:
        inputs, outputs = rows.shape[1], (result if len(result.shape) == 2 else other).shape[-1]
        own.flops[rows.dtype] += int(2 * rows.shape[0] * inputs * outputs * assumed.expert_rows)

    def moved(x: Array) -> Moved:
        is_of_rows = len(x.shape) == 2 and x.shape[0] == rows.shape[0]
        is_read_matrix = len(x.shape) == 3 and x is not result
        share = assumed.expert_rows if is_of_rows else assumed.experts_read if is_read_matrix else 1
        return Moved(str(x), x.bytes * share)

    # Of the gradients of all experts, those without a row are written too.
    own.traffic[_traffic(module, one, map(moved, operands), [moved(result)])] += 1


def kernel_name(one: Instruction) -> str | None:
    """Returns the name of the kernel that a custom call launches; None if XLA itself implements it."""
    target = one.attribute("custom_call_target").strip('"')
    if target.startswith("__cudnn$fmha"):
        return "cudnn attention bwd" if "Backward" in target else "cudnn attention fwd"
    if target == "__gpu$xla.gpu.triton":
        found = re.search(r'\bname = "(\w+)"', one.attributes)
        return f"triton {found[1]}" if found else "triton"
    return "pallas" if target == "tpu_custom_call" else None


# --- traffic ------------------------------------------------------------------------------------------------


def _traffic(module: Module, one: Instruction, reads: Iterable[Moved], writes: Iterable[Moved]) -> Traffic:
    some = [tuple(moved for moved in part if moved.bytes) for part in (reads, writes)]
    return Traffic(one.opcode, one.operation, module.line(one), *some)


def _reads(module: Module, computation: Computation, one: Instruction) -> list[Moved]:
    """Returns what one kernel reads of each operand in device memory."""
    operands = computation.operands(one)
    if one.opcode in FUSIONS:
        inner = module.called(one)[0]
        return [
            Moved(_text(operand), _device_bytes(operand) * _share_read(inner, parameter))
            for parameter, operand in zip(inner.parameters, operands, strict=False)
        ]
    if one.opcode in SLICES:
        operands = [one, *operands[1:]]
    elif one.opcode in ("dynamic-update-slice", "scatter"):
        operands = operands[1:]
    return [Moved(_text(operand), _device_bytes(operand)) for operand in operands]


def _share_read(inner: Computation, one: Instruction) -> float:
    """Returns the share of the elements of `one`, an array inside of a fusion, that the fusion needs."""
    total = 0.0
    for user in inner.users[one.name]:
        is_first = user.operands[0] == one.name
        if user.opcode in SLICES and is_first:
            total += user.arrays[0].size / max(1, one.arrays[0].size)
        elif user.opcode in ("dynamic-update-slice", "scatter") and is_first:
            total += 0  # updated in place
        elif (user.opcode in SAME or user.opcode in ELEMENTWISE) and not user.is_root:
            total += _share_read(inner, user)
        else:
            return 1.0
    return min(total, 1.0)


def _writes(module: Module, one: Instruction) -> list[Moved]:
    """Returns what one kernel writes, for each array of its result in device memory."""
    if one.opcode in FUSIONS:
        inner = module.called(one)[0]
        return _written_inside(inner, inner.root)
    if one.opcode in ("dynamic-update-slice", "scatter"):
        return []  # in place; the update's bytes were read, and are as many
    arrays, count = one.arrays, len(one.operands)
    if one.opcode == "copy-start":  # (result, operand, context)
        arrays = arrays[:1]
    elif one.opcode.endswith("-start") and len(arrays) > count:  # (operands, results, context)
        arrays = arrays[count : 2 * count]
    return [Moved(str(array), array.bytes) for array in arrays if not array.space]


def _written_inside(inner: Computation, root: Instruction) -> list[Moved]:
    if root.opcode == "tuple":
        return [moved for part in inner.operands(root) for moved in _written_inside(inner, part)]
    if root.opcode in SAME and inner.operands(root):
        source = inner.operands(root)[0]
        if source.opcode in ("dynamic-update-slice", "scatter"):
            return _written_inside(inner, source)
    if root.opcode in ("dynamic-update-slice", "scatter"):
        update = inner.operands(root)[1 if root.opcode == "dynamic-update-slice" else 2]
        return [Moved(_text(update), update.bytes)]
    return [Moved(str(array), array.bytes) for array in root.arrays if not array.space]


def _text(one: Instruction) -> str:
    return " ".join(map(str, one.arrays))


def _device_bytes(one: Instruction) -> int:
    return sum(array.bytes for array in one.arrays if not array.space)


def _to_or_from_host(computation: Computation, one: Instruction) -> int:
    results = one.arrays[:1] if one.opcode == "copy-start" else one.arrays
    arrays = [*results, *(array for operand in computation.operands(one) for array in operand.arrays)]
    return sum(array.bytes for array in arrays if array.space == HOST_SPACE)
