"""The links of a CUDA device: a stream per group copies what is received, and waits for the message's time.

When a link is free again is known on the device alone, where messages of several groups become ready in their
own time: each takes its turn there, by the device's clock, and leaves when it will be through.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from fullshard.errors import OptionError
from fullshard.tools.simulation.wire import LINKS, Intervals, Message, Traffic, deliver

# What is received is copied in one burst by few blocks; then one warp, small enough to run beside any other
# kernel, waits for the rest of the message's time. The timer counts nanoseconds, not cycles: clocks fall
# under load. On request that is a kernel of several blocks, each with nearly all the shared memory of its
# multiprocessor, so that no matrix product runs there meanwhile: what a channel of NCCL takes.
_COPY_BLOCKS, _COPY_THREADS = 32, 512
_SOURCE = r"""
extern "C" __global__ void deliver(const uint4* source, uint4* target, int period, int skip_start,
                                   int skip_stop, int stop) {
    const int stride = gridDim.x * blockDim.x;
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    for (; i < stop - 3LL * stride; i += 4 * stride) {
        uint4 values[4];
        #pragma unroll
        for (int k = 0; k < 4; ++k) values[k] = source[(i + k * stride) % period];
        #pragma unroll
        for (int k = 0; k < 4; ++k) {
            int at = i + k * stride;
            if (at < skip_start || at >= skip_stop) target[at] = values[k];
        }
    }
    for (; i < stop; i += stride)
        if (i < skip_start || i >= skip_stop) target[i] = source[i % period];
}
__device__ unsigned long long clock_ns() {
    unsigned long long now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}
// state: a lock, then for each link the time at which it is free. times: where a traced message held them.
extern "C" __global__ void reserve(unsigned long long* state, unsigned long long* done,
                                   unsigned long long inside_ns, unsigned long long across_ns,
                                   unsigned long long latency_ns, unsigned long long* times) {
    while (atomicCAS(state, 0ULL, 1ULL) != 0ULL) __nanosleep(100);
    const unsigned long long now = clock_ns(), holds[2] = {inside_ns, across_ns};
    unsigned long long stop = now;
    for (int link = 0; link < 2; ++link) {
        if (holds[link] == 0) continue;
        volatile unsigned long long* free_at = state + 1 + link;
        const unsigned long long start = *free_at > now ? *free_at : now;
        *free_at = start + holds[link];
        if (start + holds[link] > stop) stop = start + holds[link];
        if (times) times[2 * link] = start, times[2 * link + 1] = start + holds[link];
    }
    *done = stop + latency_ns;
    __threadfence();
    atomicExch(state, 0ULL);
}
extern "C" __global__ void hold(const unsigned long long* done) {
    while (clock_ns() < *done) __nanosleep(500);
}
extern "C" __global__ void read_clock(unsigned long long* now) { *now = clock_ns(); }
"""


_MAX_DYNAMIC_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class _Driver:
    """Events and launches straight from the driver: torch's own objects cost more than a collective."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self.record = self._typed("cuEventRecord", ctypes.c_void_p, ctypes.c_void_p)
        self.wait = self._typed("cuStreamWaitEvent", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint)
        self.query = self._typed("cuEventQuery", ctypes.c_void_p)
        self.set_attribute = self._typed("cuFuncSetAttribute", ctypes.c_void_p, ctypes.c_int, ctypes.c_int)
        number, pointer = ctypes.c_uint, ctypes.c_void_p
        self.launch = self._typed(
            "cuLaunchKernel", pointer, *[number] * 7, pointer, ctypes.POINTER(pointer), pointer
        )

    def _typed(self, name: str, *kinds: Any) -> Any:
        function = getattr(self._library, name)
        function.argtypes = kinds
        return function

    def event(self) -> int:
        made = ctypes.c_void_p()
        if self._library.cuEventCreate(ctypes.byref(made), 2):  # without timing
            raise RuntimeError("no CUDA event could be made for the simulated wire")
        return made.value or 0


class _Kernel:
    """A compiled kernel with its arguments in place."""

    def __init__(self, driver: _Driver, name: str, kinds: Sequence[Any], shared_bytes: int = 0) -> None:
        self._function = torch.cuda._compile_kernel(_SOURCE, name).func
        self._shared_bytes = shared_bytes
        if shared_bytes and driver.set_attribute(self._function, _MAX_DYNAMIC_SHARED_BYTES, shared_bytes):
            raise RuntimeError(
                "a kernel of the simulated wire cannot have the shared memory of a multiprocessor"
            )
        self._launch = driver.launch
        self._values = [kind() for kind in kinds]
        self._pointers = (ctypes.c_void_p * len(kinds))(*map(ctypes.addressof, self._values))

    def __call__(self, blocks: int, threads: int, stream: int, *args: Any) -> None:
        for value, arg in zip(self._values, args, strict=True):
            value.value = arg
        if self._launch(
            self._function, blocks, 1, 1, threads, 1, 1, self._shared_bytes, stream, self._pointers, None
        ):
            raise RuntimeError("a kernel of the simulated wire was not launched")


_GROUPS = 256
_TRACED = 4096  # messages of one step


class CudaWire:
    """A stream per group, as a communicator of NCCL has: its messages pass in the order of their calls."""

    def __init__(self, device: torch.device, multiprocessors: int = 0) -> None:
        self.traffic = Traffic()
        self._device = device.index if device.index is not None else torch.cuda.current_device()
        # First: it makes the context of the device, which the driver's own calls below need.
        self._state = torch.zeros(3, dtype=torch.int64, device=device)
        self._ends = torch.zeros(_GROUPS, dtype=torch.int64, device=device)
        self._groups: dict[str, tuple[Any, int]] = {}  # stream, and where its message's end is written
        self._driver = driver = _Driver()
        # An event may be used again once nothing can wait for it any more: a cycle of thousands is enough.
        self._events = itertools.cycle([driver.event() for _ in range(4096)])
        pointer, number, time_ns = ctypes.c_void_p, ctypes.c_int, ctypes.c_ulonglong
        self._deliver = _Kernel(driver, "deliver", (pointer, pointer, number, number, number, number))
        self._reserve = _Kernel(driver, "reserve", (pointer, pointer, time_ns, time_ns, time_ns, pointer))
        self._hold_blocks = max(1, multiprocessors)
        properties: Any = torch.cuda.get_device_properties(device)
        block_bytes = getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
        self._hold = _Kernel(driver, "hold", (pointer,), block_bytes if multiprocessors else 0)
        self._read_clock = _Kernel(driver, "read_clock", (pointer,))
        self._times: torch.Tensor | None = None

    def carry(self, message: Message, target: torch.Tensor, source: torch.Tensor, own: int | None) -> Any:
        driver, load = self._driver, message.load
        stream, end = self._groups.get(message.group) or self._join(message.group)
        raw = stream.cuda_stream
        ready, done = next(self._events), next(self._events)
        driver.record(ready, torch._C._cuda_getCurrentRawStream(self._device))
        driver.wait(raw, ready, 0)
        if load.seconds:
            held = [round(seconds * 1e9) for seconds in (load.inside_s, load.across_s, load.latency_s)]
            self._reserve(1, 1, raw, self._state.data_ptr(), end, *held, self._slot(message))
        self._copy(stream, target, source, own)
        if load.seconds:
            self._hold(self._hold_blocks, 1, raw, end)
        driver.record(done, raw)
        self.traffic.add(message)
        return done

    def _join(self, group: str) -> tuple[Any, int]:
        if len(self._groups) == _GROUPS:
            raise OptionError(
                f"more than {_GROUPS} groups of ranks communicate", "Simulate one model at a time."
            )
        stream: Any = torch.cuda.Stream(self._device, priority=-1)  # type: ignore[no-untyped-call, unused-ignore]
        self._groups[group] = stream, self._ends[len(self._groups) :].data_ptr()
        return self._groups[group]

    # ---- while a step is traced

    def now(self) -> float:
        """The device's clock, when it has done all that was issued."""
        self._times = torch.zeros(_TRACED + 1, 2 * len(LINKS), dtype=torch.int64, device=self._state.device)
        torch.cuda.synchronize()
        self._read_clock(1, 1, torch._C._cuda_getCurrentRawStream(self._device), self._times.data_ptr())
        return int(self._times[0, 0]) / 1e9

    def _slot(self, message: Message) -> int:
        log = self.traffic.log
        if log is None or self._times is None or len(log) >= _TRACED:
            return 0
        message.times = len(log) + 1
        return self._times[message.times :].data_ptr()

    def intervals(self, message: Message) -> Intervals:
        if self._times is None or message.times is None:
            return {}
        row = [value / 1e9 for value in self._times[message.times].tolist()]
        return {link: (row[2 * i], row[2 * i + 1]) for i, link in enumerate(LINKS) if row[2 * i + 1]}

    def _copy(self, stream: Any, target: torch.Tensor, source: torch.Tensor, own: int | None) -> None:
        to, at = target.data_ptr(), source.data_ptr()
        size, period = target.nbytes, source.nbytes
        if (to, size) == (at, period):  # an all-reduce
            return
        if (size | period | to | at) % 16 == 0 and period:
            period //= 16
            skip = (0, 0) if own is None else (own * period, (own + 1) * period)
            self._deliver(_COPY_BLOCKS, _COPY_THREADS, stream.cuda_stream, at, to, period, *skip, size // 16)
        else:
            with torch.cuda.stream(stream):
                deliver(target, source, own)

    def over(self, ticket: Any) -> bool:
        return not self._driver.query(ticket)

    def wait(self, ticket: Any, timeout: timedelta | None) -> None:
        self._driver.wait(torch._C._cuda_getCurrentRawStream(self._device), ticket, 0)
