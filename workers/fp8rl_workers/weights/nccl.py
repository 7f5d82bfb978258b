"""NCCL, as far as a wire needs it: one communicator that never blocks a thread, and broadcasts on a stream of its own.

It is bound by name (`libnccl`, the one torch has loaded), not through torch's ProcessGroupNCCL: that one's watchdog and heartbeat
threads end the process when a peer is late, and what turns them off are variables of the environment, which the process's other groups
(the trainer's own, vLLM's) read too. Here a call returns at once, its outcome is asked for, and whoever asks decides when to abort.
Signatures and the meaning of states: NCCL's user guide, "Communicator creation and management" and "Fault tolerance".
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from fp8rl_workers.errors import InvalidInputError

SUCCESS, IN_PROGRESS = 0, 7
UINT8 = 1
ID_BYTES = 128
CONFIG_MAGIC = 0xCAFEBEEF
CONFIG_VERSION = 21400  # of the first release that has `blocking`: later ones fill in what this record lacks


class NcclError(RuntimeError):
    """Raised when a call fails or a communicator is in error: NCCL's own words."""


class UniqueId(ctypes.Structure):
    """`ncclUniqueId`: what all ranks of one communicator share."""

    _fields_ = (("internal", ctypes.c_ubyte * ID_BYTES),)


class Config(ctypes.Structure):
    """`ncclConfig_t` as of CONFIG_VERSION."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    )


@functools.cache
def library() -> ctypes.CDLL:
    """The library, with the arguments of what is used.

    Raises:
        InvalidInputError: this torch came without it.
    """
    try:
        found = ctypes.CDLL("libnccl.so.2")
    except OSError as error:
        raise InvalidInputError(
            f"weightSync.transport: nccl needs a torch with NCCL: {error}; set transport: auto"
        ) from error
    pointer, integer = ctypes.c_void_p, ctypes.c_int
    found.ncclGetErrorString.restype = ctypes.c_char_p
    found.ncclGetLastError.restype = ctypes.c_char_p
    found.ncclGetLastError.argtypes = (pointer,)
    found.ncclGetVersion.argtypes = (ctypes.POINTER(integer),)
    found.ncclGetUniqueId.argtypes = (ctypes.POINTER(UniqueId),)
    found.ncclCommInitRankConfig.argtypes = (
        ctypes.POINTER(pointer),
        integer,
        UniqueId,
        integer,
        ctypes.POINTER(Config),
    )
    found.ncclCommGetAsyncError.argtypes = (pointer, ctypes.POINTER(integer))
    found.ncclBroadcast.argtypes = (pointer, pointer, ctypes.c_size_t, integer, integer, pointer, pointer)
    found.ncclCommAbort.argtypes = (pointer,)
    return found


def check(code: int, comm: ctypes.c_void_p | None = None) -> None:
    """Pass what went well or is under way.

    Raises:
        NcclError: anything else.
    """
    if code not in (SUCCESS, IN_PROGRESS):
        words = library().ncclGetErrorString(code).decode()
        detail = library().ncclGetLastError(comm).decode().strip()
        raise NcclError(f"{words} ({detail})" if detail else words)


def version() -> int:
    """The library's, e.g. 22809 for 2.28.9."""
    found = ctypes.c_int()
    check(library().ncclGetVersion(ctypes.byref(found)))
    return found.value


def new_id() -> bytes:
    """What rank 0 tells the others of a communicator. It opens a socket that they meet at.

    Raises:
        NcclError: no network interface can be used.
    """
    made = UniqueId()
    check(library().ncclGetUniqueId(ctypes.byref(made)))
    return bytes(made.internal)


class Communicator:
    """One rank's end. One thread at a time; `abort` once, after which nothing else may be called."""

    def __init__(self, unique_id: bytes, rank: int, world_size: int, device: torch.device) -> None:
        """Begin to connect; `ready` says when it is done.

        Raises:
            NcclError: it cannot.
        """
        config = Config(ctypes.sizeof(Config), CONFIG_MAGIC, CONFIG_VERSION, 0)
        shared = UniqueId((ctypes.c_ubyte * ID_BYTES).from_buffer_copy(unique_id))
        self._comm = ctypes.c_void_p()
        self._device = device
        self._held: list[Tensor] = []
        self._written: torch.cuda.Event | None = None
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            code = library().ncclCommInitRankConfig(
                ctypes.byref(self._comm), world_size, shared, rank, ctypes.byref(config)
            )
        check(code)

    def ready(self) -> bool:
        """Whether what was asked for last is done on the CPU: connected, or launched.

        Raises:
            NcclError: it failed, or a peer did.
        """
        state = ctypes.c_int()
        check(library().ncclCommGetAsyncError(self._comm, ctypes.byref(state)), self._comm)
        check(state.value, self._comm)
        return state.value == SUCCESS

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Begin to move the bytes of rank 0's tensors into the others', all in one launch, after the current stream's work.

        `tensors`: contiguous, on this device, as many bytes each as rank 0's.

        Raises:
            NcclError: it cannot.
        """
        found, stream = library(), ctypes.c_void_p(self._stream.cuda_stream)
        self._held, self._written = list(tensors), None
        with torch.cuda.device(self._device):
            self._stream.wait_stream(torch.cuda.current_stream())
            check(found.ncclGroupStart())
            codes = [
                found.ncclBroadcast(
                    t.data_ptr(), t.data_ptr(), t.numel() * t.element_size(), UINT8, 0, self._comm, stream
                )
                for t in tensors
            ]
            codes.append(found.ncclGroupEnd())
        for code in codes:
            check(code, self._comm)

    def moved(self) -> bool:
        """Whether the bytes of the last broadcast are there. NCCL launches from a thread of its own: only then is there an event.

        Raises:
            NcclError: it failed, or a peer did.
            RuntimeError: CUDA failed.
        """
        if not self.ready():
            return False
        if self._written is None:
            self._written = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._written.record(self._stream)
        if not self._written.query():  # type: ignore[no-untyped-call]
            return False
        self._held = []
        return True

    def abort(self) -> None:
        """End whatever is under way, on the GPU too, and free all memory. Blocks until the stream is empty.

        Raises:
            NcclError: it cannot.
            RuntimeError: CUDA failed.
        """
        with torch.cuda.device(self._device):
            check(library().ncclCommAbort(self._comm))
            self._stream.synchronize()
        self._held = []
