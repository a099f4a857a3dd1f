"""`fs.stop_requested`: whether a run is to save and end, the same on all ranks after the same step."""

from __future__ import annotations

from fullshard.comm.control import gather_from_world
from fullshard.keywords import checked_keywords
from fullshard.stop_signals import of_this_process

_agreed = 0


@checked_keywords()
def stop_requested() -> int:
    """The number of a signal that asked any rank to stop, or 0. All ranks get the same answer.

        for step, batch in batches.steps(loader):
            ...
            if stop := fs.stop_requested():
                fs.save(f"{root}/step-{step}", model, optimizer, extra={"batches": batches.state()})
                sys.exit(128 + stop)

    Call it on every rank, after the same step: each call is one small message between the hosts of all ranks,
    which waits for no device. Signals reach ranks at different moments, or only some of them; once one has
    arrived anywhere, the next call returns it everywhere, and later calls return it without a message.

    From the first call on, SIGTERM, SIGINT, SIGHUP, SIGUSR1 and SIGUSR2 no longer end this process, and
    handlers that the script has set for them are called as well. A second Ctrl-C ends it. Exit with 128 plus
    the number, so that Slurm, Kubernetes and `fullshard launch` see that the run is not complete.

    In a thread other than the main one Python can handle no signal: there, only those of other ranks count.
    """
    global _agreed
    if not _agreed:
        of_this_process.listen()
        _agreed = next((number for number in gather_from_world(of_this_process.number, "stop") if number), 0)
    return _agreed
