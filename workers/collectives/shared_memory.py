"""Collectives between the ranks of one host, through memory that they share."""

import ctypes
import json
import logging
import os
import threading
from dataclasses import asdict

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from workers.collectives.host_memory import HostMemory, NotSharedError, Offer, attach, create
from workers.errors import CollectiveError
from workers.native.build import NoCompilerError, load

logger = logging.getLogger(__name__)

BUFFER_BYTES = 1 << 20  # each rank has two; a wait for each MiB costs little
# A rank that is behind by less is waited for awake: to be woken takes as long.
SPIN_NS = 20_000

# As in collectives.c.
ALL_REDUCE, ALL_GATHER, GATHER, BROADCAST = KINDS = range(4)
NAMES = ("all_reduce", "all_gather", "gather_to_sampler", "broadcast_from_sampler")
DONE, CLOSED, LEFT, DIED, DIFFERENT, NO_SUM = range(6)
DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float16),  # those that can be summed come first
    *(torch.float64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
NUMBER_OF_DTYPE = {dtype: number for number, dtype in enumerate(DTYPES)}


class _Call(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("kind", "dtype")),
        *((name, ctypes.c_int64) for name in ("bytes", "row_bytes")),
    )

    def __str__(self) -> str:
        dtype = str(DTYPES[self.dtype]).removeprefix("torch.")
        rows = f" in rows of {self.row_bytes}" if self.row_bytes else ""
        return f"{NAMES[self.kind]} of {self.bytes} bytes of {dtype}{rows}"


class _Session(ctypes.Structure):
    _fields_ = (
        ("memory", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("buffer_bytes", "spin_ns")),
        *((name, ctypes.c_int32) for name in ("descriptor", "rank", "size", "root")),
        ("sequence", ctypes.c_uint32),
        ("failed", ctypes.c_int32),
        *(("own", _Call), ("other", _Call)),
    )


class Kernel:
    """The functions of collectives.c."""

    def __init__(self) -> None:
        """Raises NoCompilerError."""
        library = load("collectives")
        self.exchange = library.exchange
        pointer = ctypes.c_void_p
        self.exchange.argtypes = (pointer, pointer, pointer, pointer)
        self.enter, self.leave = library.enter, library.leave
        self.leave.restype = None
        self.memory_bytes = library.memory_bytes
        self.memory_bytes.argtypes = (ctypes.c_int, ctypes.c_int64)
        for size in (library.memory_bytes, library.session_bytes):
            size.restype = ctypes.c_int64
        assert library.session_bytes() == ctypes.sizeof(_Session), "as in collectives.c"
        self.max_ranks: int = library.max_ranks()


class SharedMemory:
    """Collectives of one rank. Sums are made in the order of ranks, in float32, for any size."""

    def __init__(
        self, kernel: Kernel, memory: HostMemory, *, rank: int, size: int, sampler_rank: int
    ) -> None:
        """Takes the memory over. Rank 0 comes first. Raises OSError."""
        self._size = size
        self._is_sampler = rank == sampler_rank
        self._memory: HostMemory | None = memory
        self._kernel = kernel
        # Held by a call: nobody takes the memory away meanwhile.
        self._busy = threading.Lock()
        self._closing = threading.Lock()
        self._call = _Call()
        self._session = _Session(
            memory=memory.address,
            buffer_bytes=BUFFER_BYTES,
            # With more ranks than cores a rank that waits awake may keep another from its work.
            spin_ns=SPIN_NS if size <= len(os.sched_getaffinity(0)) else 0,
            descriptor=memory.descriptor,
            rank=rank,
            size=size,
            root=sampler_rank,
        )
        self._pointers = ctypes.addressof(self._session), ctypes.addressof(self._call)
        number = kernel.enter(ctypes.byref(self._session))
        if number:
            memory.close()
            raise OSError(number, os.strerror(number))

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """As Collectives says."""
        self._exchange(ALL_REDUCE, tensor, tensor)
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """As Collectives says."""
        joined = tensor.new_empty(*tensor.shape[:-1], self._size * tensor.shape[-1])
        self._exchange(ALL_GATHER, tensor.contiguous(), joined, row_size=tensor.shape[-1])
        return joined

    def gather_to_sampler(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """As Collectives says. The other ranks don't wait for the sampler's."""
        joined = None
        if self._is_sampler:
            joined = tensor.new_empty(*tensor.shape[:-1], self._size * tensor.shape[-1])
        self._exchange(GATHER, tensor.contiguous(), joined, row_size=tensor.shape[-1])
        return joined

    def broadcast_from_sampler(self, tensor: torch.Tensor) -> torch.Tensor:
        """As Collectives says. The sampler's rank doesn't wait for the others."""
        self._exchange(BROADCAST, tensor, tensor)
        return tensor

    def limit(self, timeout_s: float) -> None:
        """The driver's deadline for a step ends the wait for a rank that hangs."""

    def close(self) -> None:
        """As Collectives says. Any thread may call it: a call that waits ends with an error."""
        with self._closing:
            memory = self._memory
            if memory is None:
                return
            self._kernel.leave(ctypes.byref(self._session))
            with self._busy:
                self._memory = None
                memory.close()

    def _exchange(
        self, kind: int, tensor: torch.Tensor, output: torch.Tensor | None, row_size: int = 0
    ) -> None:
        number = NUMBER_OF_DTYPE.get(tensor.dtype)
        if number is None or not tensor.is_contiguous():
            raise CollectiveError(
                f"{NAMES[kind]} takes no {tensor.dtype} of shape {tuple(tensor.shape)} and strides "
                f"{tensor.stride()}"
            )
        with self._busy:
            if self._memory is None:
                raise CollectiveError("this rank has left the group")
            call = self._call
            call.kind, call.dtype = kind, number
            call.bytes, call.row_bytes = tensor.nbytes, row_size * tensor.itemsize
            target = 0 if output is None else output.data_ptr()
            outcome = self._kernel.exchange(*self._pointers, tensor.data_ptr(), target)
            if outcome != DONE:
                # The others must not wait for a rank that does no more.
                self._kernel.leave(ctypes.byref(self._session))
                raise CollectiveError(f"a collective failed: {self._explain(outcome)}")

    def _explain(self, outcome: int) -> str:
        session = self._session
        if outcome == DIFFERENT:
            return f"rank {session.rank} runs {session.own}, rank {session.failed} {session.other}"
        return {
            CLOSED: "this rank has left the group",
            LEFT: f"rank {session.failed} has left the group",
            DIED: f"the process of rank {session.failed} has ended",
            NO_SUM: f"there are no sums of {DTYPES[self._call.dtype]}",
        }[outcome]


def join_host(store: Store, *, rank: int, size: int, sampler_rank: int) -> SharedMemory | None:
    """Meets the other ranks at `store`. None, on all ranks, where one of them can't share memory.

    Rank 0 logs why. Raises what the store raises.
    """
    shared: SharedMemory | None = None
    answer: dict[str, object] = {}
    try:
        kernel = Kernel()
        if size > kernel.max_ranks:
            raise NotSharedError(f"{size} ranks are more than {kernel.max_ranks}")
        num_bytes = kernel.memory_bytes(size, BUFFER_BYTES)
        if rank == 0:
            memory, offer = create(num_bytes)
            answer = asdict(offer)
        else:
            memory = attach(_read_offer(store), num_bytes)
        shared = SharedMemory(kernel, memory, rank=rank, size=size, sampler_rank=sampler_rank)
    except (NoCompilerError, NotSharedError, OSError) as error:
        answer = {"refusal": f"rank {rank}: {error}"}
    store.set(_key(rank), json.dumps(answer))
    answers = [json.loads(store.get(_key(each))) for each in range(size)]
    refusal = next((each["refusal"] for each in answers if "refusal" in each), None)
    if refusal is None:
        if rank == 0:
            logger.info("%d ranks exchange tensors through shared memory", size)
        return shared
    if shared is not None:
        shared.close()
    if rank == 0:
        logger.info("ranks exchange tensors by gloo, not through shared memory: %s", refusal)
    return None


def _read_offer(store: Store) -> Offer:
    answer = json.loads(store.get(_key(0)))
    if "refusal" in answer:
        raise NotSharedError("rank 0 has none")
    return Offer(**answer)


def _key(rank: int) -> str:
    return f"shared memory of rank {rank}"
