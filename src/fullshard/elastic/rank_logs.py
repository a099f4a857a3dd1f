"""Where the output of ranks goes: torchrun's --log-dir, --redirects, --tee and --local-ranks-filter."""

from __future__ import annotations

import sys
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.tail_log import TailLog


class RankLogs:
    """Files for each rank of a round, and what is printed of them meanwhile."""

    def __init__(self, folder: str, redirects: str, tee: str, ranks_filter: str) -> None:
        """Raises ValueError for a wrong option, as torchrun does."""
        chosen = {int(rank) for rank in ranks_filter.split(",")} if ranks_filter else None
        self._specs = DefaultLogsSpecs(folder, Std.from_str(redirects), Std.from_str(tee), chosen)
        self._tails: list[TailLog] = []

    def begin(self, variables: list[dict[str, str]]) -> list[tuple[str, str]]:
        """The files for stdout and stderr of each rank; adds the one for its error to its variables."""
        self.end()
        places = self._specs.reify(dict(enumerate(variables)))
        for name, files, target in (
            ("stdout", places.tee_stdouts, sys.stdout),
            ("stderr", places.tee_stderrs, sys.stderr),
        ):
            headers = {place: f"[default{place}]:" for place in files}
            self._tails.append(TailLog(name, dict(files), target, headers).start())
        return [(places.stdouts[place], places.stderrs[place]) for place in range(len(variables))]

    def end(self) -> None:
        tails: list[Any] = self._tails
        self._tails = []
        for tail in tails:
            tail.stop()
