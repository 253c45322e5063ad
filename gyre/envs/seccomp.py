"""A small system call filter for the sandbox, as classic BPF.

Namespaces hide the host; this takes away kernel interfaces that namespaces do
not cover (keyrings, vsock, terminal injection), that widen the kernel's
attack surface (bpf, io_uring, userfaultfd, mounting), or that hold memory
which no process's figures show (memfd, System V segments and queues).
"""

from __future__ import annotations

import errno
import platform
import struct

_LOAD, _JEQ, _JGE, _RET = 0x20, 0x15, 0x35, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_NR, _ARCH, _ARG0, _ARG1 = 0, 4, 16, 24
_X32 = 0x40000000
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
_FAMILIES = (1, 2, 10, 16)  # unix, inet, inet6, netlink

# name: (x86_64, aarch64); -1 where an architecture has no such call.
_DENIED = {
  "acct": (163, 89),
  "add_key": (248, 217),
  "adjtimex": (159, 171),
  "bpf": (321, 280),
  "clock_adjtime": (305, 266),
  "clock_settime": (227, 112),
  "delete_module": (176, 106),
  "finit_module": (313, 273),
  "fsconfig": (431, 431),
  "fsmount": (432, 432),
  "fsopen": (430, 430),
  "fspick": (433, 433),
  "init_module": (175, 105),
  "io_uring_enter": (426, 426),
  "io_uring_register": (427, 427),
  "io_uring_setup": (425, 425),
  "ioperm": (173, -1),
  "iopl": (172, -1),
  "kcmp": (312, 272),
  "kexec_file_load": (320, 294),
  "kexec_load": (246, 104),
  "keyctl": (250, 219),
  "memfd_create": (319, 279),
  "memfd_secret": (447, 447),
  "modify_ldt": (154, -1),
  "mount": (165, 40),
  "mount_setattr": (442, 442),
  "move_mount": (429, 429),
  "msgget": (68, 186),
  "name_to_handle_at": (303, 264),
  "open_by_handle_at": (304, 265),
  "open_tree": (428, 428),
  "perf_event_open": (298, 241),
  "pidfd_getfd": (438, 438),
  "pivot_root": (155, 41),
  "process_vm_readv": (310, 270),
  "process_vm_writev": (311, 271),
  "ptrace": (101, 117),
  "quotactl": (179, 60),
  "reboot": (169, 142),
  "request_key": (249, 218),
  "setns": (308, 268),
  "settimeofday": (164, 170),
  "shmget": (29, 194),
  "swapoff": (168, 225),
  "swapon": (167, 224),
  "syslog": (103, 116),
  "umount2": (166, 39),
  "unshare": (272, 97),
  "userfaultfd": (323, 282),
}
_ABSENT = frozenset(("memfd_create", "memfd_secret"))
_ARCHES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_IOCTL = {"x86_64": 16, "aarch64": 29}
_SOCKET = {"x86_64": 41, "aarch64": 198}


def _op(code: int, k: int, yes: int = 0, no: int = 0) -> bytes:
  return struct.pack("=HBBI", code, yes, no, k)


def _fail(number: int) -> bytes:
  return _op(_RET, _ERRNO | number)


def program(machine: str | None = None) -> bytes | None:
  """The filter for `machine` (default: this one), or None if unknown there.

  Denied calls fail with EPERM, memfd with ENOSYS (callers then fall back to a
  file), calls of another architecture's table with ENOSYS, and sockets of
  other families than unix, inet, inet6 and netlink with EAFNOSUPPORT.
  """
  machine = machine or platform.machine()
  if machine not in _ARCHES:
    return None
  column, audit = _ARCHES[machine]
  out = [_op(_LOAD, _ARCH), _op(_JEQ, audit, 1, 0), _fail(errno.ENOSYS)]
  out.append(_op(_LOAD, _NR))
  if machine == "x86_64":
    out += [_op(_JGE, _X32, 0, 1), _fail(errno.ENOSYS)]
  for name, numbers in sorted(_DENIED.items()):
    if numbers[column] >= 0:
      code = errno.ENOSYS if name in _ABSENT else errno.EPERM
      out += [_op(_JEQ, numbers[column], 0, 1), _fail(code)]
  out += [
    _op(_JEQ, _IOCTL[machine], 0, 5),
    _op(_LOAD, _ARG1),
    _op(_JEQ, _TIOCSTI, 1, 0),
    _op(_JEQ, _TIOCLINUX, 0, 1),
    _fail(errno.EPERM),
    _op(_RET, _ALLOW),
  ]
  out += [_op(_JEQ, _SOCKET[machine], 1, 0), _op(_RET, _ALLOW)]
  out.append(_op(_LOAD, _ARG0))
  for i, family in enumerate(_FAMILIES):
    out.append(_op(_JEQ, family, len(_FAMILIES) - i, 0))
  out += [_fail(errno.EAFNOSUPPORT), _op(_RET, _ALLOW)]
  return b"".join(out)
