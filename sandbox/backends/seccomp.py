"""A deny-list seccomp program, assembled by hand (bubblewrap takes raw BPF by fd).

Denied calls fail with EPERM: kernel attack surface that no task needs (keyrings, bpf, perf,
userfaultfd, io_uring, ptrace, the mount family, kexec, modules), new namespaces, and System V IPC
and POSIX message queues, whose objects would outlive an episode. ``clone3`` fails with ENOSYS,
because its flags cannot be inspected; C libraries then use ``clone``, whose namespace flags are.
Numbers: arch/x86 and asm-generic tables of Linux.
"""

from __future__ import annotations

import errno
import platform
import struct

from sandbox.errors import BackendUnavailable

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
CLONE = {"x86_64": 56, "aarch64": 220}
CLONE3 = 435
NAMESPACE_FLAGS = 0x7E020000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET."""

DENIED = {
    "x86_64": {
        "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312,
        "keyctl": 250, "add_key": 248, "request_key": 249, "bpf": 321, "perf_event_open": 298,
        "userfaultfd": 323, "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161,
        "kexec_load": 246, "kexec_file_load": 320, "init_module": 175, "finit_module": 313,
        "delete_module": 176, "unshare": 272, "setns": 308, "reboot": 169, "swapon": 167,
        "swapoff": 168, "acct": 163, "quotactl": 179, "syslog": 103, "iopl": 172, "ioperm": 173,
        "name_to_handle_at": 303, "open_by_handle_at": 304, "shmget": 29, "semget": 64,
        "msgget": 68, "modify_ldt": 154, "personality": 135, "mq_open": 240, "mq_unlink": 241,
        "ioprio_set": 251, "lookup_dcookie": 212, "vhangup": 153, "settimeofday": 164,
    },
    "aarch64": {
        "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272,
        "keyctl": 219, "add_key": 217, "request_key": 218, "bpf": 280, "perf_event_open": 241,
        "userfaultfd": 282, "mount": 40, "umount2": 39, "pivot_root": 41, "chroot": 51,
        "kexec_load": 104, "kexec_file_load": 294, "init_module": 105, "finit_module": 273,
        "delete_module": 106, "unshare": 97, "setns": 268, "reboot": 142, "swapon": 224,
        "swapoff": 225, "acct": 89, "quotactl": 60, "syslog": 116, "name_to_handle_at": 264,
        "open_by_handle_at": 265, "shmget": 194, "semget": 190, "msgget": 186,
        "personality": 92, "mq_open": 180, "mq_unlink": 181, "ioprio_set": 30,
        "lookup_dcookie": 18, "vhangup": 58, "settimeofday": 170,
    },
}  # fmt: skip
DENIED_EVERYWHERE = {
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428,
    "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433,
    "pidfd_getfd": 438, "mount_setattr": 442, "quotactl_fd": 443,
}  # fmt: skip
"""Numbers above 423 are the same on every architecture."""

_LOAD = 0x20  # BPF_LD | BPF_W | BPF_ABS
_JUMP_EQUAL = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
_JUMP_AT_LEAST = 0x35
_JUMP_ANY_BIT = 0x45
_RETURN = 0x06
_NUMBER, _ARCH, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data (little-endian)
_ALLOW = 0x7FFF0000
_ERRNO = 0x00050000
_KILL_PROCESS = 0x80000000
_X32_BIT = 0x40000000


def program(machine: str | None = None) -> bytes:
    """The BPF program for ``machine`` (default: this one); BackendUnavailable for another
    architecture, because a box without the filter must not start."""
    machine = machine or platform.machine()
    if machine not in AUDIT_ARCH:
        raise BackendUnavailable(
            f"no seccomp program for {machine!r}; known: {', '.join(sorted(AUDIT_ARCH))}"
        )
    denied = sorted({**DENIED[machine], **DENIED_EVERYWHERE}.values())
    code = [
        (_LOAD, 0, 0, _ARCH),
        (_JUMP_EQUAL, 1, 0, AUDIT_ARCH[machine]),
        (_RETURN, 0, 0, _KILL_PROCESS),
        (_LOAD, 0, 0, _NUMBER),
        (_JUMP_AT_LEAST, 0, 1, _X32_BIT),
        (_RETURN, 0, 0, _KILL_PROCESS),
    ]
    for number in denied:
        code += [(_JUMP_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERRNO | errno.EPERM)]
    code += [
        (_JUMP_EQUAL, 0, 1, CLONE3),
        (_RETURN, 0, 0, _ERRNO | errno.ENOSYS),
        (_JUMP_EQUAL, 0, 3, CLONE[machine]),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_JUMP_ANY_BIT, 0, 1, NAMESPACE_FLAGS),
        (_RETURN, 0, 0, _ERRNO | errno.EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)
