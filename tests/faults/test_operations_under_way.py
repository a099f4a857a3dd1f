"""Memory that an operation still reads or writes stays where it is, and no operation outlives a profiler."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

import ranks
import reference
from engines import my_rank

STRATEGIES = ("zero3", "zero2")


def _model() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(4)]
    for block in blocks:
        block[0].bias.requires_grad_(False)  # a second lane: a unit's gather is two operations
    return nn.Sequential(*blocks, nn.Linear(8, 1))


def _batch(rank: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))


def _step(model: nn.Module) -> None:
    for p in model.__dict__["_fullshard"].parameters:  # as an optimizer's zero_grad does
        p.grad = None
    model(_batch(my_rank())).square().mean().backward()


class _Witness:
    """Every operation with the storages it uses, and what was resized under one; interrupts a given call."""

    def __init__(self) -> None:
        self.under_way: dict[Any, set[int]] = {}
        self.resized: list[str] = []
        self.what, self.calls_left = "", 0
        self.interrupted = False

    def interrupt(self, what: str, call: int) -> None:
        self.what, self.calls_left, self.interrupted = what, call, False

    def meet(self, what: str) -> None:
        if what == self.what:
            if self.calls_left == 0:
                self.what, self.interrupted = "", True
                raise KeyboardInterrupt
            self.calls_left -= 1

    @contextmanager
    def watching(self) -> Iterator[None]:
        from fullshard.comm.groups import ShardGroup
        from fullshard.comm.watchdog import Operation

        gather, exchange, wait = ShardGroup.gather, ShardGroup.exchange, Operation.wait
        resize = torch.UntypedStorage.resize_

        def issued(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
            def issue(line: Any, to: Tensor, source: Tensor, unit: str) -> Any:
                self.meet(name)
                operation = original(line, to, source, unit)
                self.under_way[operation] = {t.untyped_storage()._cdata for t in (to, source)}
                return operation

            return issue

        def waited(operation: Any) -> None:
            self.meet("wait")
            wait(operation)
            self.under_way.pop(operation, None)

        def resized(storage: Any, size: int) -> Any:
            if any(storage._cdata in used for used in self.under_way.values()):
                self.resized.append(f"{storage.nbytes()} to {size} bytes")
            return resize(storage, size)

        ShardGroup.gather, ShardGroup.exchange = issued("gather", gather), issued("exchange", exchange)  # type: ignore[method-assign]
        Operation.wait, torch.UntypedStorage.resize_ = waited, resized  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            ShardGroup.gather, ShardGroup.exchange = gather, exchange  # type: ignore[method-assign]
            Operation.wait, torch.UntypedStorage.resize_ = wait, resize  # type: ignore[method-assign]


def _gradients(model: nn.Module) -> list[Tensor]:
    """This rank's parts, as plain tensors."""
    with torch._C.DisableTorchFunctionSubclass():
        return [p.grad.clone().as_subclass(Tensor) for p in model.parameters() if p.grad is not None]


def _interrupted_everywhere(strategy: str) -> tuple[dict[str, int], list[str], bool]:
    """One step after another, each interrupted (on all ranks alike) at its next wait, gather or exchange."""
    import fullshard as fs

    model = fs.shard(_model(), strategy=strategy, units=nn.Sequential, keep_full=0)
    witness, counts, right = _Witness(), {}, True
    _step(model)
    _step(model)
    expected = _gradients(model)
    with witness.watching():
        for what in ("wait", "gather", "exchange"):
            for call in range(100):
                witness.interrupt(what, call)
                with suppress(KeyboardInterrupt):
                    _step(model)
                if not witness.interrupted:
                    break
                counts[what] = call + 1
                _step(model)
                right &= all(map(reference.bitwise, _gradients(model), expected))
    return counts, witness.resized, right


def _interrupted() -> list[tuple[dict[str, int], list[str], bool]]:
    return [_interrupted_everywhere(strategy) for strategy in STRATEGIES]


def test_an_interrupt_at_any_wait_or_issue_moves_no_memory_under_way_and_the_next_step_is_right() -> None:
    for found in ranks.run(_interrupted, 2, timeout_s=240.0):
        for counts, resized, right in found:
            assert min(counts[what] for what in ("wait", "gather", "exchange")) > 3
            assert resized == []
            assert right


class _Interruptible(nn.Module):
    """Its blocks can be interrupted in their own code; with `again` its forward calls itself once."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(8, 8)
        self.interrupt, self.again = False, False

    def forward(self, x: Tensor) -> Tensor:
        again, self.again = self.again, False
        for at, block in enumerate(self.blocks):
            x = block(x)
            if at == 1 and self.interrupt:
                self.interrupt = False
                raise KeyboardInterrupt
        out: Tensor = self.head(x)
        return self(out) if again else out


def _interrupt(call: Callable[[Tensor], Any], model: Any) -> None:
    model.interrupt = True
    with suppress(KeyboardInterrupt):
        call(_batch(my_rank()))


def _interrupted_in_forward(folder: str) -> dict[str, bool]:
    import copy

    import fullshard as fs
    from fullshard.state.state_dict import StateShard

    plain, model = _Interruptible(), fs.shard(_Interruptible(), units=nn.Sequential, keep_full=0)
    x, found = _batch(my_rank()), {}
    resting = [id(p) for p in model.parameters()]
    for _ in range(2):
        _step(model)
    expected = _gradients(model)

    def right() -> bool:
        _step(model)
        return len(_gradients(model)) == 8 and all(map(reference.bitwise, _gradients(model), expected))

    _interrupt(model, model)
    found["step"] = right() and resting == [id(p) for p in model.parameters()]
    _interrupt(model, model)
    with fs.full(model):
        found["full"] = all(map(reference.bitwise, model.parameters(), plain.parameters()))
    _interrupt(model, model)
    fs.save(f"{folder}/saved", model)
    found["save"] = resting == [id(p) for p in model.parameters()]
    _interrupt(model, model)
    found["state dict"] = all(isinstance(value, StateShard) for value in model.state_dict().values())
    _interrupt(model, model)
    found["copy"] = torch.equal(copy.deepcopy(model)(x), plain(x))
    _interrupt(model, model)
    with fs.inference(model):
        _interrupt(model, model)
        found["inference"] = torch.equal(model(x), plain(x))
        _interrupt(model, model)
    found["step after inference"] = right()
    model.again = plain.again = True
    found["a root that calls itself"] = torch.equal(model(x), plain(x)) and right()
    return found


def test_after_a_keyboard_interrupt_in_forward_a_model_saves_and_trains_as_if_it_had_not_been(
    tmp_path: Any,
) -> None:
    for found in ranks.run(_interrupted_in_forward, 2, str(tmp_path), timeout_s=240.0):
        assert [what for what, right in found.items() if not right] == []


def _profiled() -> list[tuple[int, int]]:
    """Operations left under way by a step without and with the profiler."""
    from torch.profiler import ProfilerActivity, profile

    import fullshard as fs

    left = []
    for strategy in STRATEGIES:
        model = fs.shard(_model(), strategy=strategy, units=nn.Sequential)
        witness = _Witness()
        _step(model)
        _step(model)
        with witness.watching():
            _step(model)
            said = model.__dict__["_fullshard"].comm.report.operation
            plain = len(witness.under_way) + (said is not None and said._work is not None)
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True):
                with fs.accumulate(model):
                    _step(model)
                model(_batch(my_rank())).square().mean().backward()
            said = model.__dict__["_fullshard"].comm.report.operation
            left.append((plain, len(witness.under_way) + (said is not None and said._work is not None)))
    return left


def test_no_operation_is_under_way_when_a_profiled_step_ends() -> None:
    for found in ranks.run(_profiled, 2, timeout_s=240.0):
        for plain, profiled in found:
            assert plain > 0  # one goes on while the optimizer steps, which is what makes this worth a test
            assert profiled == 0


LEAVES_GROUPS_OPEN = """
import atexit
import torch
import torch.distributed as dist

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
atexit.register(lambda: print("open" if dist.is_initialized() else "ended"))
import fullshard as fs

atexit.register(lambda: print("open" if dist.is_initialized() else "ended too early"))
fs.shard(torch.nn.Linear(2, 2))
"""


def test_groups_that_a_script_leaves_open_end_before_its_process_does() -> None:
    """gloo's threads would abort an exit now and then, after all the work was done.

    What the script itself does at exit (a last barrier, its own end of the groups) comes before that.
    """
    command = [sys.executable, "-c", LEAVES_GROUPS_OPEN]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert (done.returncode, done.stdout) == (0, "open\nended\n"), done.stderr
