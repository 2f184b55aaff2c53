"""Reads the text of an optimised HLO module: computations, instructions, array shapes.

The text is what `jax.stages.Compiled.as_text()` returns; its grammar is in XLA's `hlo_parser.cc`. Only what
`plan.costs` needs is kept.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

BITS = {
    "pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "bf16": 16, "f16": 16, "s32": 32,
    "u32": 32, "f32": 32, "s64": 64, "u64": 64, "f64": 64, "c64": 64, "c128": 128,
}  # fmt: skip
"""Bits of an element by dtype; those of the 8-bit floats are in their names (f8e4m3fn)."""

_ARRAY = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,<=]*)\](?:\{([^}]*)\})?")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%([\w.\-]+)"
    r"|(?:branch_computations|called_computations)=\{([^}]*)\}"
)
_TABLES = re.compile(r"^(FileNames|FunctionNames|FileLocations|StackFrames)$", re.MULTILINE)
_ROW = re.compile(r"^(\d+) (?:\"(.*)\"|\{(.*)\})$", re.MULTILINE)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


@dataclass(frozen=True)
class Array:
    dtype: str
    shape: tuple[int, ...]
    space: int = 0
    """Memory space: 0 device memory, 5 the host's; others are memories on the chip."""

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        bits = BITS.get(self.dtype, 8 if self.dtype.startswith("f8") else 0)
        return -(-self.size * bits // 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


def arrays_of(text: str) -> tuple[Array, ...]:
    """Returns the arrays of a type, such as `(f32[2,3]{1,0}, s32[])`, in order; tuples are flattened."""
    found = []
    for dtype, dims, layout in _ARRAY.findall(text):
        if dtype in BITS or dtype.startswith("f8"):
            space = re.search(r"S\((\d+)\)", layout)
            shape = tuple(int(size.lstrip("<=")) for size in dims.split(",") if size)
            found.append(Array(dtype, shape, int(space[1]) if space else 0))
    return tuple(found)


@dataclass(frozen=True)
class Instruction:
    name: str
    opcode: str
    type: str
    operands: tuple[str, ...]
    """Names of the operands."""
    literal: str
    """The text between the parentheses: for a parameter its number."""
    attributes: str
    is_root: bool

    @cached_property
    def arrays(self) -> tuple[Array, ...]:
        return arrays_of(self.type)

    @property
    def bytes(self) -> int:
        return sum(array.bytes for array in self.arrays)

    @property
    def operation(self) -> str:
        """The named scopes and the JAX operation that it comes from, parted by slashes; "" if XLA adds it."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found[1] if found else ""

    @cached_property
    def called(self) -> tuple[str, ...]:
        """Names of the computations that it calls; of a while loop first the condition, then the body."""
        found = {}
        for one, several in _CALLED.findall(self.attributes):
            found |= dict.fromkeys([one] if one else _NAME.findall(several))
        return tuple(found)

    def attribute(self, name: str) -> str:
        """Returns the value of an attribute such as `lhs_contracting_dims={1}` without its braces, or ""."""
        found = re.search(rf"\b{name}=\{{?([^}}\s]*?)\}}?(?:,|$|\s)", self.attributes)
        return found[1] if found else ""

    def dims(self, name: str) -> tuple[int, ...]:
        """Returns the numbers of an attribute such as `lhs_contracting_dims={1}`."""
        return tuple(int(number) for number in self.attribute(name).split(",") if number)


@dataclass(eq=False)
class Computation:
    name: str
    instructions: dict[str, Instruction] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions.values())

    def operands(self, instruction: Instruction) -> list[Instruction]:
        return [self.instructions[name] for name in instruction.operands if name in self.instructions]

    def source(self, instruction: Instruction) -> Instruction:
        """Returns the instruction that computes the value: copies are followed back."""
        while instruction.opcode in ("copy", "bitcast", "copy-done", "copy-start"):
            instruction = self.operands(instruction)[0]
        return instruction

    @cached_property
    def root(self) -> Instruction:
        return next(one for one in self if one.is_root)

    @cached_property
    def parameters(self) -> list[Instruction]:
        found = [one for one in self if one.opcode == "parameter"]
        return sorted(found, key=lambda one: int(one.literal))

    @cached_property
    def users(self) -> Mapping[str, list[Instruction]]:
        found: dict[str, list[Instruction]] = {name: [] for name in self.instructions}
        for one in self:
            for name in dict.fromkeys(one.operands):
                if name in found:
                    found[name].append(one)
        return found


@dataclass(frozen=True)
class Module:
    computations: Mapping[str, Computation]
    entry: Computation
    lines: Mapping[int, str] = field(default_factory=dict)
    """Number of a stack frame -> path and line, as "src/model.py:12"."""

    def line(self, instruction: Instruction) -> str:
        """Returns the path and line of the Python code that the instruction comes from; "" if unknown."""
        found = re.search(r"stack_frame_id=(\d+)", instruction.attributes)
        return self.lines.get(int(found[1]), "") if found else ""

    def called(self, instruction: Instruction) -> list[Computation]:
        return [self.computations[name] for name in instruction.called]

    def trips(self, computation: Computation, loop: Instruction) -> int | None:
        """Returns the number of trips of the while loop in `computation`; None if it depends on data.

        XLA's GPU compiler writes the number down. Its TPU compiler leaves it to the condition, which compares
        a counter from a constant on, in steps of 1, with a constant.
        """
        if known := _TRIPS.search(loop.attributes):
            return int(known[1])
        condition = self.computations[loop.called[0]]
        carried = computation.operands(computation.source(computation.operands(loop)[0]))
        if condition.root.opcode != "compare" or condition.root.attribute("direction") != "LT":
            return None
        ends = []
        for side in condition.operands(condition.root):
            side = condition.source(side)
            if side.opcode == "get-tuple-element" and side.attribute("index"):
                side = computation.source(carried[int(side.attribute("index"))])
            ends.append(int(side.literal) if side.opcode == "constant" else None)
        start, end = ends
        return None if start is None or end is None else max(0, end - start)


def parse(text: str) -> Module:
    """Returns the module that `text` describes. Raises ValueError if it has no entry computation."""
    computations: dict[str, Computation] = {}
    entry = current = None
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith((" ", "HloModule")):
            name = re.match(r"(?:ENTRY )?%?([\w.\-]+)", line)
            assert name is not None, line
            current = computations[name[1]] = Computation(name[1])
            if line.startswith("ENTRY"):
                entry = current
        elif line.startswith("}"):
            current = None
        elif current is not None and " = " in line:
            one = _instruction(line.strip())
            current.instructions[one.name] = one
    if entry is None:
        raise ValueError("the text is no HLO module: it has no line that begins with ENTRY")
    return Module(computations, entry, _lines(text))


def _lines(text: str) -> dict[int, str]:
    """Returns `Module.lines`, from the tables before the first computation; {} if there are none."""
    _, *parts = _TABLES.split(text.partition("\n%")[0])
    tables = {name: _ROW.findall(rows) for name, rows in zip(parts[::2], parts[1::2], strict=True)}

    def fields(name: str) -> dict[str, dict[str, str]]:
        return {key: dict(pair.split("=") for pair in row.split()) for key, _, row in tables.get(name, ())}

    files = {key: path for key, path, _ in tables.get("FileNames", ())}
    places = {
        key: f"{files.get(row['file_name_id'], '')}:{row['line']}"
        for key, row in fields("FileLocations").items()
    }
    return {int(key): places[row["file_location_id"]] for key, row in fields("StackFrames").items()}


def _instruction(line: str) -> Instruction:
    left, _, rest = line.partition(" = ")
    end = _closing(rest) + 1 if rest.startswith("(") else rest.index(" ")
    kind, rest = rest[:end], rest[end:].lstrip()
    start = rest.index("(")
    end = start + _closing(rest[start:])
    literal = rest[start + 1 : end]
    name = left.removeprefix("ROOT ").lstrip("%")
    operands = tuple(_NAME.findall(literal))
    return Instruction(name, rest[:start], kind, operands, literal, rest[end + 1 :], left.startswith("ROOT "))


def _closing(text: str) -> int:
    """Returns the index of the parenthesis that closes the one with which `text` begins."""
    depth = 0
    for index, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return index
    raise ValueError(f"a parenthesis is not closed: {text[:80]}")
