"""Where values of a lane rest, and how they come to the device that computes.

A lane has four kinds of values that outlive a pass: its shard (the master), the shard in the compute dtype
that gathers send, its gradient shard, and what optimizers keep. Each kind has a home, which allocates memory,
stages values on the compute device for reading, and takes values back from there. No other module assumes
that a value rests on the compute device.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import torch

from fullshard.engine.homes.disk_home import DiskHome
from fullshard.engine.homes.split_masters import SplitValues
from fullshard.engine.homes.transfers import Mark, Transfers
from fullshard.host_memory import host_zeros
from fullshard.plan.homes import LaneHomes, Place

Kind = Literal["device", "host", "disk"]


class Home(Protocol):
    kind: Kind
    compute_device: torch.device

    def zeros(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory in this home."""
        ...

    def stage(self, values: torch.Tensor, after: Mark | None = None) -> torch.Tensor:
        """Values that rest here, on the compute device, for reading; not read before `after` is reached."""
        ...

    def put_back(self, values: torch.Tensor, staged: torch.Tensor) -> None:
        """Write what lies on the compute device into values that rest here."""
        ...

    # A step works on ranges of values. Its streams order what these begin.

    def read_ahead(self, values: torch.Tensor, start: int, num_elements: int) -> None:
        """These are going to be fetched: begin what takes long."""
        ...

    def fetch(self, values: torch.Tensor, start: int, staged: torch.Tensor) -> None:
        """Copy elements from `start` on to the compute device."""
        ...

    def store(self, values: torch.Tensor, start: int, staged: torch.Tensor) -> None:
        """Copy elements from the compute device into place."""
        ...


class DeviceHome:
    """Values rest on the device that computes: staging costs nothing."""

    kind: Kind = "device"

    def __init__(self, compute_device: torch.device) -> None:
        self.compute_device = compute_device

    def zeros(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(num_elements, dtype=dtype, device=self.compute_device)

    def stage(self, values: torch.Tensor, after: Mark | None = None) -> torch.Tensor:
        return values

    def put_back(self, values: torch.Tensor, staged: torch.Tensor) -> None:
        values.copy_(staged)

    def read_ahead(self, values: torch.Tensor, start: int, num_elements: int) -> None:
        pass

    def fetch(self, values: torch.Tensor, start: int, staged: torch.Tensor) -> None:
        staged.copy_(values[start : start + len(staged)], non_blocking=True)

    def store(self, values: torch.Tensor, start: int, staged: torch.Tensor) -> None:
        values[start : start + len(staged)].copy_(staged, non_blocking=True)


class HostHome:
    """Values rest in host memory. What is staged is a copy, on ranks that compute on the host too."""

    kind: Kind = "host"

    def __init__(self, transfers: Transfers) -> None:
        self.transfers, self.compute_device = transfers, transfers.device

    def zeros(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        return host_zeros(num_elements, dtype, self.compute_device)

    def stage(self, values: torch.Tensor, after: Mark | None = None) -> torch.Tensor:
        if isinstance(values, SplitValues):
            return values.split_values.stage(self.compute_device, after)
        staged = torch.empty_like(values, device=self.compute_device)
        with self.transfers.up(self.transfers.now(), after):
            staged.copy_(values, non_blocking=True)
            copied = self.transfers.mark_up()
        copied.wait()
        return staged

    def land(self, values: torch.Tensor, staged: torch.Tensor) -> Mark:
        """`put_back` beside computing: over at the mark."""
        with self.transfers.down(self.transfers.now()):
            values.copy_(staged, non_blocking=True)
            mark = self.transfers.mark_down()
        self.transfers.hold(staged, mark)
        return mark

    def put_back(self, values: torch.Tensor, staged: torch.Tensor) -> None:
        if isinstance(values, SplitValues):
            values.split_values.put_back(staged)
            return
        self.transfers.synchronize()  # what is on its way may still be read from here
        values.copy_(staged)

    def read_ahead(self, values: torch.Tensor, start: int, num_elements: int) -> None:
        pass

    def fetch(self, values: torch.Tensor, start: int, staged: torch.Tensor) -> None:
        staged.copy_(values.detach()[start : start + len(staged)], non_blocking=True)

    def store(self, values: torch.Tensor, start: int, staged: torch.Tensor) -> None:
        values.data[start : start + len(staged)].copy_(staged, non_blocking=True)


@dataclass(frozen=True)
class Homes:
    """The homes of one lane, by kind of value."""

    master: Home
    compute: Home
    gradients: Home
    state: Home
    transfers: Transfers  # by which values come to the compute device

    @staticmethod
    def on_device(device: torch.device) -> Homes:
        home = DeviceHome(device)
        return Homes(home, home, home, home, Transfers(device, beside=False))

    @property
    def streams_steps(self) -> bool:
        """Whether an optimizer needs values that are not on the compute device."""
        return any(home.kind != "device" for home in (self.master, self.gradients, self.state))


class HomeChoice:
    """The homes of a model's lanes, as `plan.homes` chose them."""

    def __init__(self, places: Iterable[LaneHomes] | None, device: torch.device, disk: Path | None) -> None:
        self._places = None if places is None else iter(places)
        self._homes: dict[Place, Home] = {"device": DeviceHome(device)}
        self.has_disk = disk is not None
        self._transfers = Transfers(device, beside=self._places is not None)
        if self._places is not None:
            self._homes["host"] = HostHome(self._transfers)
            if disk is not None:
                self._homes["disk"] = DiskHome(self._transfers, disk)

    def next(self) -> Homes:
        """Those of the next lane."""
        at = LaneHomes() if self._places is None else next(self._places)
        master, compute, gradients, state = (
            self._homes[place] for place in (at.master, at.compute, at.gradients, at.state)
        )
        return Homes(master, compute, gradients, state, self._transfers)
