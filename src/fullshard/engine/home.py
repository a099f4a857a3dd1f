"""Where values of a lane rest, and how they come to the device that computes.

A lane has four kinds of values that outlive a pass: its shard (the master), the shard in the compute dtype
that gathers send, its gradient shard, and what optimizers keep. Each kind has a home, which allocates memory,
stages values on the compute device for reading, and takes values back from there. No other module assumes
that a value rests on the compute device.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import torch

from fullshard.engine.disk import DiskFolder, DiskValue
from fullshard.plan.homes import LaneHomes, Place

Kind = Literal["device", "host", "disk"]


class Home(Protocol):
    kind: Kind
    compute_device: torch.device

    def zeros(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory in this home."""
        ...

    def stage(self, values: torch.Tensor) -> torch.Tensor:
        """Values that rest here, on the compute device, for reading."""
        ...

    def put_back(self, values: torch.Tensor, staged: torch.Tensor) -> None:
        """Write what lies on the compute device into values that rest here."""
        ...

    # A step works on ranges of values. What it stores counts from `commit` on.

    def fetch(self, values: torch.Tensor, start: int, staged: torch.Tensor) -> None:
        """Copy elements from `start` on to the compute device."""
        ...

    def store(self, values: torch.Tensor, start: int, staged: torch.Tensor) -> None:
        """Copy elements from the compute device into place."""
        ...


class _Memory:
    """Values are in memory: what a step stores is there at once."""

    def put_back(self, values: torch.Tensor, staged: torch.Tensor) -> None:
        values.copy_(staged)

    def fetch(self, values: torch.Tensor, start: int, staged: torch.Tensor) -> None:
        staged.copy_(values.detach()[start : start + len(staged)], non_blocking=True)

    def store(self, values: torch.Tensor, start: int, staged: torch.Tensor) -> None:
        values.data[start : start + len(staged)].copy_(staged)


class DeviceHome(_Memory):
    """Values rest on the device that computes: staging costs nothing."""

    kind: Kind = "device"

    def __init__(self, compute_device: torch.device) -> None:
        self.compute_device = compute_device

    def zeros(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(num_elements, dtype=dtype, device=self.compute_device)

    def stage(self, values: torch.Tensor) -> torch.Tensor:
        return values


class HostHome(_Memory):
    """Values rest in host memory. What is staged is a copy, on ranks that compute on the host too."""

    kind: Kind = "host"

    def __init__(self, compute_device: torch.device) -> None:
        self.compute_device = compute_device

    def zeros(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(num_elements, dtype=dtype, pin_memory=self.compute_device.type == "cuda")

    def stage(self, values: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(values, device=self.compute_device).copy_(values, non_blocking=True)


class DiskHome:
    """Values rest in files, see `disk`."""

    kind: Kind = "disk"

    def __init__(self, compute_device: torch.device, parent: Path) -> None:
        self.compute_device = compute_device
        self._folder = DiskFolder(parent)
        self._values: weakref.WeakValueDictionary[int, DiskValue] = weakref.WeakValueDictionary()
        self._buffer = bytearray()

    def zeros(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        value = DiskValue(self._folder.new_file(), num_elements, dtype)
        tensor = value.tensor()
        if num_elements:
            self._values[value.address] = value
        return tensor

    def stage(self, values: torch.Tensor) -> torch.Tensor:
        staged = torch.empty_like(values, device=self.compute_device)
        if values.numel():
            self.fetch(values, 0, staged)
        return staged

    def put_back(self, values: torch.Tensor, staged: torch.Tensor) -> None:
        values.copy_(staged)

    def fetch(self, values: torch.Tensor, start: int, staged: torch.Tensor) -> None:
        if not staged.numel():
            return
        value = self._known(values)
        size = staged.element_size()
        memory = self._host(staged.numel() * size)
        value.read(start * size, memory)
        staged.copy_(torch.frombuffer(memory, dtype=staged.dtype))

    def store(self, values: torch.Tensor, start: int, staged: torch.Tensor) -> None:
        if not staged.numel():
            return
        value = self._known(values)
        size = staged.element_size()
        memory = self._host(staged.numel() * size)
        torch.frombuffer(memory, dtype=staged.dtype).copy_(staged)
        value.write(start * size, memory)

    def complete(self) -> None:
        """Make everything ready to count, or raise."""
        for value in list(self._values.values()):
            value.complete()

    def commit(self) -> None:
        for value in list(self._values.values()):
            value.commit()

    def abandon(self) -> None:
        for value in list(self._values.values()):
            value.abandon()

    def edited(self, values: torch.Tensor) -> None:
        """User code wrote into views of it."""
        if values.numel():
            self._values[values.data_ptr()].forget_checksums()

    def _known(self, values: torch.Tensor) -> DiskValue:
        value = self._values[values.data_ptr()]
        if value.version != values._version:
            value.forget_checksums()
            value.version = values._version
        return value

    def _host(self, size_bytes: int) -> memoryview:
        if len(self._buffer) < size_bytes:
            self._buffer = bytearray(size_bytes)
        return memoryview(self._buffer)[:size_bytes]


@dataclass(frozen=True)
class Homes:
    """The homes of one lane, by kind of value."""

    master: Home
    compute: Home
    gradients: Home
    state: Home

    @staticmethod
    def on_device(device: torch.device) -> Homes:
        home = DeviceHome(device)
        return Homes(home, home, home, home)

    @property
    def streams_steps(self) -> bool:
        """Whether an optimizer needs values that are not on the compute device."""
        return any(home.kind != "device" for home in (self.master, self.gradients, self.state))


class HomeChoice:
    """The homes of a model's lanes, as `plan.homes` chose them."""

    def __init__(self, places: Iterable[LaneHomes] | None, device: torch.device, disk: Path | None) -> None:
        self._device = device
        self._places = None if places is None else iter(places)
        self._homes: dict[Place, Home] = {"device": DeviceHome(device), "host": HostHome(device)}
        self.has_disk = disk is not None
        if disk is not None:
            self._homes["disk"] = DiskHome(device, disk)

    def next(self) -> Homes:
        """Those of the next lane."""
        if self._places is None:
            return Homes.on_device(self._device)
        at = next(self._places)
        return Homes(*(self._homes[place] for place in (at.master, at.compute, at.gradients, at.state)))
