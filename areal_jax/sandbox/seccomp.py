"""The system calls that code in the sandbox may not make, as a filter for bubblewrap's --seccomp.

With these calls a program could evade the sandbox's limits: new namespaces bring file systems of unlimited
size, shared memory continues to exist when it has left the address space that RLIMIT_AS bounds, and the other
calls give access to other processes or to the kernel. The calls' numbers come from Linux's unistd.h;
linux/filter.h and linux/seccomp.h define the filter's form.
"""

from __future__ import annotations

import errno
import platform
import struct

from areal_jax.sandbox.errors import SandboxError

_FORBIDDEN = {  # name: (x86_64, aarch64)
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
}
_CLONE = (56, 220)
_CLONE3 = (435, 435)  # a filter cannot read its flags, which are in memory: ENOSYS, as on an old kernel
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32 = 0x40000000
_CLONE_NEW_ANY = 0x7E020000  # CLONE_NEWNS | NEWCGROUP | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCH, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000


def seccomp_filter() -> bytes:
    """Returns the BPF filter for this machine. Raises SandboxError unless that is x86_64 or aarch64."""
    machine = platform.machine()
    if machine not in _AUDIT_ARCH:
        raise SandboxError(
            f"the code sandbox does not know the system calls of {machine}; run code tasks "
            "on x86_64 or aarch64"
        )
    column = list(_AUDIT_ARCH).index(machine)
    refuse = _step(_RETURN, _ERRNO | errno.EPERM)
    absent = _step(_RETURN, _ERRNO | errno.ENOSYS)
    program = [
        _step(_LOAD, _ARCH),
        _step(_EQUAL, _AUDIT_ARCH[machine], yes=1),
        _step(_RETURN, _KILL),
        _step(_LOAD, _NUMBER),
        _step(_AT_LEAST, _X32, no=1),
        absent,
        _step(_EQUAL, _CLONE3[column], no=1),
        absent,
    ]
    for numbers in _FORBIDDEN.values():
        program += [_step(_EQUAL, numbers[column], no=1), refuse]
    program += [
        _step(_EQUAL, _CLONE[column], no=3),
        _step(_LOAD, _FIRST_ARGUMENT),
        _step(_ANY_BIT, _CLONE_NEW_ANY, no=1),
        refuse,
        _step(_RETURN, _ALLOW),
    ]
    return b"".join(program)


def _step(code: int, operand: int, *, yes: int = 0, no: int = 0) -> bytes:
    """Returns the BPF instruction with the opcode `code` and the constant `operand`.

    A true comparison skips the next `yes` instructions, a false comparison the next `no`.
    """
    return struct.pack("=HBBI", code, yes, no, operand)
