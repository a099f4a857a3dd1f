"""On a real GPU: the kernels of `quantise` give the bits that torch gives on the CPU, at the speed of memory.

Skipped where there is no GPU. With `-s` the last test prints a table of bandwidths and host times.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fullshard.engine import quantize
from fullshard.engine.quantize import BLOCK, add_rows, pack, packed_bytes, unpack

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHAPES = ((1, 256), (64, 256), (3, 1280), (1, 4096), (64, 4096), (1, 256 * 1001), (64, 256 * 1001))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
RESIDUALS = (None, torch.float32, torch.bfloat16)
TINY = torch.finfo(torch.float32).tiny
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _values(rows: int, elements: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Blocks of many sizes, ties among them, and every kind of block that needs care, as far as they fit."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randn(rows * elements // BLOCK, BLOCK, generator=generator)
    powers = torch.randint(-3, 4, (len(blocks), 1), generator=generator)
    blocks *= 10.0 ** (powers if dtype is torch.float16 else powers * 10)
    blocks[::3] = torch.randint(-253, 254, (BLOCK,), generator=generator) / 2
    blocks[::3, 0] = 127  # a scale of 1, and so ties
    if len(blocks) > 1:
        noise = torch.randn(BLOCK, generator=generator).clamp(-1, 1)
        broken = [noise.clone() for _ in range(4)]
        for block, bad in zip(broken, ("nan", "inf", "-inf", "-nan"), strict=True):
            block[int(torch.randint(BLOCK, (), generator=generator))] = float(bad)
        small = [noise * size for size in (2**-149, 1e-40, TINY / 2, TINY, 50 * TINY, 127 * TINY, 300 * TINY)]
        special = [torch.zeros(BLOCK), -torch.zeros(BLOCK), *broken, *small, noise.sign() * 3.4e38]
        special.append(torch.full((BLOCK,), torch.finfo(dtype).max))
        where = torch.randperm(len(blocks) - 1, generator=generator)[: len(special)]
        blocks[where] = torch.stack(special[: len(where)])
    return blocks.to(dtype).view(rows, elements)


def _residual(rows: int, elements: int, dtype: torch.dtype | None) -> Tensor | None:
    if dtype is None:
        return None
    residual = torch.randn(rows, elements, generator=torch.Generator().manual_seed(9)) * 1e-2
    residual.view(-1, BLOCK)[::2] = 0  # so that what is special in the values stays so
    return residual.to(dtype)


def _assert_same(on_gpu: Tensor, on_cpu: Tensor) -> None:
    """The same bits; of two NaNs only that they are."""
    on_gpu = on_gpu.cpu()
    kind = INTEGERS[on_cpu.itemsize]
    differs = on_gpu.view(kind) != on_cpu.view(kind)
    if on_cpu.is_floating_point():
        differs &= ~(on_gpu.isnan() & on_cpu.isnan())
    if differs.any():
        first = tuple(differs.nonzero()[0].tolist())
        raise AssertionError(
            f"{int(differs.sum())} of {differs.numel()} differ, first {first}: "
            f"{on_gpu[first]!r} on the GPU, {on_cpu[first]!r} on the CPU"
        )


def _packed_on(device: str, values: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor | None]:
    rows, elements = values.shape
    packed = torch.full((rows, packed_bytes(elements)), 77, dtype=torch.uint8, device=device)
    residual = None if residual is None else residual.to(device, copy=True)
    pack(values.to(device), packed, residual)
    return packed, residual


def test_kernels_are_used() -> None:
    pytest.importorskip("triton")
    assert quantize._kernels() is not None


@pytest.mark.parametrize("residual_dtype", RESIDUALS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pack_gives_the_bits_of_the_cpu(
    shape: tuple[int, int], dtype: torch.dtype, residual_dtype: torch.dtype | None
) -> None:
    values, residual = _values(*shape, dtype), _residual(*shape, residual_dtype)
    packed, left = _packed_on("cuda", values, residual)
    expected, left_expected = _packed_on("cpu", values, residual)
    _assert_same(packed, expected)
    if left is not None and left_expected is not None:
        _assert_same(left, left_expected)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_unpack_gives_the_bits_of_the_cpu(shape: tuple[int, int], dtype: torch.dtype) -> None:
    packed, _ = _packed_on("cpu", _values(*shape, torch.float32), None)
    out, expected = torch.empty(shape, dtype=dtype, device="cuda"), torch.empty(shape, dtype=dtype)
    unpack(packed.cuda(), out)
    unpack(packed, expected)
    _assert_same(out, expected)


@pytest.mark.parametrize("factor", [1.0, 1 / 3])
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 5, 16, 64])
@pytest.mark.parametrize("elements", [256, 4096, 256 * 1001])
def test_add_rows_gives_the_bits_of_the_cpu(elements: int, rows: int, factor: float) -> None:
    # No block is broken here: a sum with NaN in it would say nothing of its bits.
    values = torch.randn(rows, elements, generator=torch.Generator().manual_seed(rows))
    packed, _ = _packed_on("cpu", values * torch.logspace(-2, 2, rows).unsqueeze(1), None)
    out, expected = torch.full((elements,), 7.0, device="cuda"), torch.empty(elements)
    add_rows(packed.cuda(), out, factor)
    add_rows(packed, expected, factor)
    _assert_same(out, expected)


def test_add_rows_with_every_kind_of_block() -> None:
    packed, _ = _packed_on("cpu", _values(7, 256 * 40, torch.float32), None)
    out, expected = torch.empty(256 * 40, device="cuda"), torch.empty(256 * 40)
    add_rows(packed.cuda(), out, -0.25)
    add_rows(packed, expected, -0.25)
    assert bool(expected.isnan().any())
    _assert_same(out, expected)


def test_feedback_over_steps_gives_the_bits_of_the_cpu() -> None:
    here = torch.zeros(4, 1280, dtype=torch.bfloat16)
    there = here.cuda()
    for step in range(20):
        values = torch.randn(4, 1280, generator=torch.Generator().manual_seed(step)).bfloat16()
        packed, after = _packed_on("cuda", values, there)
        expected, after_here = _packed_on("cpu", values, here)
        assert after is not None
        assert after_here is not None
        there, here = after, after_here
        _assert_same(packed, expected)
        _assert_same(there, here)


def test_without_triton_torch_gives_the_same_bits_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize, "_kernels", lambda: None)
    values, residual = _values(5, 4096, torch.float32), _residual(5, 4096, torch.bfloat16)
    packed, left = _packed_on("cuda", values, residual)
    expected, left_expected = _packed_on("cpu", values, residual)
    _assert_same(packed, expected)
    assert left is not None
    assert left_expected is not None
    _assert_same(left, left_expected)
    out, out_expected = torch.empty(4096, device="cuda"), torch.empty(4096)
    add_rows(packed, out, 1 / 3)
    add_rows(expected, out_expected, 1 / 3)
    _assert_same(out, out_expected)


@pytest.mark.parametrize("shape", [(9, 2**28), (1, 2**31 + 1280)], ids=str)
def test_offsets_beyond_32_bits(shape: tuple[int, int]) -> None:
    """The last elements of a large buffer come out as they do alone."""
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB of free GPU memory")
    rows, elements = shape
    tail = _values(1, 1280, torch.bfloat16)
    values = torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
    values[-1, -1280:] = tail[0]
    residual = torch.zeros_like(values)
    packed = torch.full((rows, packed_bytes(elements)), 77, dtype=torch.uint8, device="cuda")
    pack(values, packed, residual)
    alone, left = _packed_on("cpu", tail, torch.zeros(1, 1280, dtype=torch.bfloat16))
    assert left is not None
    _assert_same(packed[-1, elements - 1280 : elements], alone[0, :1280])
    slots = packed[-1, elements:].view(torch.float32)
    blocks = elements // BLOCK
    _assert_same(slots[blocks - 5 : blocks], alone[0, 1280:].view(torch.float32)[:5])
    assert not bool(slots[: blocks - 5].any())
    assert not bool(slots[blocks:].any())
    _assert_same(residual[-1, -1280:], left[0])
    del residual
    values.fill_(7)
    unpack(packed, values)
    expected = torch.empty(1, 1280, dtype=torch.bfloat16)
    unpack(alone, expected)
    _assert_same(values[-1, -1280:], expected[0])
    assert not bool(values[-1, :-1280].any())
    del values
    out = torch.full((elements,), 7.0, device="cuda")
    add_rows(packed, out, 1.0)
    total = torch.empty(1280)
    add_rows(alone, total, 1.0)
    _assert_same(out[-1280:], total)
    assert not bool(out[:-1280].any())


def test_runs_on_the_current_stream() -> None:
    stream = torch.cuda.Stream()
    values = torch.ones(1, 2**20, device="cuda")
    packed = torch.zeros(1, packed_bytes(2**20), dtype=torch.uint8, device="cuda")
    out = torch.zeros(2**20, device="cuda")
    pack(values, packed)  # compiled before the clock matters
    add_rows(packed, out, 1.0)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        values.fill_(127.0)
        pack(values, packed)
        add_rows(packed, out, 1.0)
    stream.synchronize()
    assert float(out.min()) == float(out.max()) == 127.0


def _seconds(calls: list[Callable[[], object]], turns: int = 20) -> float:
    for call in calls:
        call()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for turn in range(turns):
        calls[turn % len(calls)]()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000 / turns


def _host_seconds(call: Callable[[], object], turns: int = 200) -> float:
    call()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(turns):
        call()
    took = time.perf_counter() - begin
    torch.cuda.synchronize()
    return took / turns


def _operations(rows: int, elements: int) -> dict[str, tuple[int, Callable[[], object]]]:
    """Each operation with the bytes that it moves."""
    size = rows * elements
    wire = rows * packed_bytes(elements)
    full = torch.randn(rows, elements, device="cuda")
    half, copied = full.bfloat16(), torch.empty(rows, elements, dtype=torch.bfloat16, device="cuda")
    residual = torch.zeros_like(half)
    packed = torch.empty(rows, packed_bytes(elements), dtype=torch.uint8, device="cuda")
    out = torch.empty(elements, device="cuda")
    pack(half, packed)
    return {
        "copy bf16": (4 * size, lambda: copied.copy_(half)),
        "pack bf16": (2 * size + wire, lambda: pack(half, packed)),
        "pack fp32": (4 * size + wire, lambda: pack(full, packed)),
        "pack bf16, residual bf16": (6 * size + wire, lambda: pack(half, packed, residual)),
        "pack fp32, residual bf16": (8 * size + wire, lambda: pack(full, packed, residual)),
        "unpack bf16": (2 * size + wire, lambda: unpack(packed, copied)),
        "unpack fp32": (4 * size + wire, lambda: unpack(packed, full)),
        "add_rows": (wire + 4 * elements, lambda: add_rows(packed, out, 0.5)),
    }


def test_bandwidth() -> None:
    """A table, not a limit: other machines and neighbours would break one."""
    print()
    print(f"{'operation':28}{'shape':>16}{'GB/s':>8}{'us':>9}")
    for shape in ((1, 2**26), (64, 2**20)):
        several = [_operations(*shape) for _ in range(2)]  # in turn, so that a cache does not hold them
        for name, (moved, _) in several[0].items():
            took = _seconds([operations[name][1] for operations in several])
            print(f"{name:28}{shape!s:>16}{moved / took / 1e9:8.0f}{took * 1e6:9.1f}")
        del several
    print(f"{'host, each call':28}{'shape':>16}{'us':>17}")
    for name, (_, call) in _operations(1, 4096).items():
        print(f"{name:28}{'(1, 4096)':>16}{_host_seconds(call) * 1e6:17.1f}")
