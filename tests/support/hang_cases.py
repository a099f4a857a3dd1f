"""One of the ranks of a run in which rank 1 gets stuck, or leaves: `hang_cases.py CASE FOLDER`.

Not a test module: `test_hangs` runs it as a script, because how the process ends is what is tested.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

import checkpoint_crashes as crashes
import fullshard as fs

CASE, FOLDER = sys.argv[1], Path(sys.argv[2])
RANK = int(os.environ["RANK"])
VICTIM = int(os.environ.get("VICTIM", "1"))  # the rank that gets stuck, or leaves


def event() -> None:
    """Now it happens: for the table of times."""
    (FOLDER / f"new-{RANK}").write_text(str(time.time()))
    (FOLDER / f"new-{RANK}").rename(FOLDER / "event")  # another rank may write it too, or end this one


def stop() -> None:
    event()
    os.kill(os.getpid(), signal.SIGSTOP)


def stopped_first(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        stop()
        return function(*args, **kwargs)

    return run if RANK == VICTIM else function


class StopInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if RANK == VICTIM and Net.stops:
            stop()
        return gradient


class Net(nn.Module):
    stops = False

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index == 1:
                x = StopInBackward.apply(x)
        return self.head(x)


class Run:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = fs.shard(Net(), units=nn.Sequential, keep_full=0)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.x = torch.randn(4, 16, generator=torch.Generator().manual_seed(RANK))
        for _ in range(2):
            self.step()

    def step(self) -> float:
        loss = self.model(self.x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def save(self, **options: Any) -> None:
        fs.save(FOLDER / "saved", self.model, self.optimizer, **options)


# ---- what happens on rank 1, between steps


def loop() -> NoReturn:
    """A third of a core: as little as counts as computing, for as long as the others wait."""
    event()
    while True:
        begun = time.process_time()
        while time.process_time() < begun + 0.004:
            pass
        time.sleep(0.008)


def locked() -> None:
    event()
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def sleeps(seconds: float) -> None:
    event()
    time.sleep(seconds)


def leaves() -> NoReturn:
    event()
    sys.exit(0)


def exits() -> NoReturn:
    event()
    os._exit(0)


def killed() -> None:
    event()
    os.kill(os.getpid(), signal.SIGKILL)


def out_of_memory() -> NoReturn:
    event()
    raise MemoryError("no room")


def asks() -> None:
    event()
    input()


RANK_1: dict[str, Callable[[], Any]] = {
    "stopped": stop,
    "loop": loop,
    "lock": locked,
    "sleep": lambda: sleeps(600),
    "short sleep": lambda: sleeps(9),
    "leaves": leaves,
    "exits": exits,
    "killed": killed,
    "out of memory": out_of_memory,
    "input": asks,
}


# ---- what the ranks do differently


def in_barrier(rank_0: Callable[[], Any], collective: Callable[[], Any] = dist.barrier) -> None:
    if RANK == 0:
        event()
        rank_0()
    else:
        collective()


def shorter_loader(run: Run) -> None:
    for _ in range(3 - RANK):
        run.step()
    event()
    dist.barrier()


def enter_full(run: Run) -> None:
    with fs.full(run.model):
        pass


def two_models(run: Run) -> None:
    other = fs.shard(Net(), units=nn.Sequential)
    event()
    (run.model if RANK == 0 else other)(run.x)


def quiet_before_a_save(run: Run) -> None:
    if RANK == 0:
        sleeps(9)
    run.save()


def stopped_in_a_save(run: Run, **options: Any) -> None:
    from fullshard.checkpoint.saving.job import Job

    Job._write = stopped_first(Job._write)  # type: ignore[method-assign]
    run.save(**options)
    while True:
        run.step()


def killed_in_a_save(run: Run) -> None:
    from fullshard.checkpoint.saving.job import Job

    if RANK == VICTIM:
        Job._write = lambda *_: killed()  # type: ignore[method-assign]
    run.save()


def full_disk_in_a_save(run: Run) -> None:
    if RANK == VICTIM:
        crashes.files.disk = crashes.failing("write", crashes.full)
    event()
    run.save()


def stopped_in_a_load(run: Run) -> None:
    from fullshard.checkpoint import load

    run.save()
    load._open = stopped_first(load._open)
    fs.load(FOLDER / "saved", run.model, run.optimizer)


def stopped_in_backward(run: Run) -> None:
    Net.stops = True
    run.step()


def stopped_in_the_optimizer(run: Run) -> None:
    run.optimizer.step = stopped_first(run.optimizer.step)  # type: ignore[method-assign]
    run.step()


def interrupted(run: Run) -> None:
    if RANK == VICTIM:
        sleeps(600)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(2.0, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    run.step()


def caught(run: Run) -> None:
    if RANK == VICTIM:
        stop()
    try:
        run.step()
    except fs.FullshardError as error:
        print(f"caught {type(error).__name__}", file=sys.stderr)
    run.__dict__.clear()
    gc.collect()


def caught_and_status(run: Run) -> None:
    caught(run)
    sys.exit(7)


def groups_ended_in_finally(run: Run) -> None:
    if RANK == VICTIM:
        stop()
    try:
        run.step()
    finally:
        dist.destroy_process_group()


def error_swallowed(run: Run) -> None:
    if RANK == VICTIM:
        event()
        try:
            raise ValueError("a bad batch")
        except ValueError:
            return
    run.step()


# ---- what the ranks do differently, without a barrier anywhere: nothing may be updated before it is noticed


def extra_pass_in_evaluation(run: Run) -> None:
    if RANK == VICTIM:
        run.model.eval()
        with torch.no_grad():
            run.model(run.x)
        run.model.train()


def another_unit(run: Run) -> None:
    with torch.no_grad():
        run.model.blocks[1 + (RANK == VICTIM)](run.x)


def micro_batches(run: Run) -> None:
    for index in range(2 + (RANK == VICTIM)):
        last = index == 1 + (RANK == VICTIM)
        with contextlib.nullcontext() if last else fs.accumulate(run.model):
            run.model(run.x).square().mean().backward()
    run.optimizer.step()


def extra_step(run: Run) -> None:
    if RANK == VICTIM:
        run.step()
        sys.exit(3)


def diverging(change: Callable[[Run], Any]) -> Callable[[Run], Any]:
    def run_both(run: Run) -> None:
        values = [p.detach().clone() for p in run.model.parameters()]
        event()
        try:
            change(run)
            for _ in range(3):
                run.step()
        except BaseException:
            same = all(map(torch.equal, values, (p.detach() for p in run.model.parameters())))
            print("nothing was updated" if same else "parameters WERE UPDATED", file=sys.stderr)
            raise

    return run_both


def keeps_stepping(run: Run) -> NoReturn:
    """Until something happens from outside; marked when hosts have had time to hear of each other."""
    begun, marked = time.monotonic(), False
    while True:
        run.step()
        time.sleep(0.05)
        if not marked and time.monotonic() - begun > 4.0:
            event()
            marked = True


BOTH: dict[str, Callable[[Run], Any]] = {
    "forward alone": lambda run: in_barrier(lambda: run.model(run.x)),
    "full alone": lambda run: in_barrier(lambda: enter_full(run)),
    "forward against all_reduce": lambda run: in_barrier(
        lambda: run.model(run.x), lambda: dist.all_reduce(torch.ones(3))
    ),
    "shorter loader": shorter_loader,
    "two models": two_models,
    "quiet before a save": quiet_before_a_save,
    "stopped in a save": stopped_in_a_save,
    "stopped in a background save": lambda run: stopped_in_a_save(run, background=True),
    "killed in a save": killed_in_a_save,
    "full disk in a save": full_disk_in_a_save,
    "stopped in a load": stopped_in_a_load,
    "stopped in backward": stopped_in_backward,
    "stopped in the optimizer": stopped_in_the_optimizer,
    "interrupted": interrupted,
    "keeps stepping": keeps_stepping,
    "extra pass in evaluation": diverging(extra_pass_in_evaluation),
    "another unit": diverging(another_unit),
    "micro-batches": diverging(micro_batches),
    "extra step": diverging(extra_step),
    "caught": caught,
    "caught, status 7": caught_and_status,
    "groups ended in finally": groups_ended_in_finally,
    "error swallowed": error_swallowed,
}


def main() -> None:
    dist.init_process_group("gloo")
    if CASE == "stopped in shard":
        from fullshard.comm.groups import ShardGroup

        ShardGroup.__init__ = stopped_first(ShardGroup.__init__)  # type: ignore[method-assign]
    if CASE == "late for shard" and RANK == VICTIM:
        sleeps(9)
    run = Run()
    if CASE in RANK_1 and RANK == VICTIM:
        RANK_1[CASE]()
    if CASE in BOTH:
        BOTH[CASE](run)
    if CASE.startswith("caught"):
        return
    for _ in range(3):
        loss = run.step()
    print(f"loss {loss}")


main()
