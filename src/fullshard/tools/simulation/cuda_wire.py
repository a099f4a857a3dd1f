"""The wire of a CUDA device: a stream that copies what is received and then waits for the message's time."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from fullshard.tools.simulation.wire import Message, Traffic, deliver, event

# What is received is copied in one burst by few blocks; then one warp, small enough to run beside any other
# kernel, holds the wire for the rest of its time. The timer counts nanoseconds, not cycles: clocks fall
# under load. The multiprocessors that NCCL's own kernels occupy are not simulated.
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
extern "C" __global__ void begin(unsigned long long* begun) {
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(*begun));
}
extern "C" __global__ void hold(const unsigned long long* begun, double hold_ns) {
    unsigned long long now;
    do {
        __nanosleep(500);
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while ((double)(now - *begun) < hold_ns);
}
"""


class _Driver:
    """Events and launches straight from the driver: torch's own objects cost more than a collective."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self.record = self._typed("cuEventRecord", ctypes.c_void_p, ctypes.c_void_p)
        self.wait = self._typed("cuStreamWaitEvent", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint)
        self.query = self._typed("cuEventQuery", ctypes.c_void_p)
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

    def __init__(self, driver: _Driver, name: str, kinds: Sequence[Any]) -> None:
        self._function = torch.cuda._compile_kernel(_SOURCE, name).func
        self._launch = driver.launch
        self._values = [kind() for kind in kinds]
        self._pointers = (ctypes.c_void_p * len(kinds))(*map(ctypes.addressof, self._values))

    def __call__(self, blocks: int, threads: int, stream: int, *args: Any) -> None:
        for value, arg in zip(self._values, args, strict=True):
            value.value = arg
        if self._launch(self._function, blocks, 1, 1, threads, 1, 1, 0, stream, self._pointers, None):
            raise RuntimeError("a kernel of the simulated wire was not launched")


class CudaWire:
    """One stream, as a communicator of NCCL has; messages pass in the order in which they were sent."""

    def __init__(self, device: torch.device) -> None:
        self.traffic = Traffic()
        self._device = device.index if device.index is not None else torch.cuda.current_device()
        self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call, unused-ignore]
        self._raw = self._stream.cuda_stream
        self._driver = driver = _Driver()
        # An event may be used again once nothing can wait for it any more: a cycle of thousands is enough.
        self._events = itertools.cycle([driver.event() for _ in range(4096)])
        pointer, number = ctypes.c_void_p, ctypes.c_int
        self._deliver = _Kernel(driver, "deliver", (pointer, pointer, number, number, number, number))
        self._begin = _Kernel(driver, "begin", (pointer,))
        self._hold = _Kernel(driver, "hold", (pointer, ctypes.c_double))
        self._begun = torch.zeros(1, dtype=torch.int64, device=device)
        self._begun_at = self._begun.data_ptr()

    def carry(self, message: Message, target: torch.Tensor, source: torch.Tensor, own: int | None) -> Any:
        driver, raw = self._driver, self._raw
        ready, done = next(self._events), next(self._events)
        driver.record(ready, torch._C._cuda_getCurrentRawStream(self._device))
        driver.wait(raw, ready, 0)
        log = self.traffic.log is not None
        if log:
            message.start = event(timed=True)
            message.start.record(self._stream)
        if message.seconds:
            self._begin(1, 1, raw, self._begun_at)
        self._copy(target, source, own)
        if message.seconds:
            self._hold(1, 1, raw, self._begun_at, message.seconds * 1e9)
        if log:
            message.stop = event(timed=True)
            message.stop.record(self._stream)
        driver.record(done, raw)
        self.traffic.add(message)
        return done

    def _copy(self, target: torch.Tensor, source: torch.Tensor, own: int | None) -> None:
        to, at = target.data_ptr(), source.data_ptr()
        if to == at:
            return
        size, period = target.nbytes, source.nbytes
        if (size | period | to | at) % 16 == 0 and period:
            period //= 16
            skip = (0, 0) if own is None else (own * period, (own + 1) * period)
            self._deliver(_COPY_BLOCKS, _COPY_THREADS, self._raw, at, to, period, *skip, size // 16)
        else:
            with torch.cuda.stream(self._stream):
                deliver(target, source, own)

    def over(self, ticket: Any) -> bool:
        return not self._driver.query(ticket)

    def wait(self, ticket: Any, timeout: timedelta | None) -> None:
        self._driver.wait(torch._C._cuda_getCurrentRawStream(self._device), ticket, 0)
