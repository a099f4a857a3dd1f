"""What each rank of `fullshard launch` runs: python -m fullshard.tools.cli.launched [-m] SCRIPT ...

It turns the Hugging Face integration on and becomes the script: `__main__`, sys.argv and sys.path[0] are as
python sets them, so that pickling, multiprocessing's spawn and imports from the script's folder work.
`runpy` removes its `__main__` after the script's last line; functions that threads and atexit still
call would not find it. So the script is executed here, in a module that stays.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import zipfile
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType, ModuleType, TracebackType
from typing import Any


def main(words: Sequence[str]) -> None:
    """Run a script, or with -m a module, and exit as it does."""
    from fullshard.hugging_face import turn_on
    from fullshard.stop_signals import expect_warnings

    turn_on()
    expect_warnings()
    try:
        become(words)
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001  as python's own last resort
        _report(error)
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        raise SystemExit(1) from None


def become(words: Sequence[str]) -> None:
    """Be the script, or with -m the module, of these words: its code runs as `__main__`."""
    as_module = words[0] == "-m"
    target, *rest = words[1:] if as_module else words
    sys.argv = [target, *rest]
    if as_module:
        _run_module(target)
    else:
        _run_script(target)


def _run_script(path: str) -> None:
    if os.path.isdir(path) or zipfile.is_zipfile(path):
        import runpy

        _put_first(path)
        runpy.run_path(path, run_name="__main__")
        return
    _put_first(os.path.dirname(os.path.realpath(path)))
    loader = SourceFileLoader("__main__", path)
    with open(path, "rb") as file:
        source = file.read()
    module = _new_main(path, loader, None)
    exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)


def _run_module(name: str) -> None:
    spec, code = _module(name)
    assert spec.origin is not None
    sys.argv[0] = spec.origin
    module = _new_main(spec.origin, spec.loader, spec)
    module.__package__ = spec.parent
    exec(code, module.__dict__)


def _module(name: str) -> tuple[ModuleSpec, CodeType]:
    """The spec and code of a module, or of a package's `__main__`."""
    _put_first(os.getcwd())
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            name = f"{name}.__main__"
            spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module exists, and something that it imports does not
        spec = None
    code = None
    if spec is not None and spec.loader is not None:
        code = getattr(spec.loader, "get_code", lambda _: None)(name)
    if spec is None or code is None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    return spec, code


def _new_main(path: str, loader: Any, spec: ModuleSpec | None) -> ModuleType:
    module = ModuleType("__main__")
    vars(module).update(
        __file__=path,
        __cached__=None,
        __loader__=loader,
        __spec__=spec,
        __builtins__=__builtins__,
        __package__=None,
        __annotations__={},
    )
    sys.modules["__main__"] = module
    return module


def _put_first(folder: str) -> None:
    """Replaces the folder that python -m put there; with -P there is none."""
    if not sys.flags.safe_path:
        sys.path[0] = folder


def _report(error: BaseException) -> None:
    """Print the traceback as python does, without our frames; record the error for torchrun's summary."""
    trace = error.__traceback__
    while trace is not None and _is_ours(trace):
        trace = trace.tb_next
    error.__traceback__ = trace
    sys.last_value = error  # as python sets it: exit handlers read it to know that the script failed
    sys.excepthook(type(error), error, trace)
    sys.stderr.flush()
    if isinstance(error, Exception):
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)


def _is_ours(trace: TracebackType) -> bool:
    file = trace.tb_frame.f_code.co_filename
    return file == __file__ or file.startswith(("<frozen runpy", "<frozen importlib"))


if __name__ == "__main__":
    main(sys.argv[1:])
