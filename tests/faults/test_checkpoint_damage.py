"""Damage of every kind to a saved checkpoint is found by fs.load before any tensor has changed."""

from __future__ import annotations

import json
import random
import shutil
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ranks
from engines import build, my_rank

MIB = 2**20
WIDTH = 320


class Config:
    """As a transformers config: what makes fs.save write a config.json."""

    def to_json_string(self) -> str:
        return json.dumps({"width": WIDTH, "comment": "x" * 300})


class Wide(nn.Module):
    """A model of several blocks of one MiB, with buffers; AdamW's state is twice as large."""

    def __init__(self, width: int = WIDTH, depth: int = 5) -> None:
        super().__init__()
        self.config = Config()
        self.width = width
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.norm = nn.BatchNorm1d(width)
        self.register_buffer("ids", torch.arange(1000))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        for layer in self.blocks:
            x = x + torch.tanh(layer(x))
        return x.square().mean()


@dataclass
class Run:
    """A training run: what fs.save takes and fs.load changes."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    @classmethod
    def trained(cls, seed: int, *size: int) -> Run:
        import fullshard as fs

        model = fs.shard(build(lambda: Wide(*size), seed))
        run = cls(model, torch.optim.AdamW(model.parameters(), lr=1e-3 * (seed + 1)))
        x = torch.randn(4, model.width, generator=torch.Generator().manual_seed(seed + my_rank()))
        model(x).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        return run

    def save(self, folder: Path, files: str, seed: int) -> None:
        import fullshard as fs
        from fullshard.checkpoint.saving import writing

        large = torch.randn(100_000, generator=torch.Generator().manual_seed(seed))
        extra = {"step": seed, "large": large, "mine": {"rank": my_rank(), "order": large + my_rank()}}
        usual = writing.FILE_BYTES
        writing.FILE_BYTES, files = (MIB, "shared") if files == "several" else (usual, files)
        fs.save(folder, self.model, self.optimizer, extra=extra, files=files)
        writing.FILE_BYTES = usual

    def digest(self) -> int:
        """Of everything that a load may change: tensors, options, random numbers."""
        found = 0
        tensors = [*self.model.parameters(), *self.model.buffers(), torch.get_rng_state()]
        for parameter in self.model.parameters():
            state = self.optimizer.state.get(parameter, {})
            found = zlib.crc32(repr(list(state)).encode(), found)
            tensors += state.values()
        for tensor in tensors:
            found = zlib.crc32(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy(), found)
        groups = [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
        return zlib.crc32(repr(groups).encode(), found)


# --- kinds of damage: each changes files of a folder and says which ------------------------------------

Damage = Callable[[random.Random, Path, Path], list[str]]


def _names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def _change(draw: random.Random, folder: Path, how: Callable[[bytearray], None]) -> list[str]:
    """Any file, manifest and config included; half of the time one of the small ones."""
    name = draw.choice(_names(folder))
    data = bytearray((folder / name).read_bytes())
    how(data)
    (folder / name).write_bytes(data)
    return [name]


def _place(draw: random.Random, size: int) -> int:
    """Anywhere, or near the beginning, where headers and their padding are, or near the end."""
    near = min(size, 1500)
    return draw.choice([draw.randrange(size), draw.randrange(near), size - 1 - draw.randrange(near)])


def flip_one_bit(draw: random.Random, folder: Path, _: Path) -> list[str]:
    def flip(data: bytearray) -> None:
        data[_place(draw, len(data))] ^= 1 << draw.randrange(8)

    return _change(draw, folder, flip)


def flip_several_bits(draw: random.Random, folder: Path, _: Path) -> list[str]:
    def flip(data: bytearray) -> None:
        for _ in range(draw.randint(2, 20)):
            data[_place(draw, len(data))] ^= 1 << draw.randrange(8)

    return _change(draw, folder, flip)


def _range(draw: random.Random, size: int) -> tuple[int, int]:
    start = _place(draw, size)
    return start, min(size, start + draw.choice([1, 3, 512, 4096, MIB, 3 * MIB]))


def overwrite_with_zeros(draw: random.Random, folder: Path, _: Path) -> list[str]:
    def zero(data: bytearray) -> None:
        start, stop = _range(draw, len(data))
        data[start:stop] = bytes(stop - start)

    return _change(draw, folder, zero)


def overwrite_with_noise(draw: random.Random, folder: Path, _: Path) -> list[str]:
    def noise(data: bytearray) -> None:
        start, stop = _range(draw, len(data))
        data[start:stop] = draw.randbytes(stop - start)

    return _change(draw, folder, noise)


def truncate(draw: random.Random, folder: Path, _: Path) -> list[str]:
    def cut(data: bytearray) -> None:
        del data[draw.choice([0, 7, 8, len(data) - 1, draw.randrange(len(data)), len(data) // MIB * MIB]) :]

    return _change(draw, folder, cut)


def append(draw: random.Random, folder: Path, _: Path) -> list[str]:
    return _change(draw, folder, lambda data: data.extend(draw.randbytes(draw.choice([1, 8, 4096, MIB]))))


def delete_a_file(draw: random.Random, folder: Path, _: Path) -> list[str]:
    name = draw.choice(_names(folder))
    (folder / name).unlink()
    return [name]


def swap_two_files(draw: random.Random, folder: Path, _: Path) -> list[str]:
    one, other = draw.sample(_names(folder), 2)
    (folder / one).rename(folder / "aside")
    (folder / other).rename(folder / one)
    (folder / "aside").rename(folder / other)
    return [one, other]


def swap_ranges_inside_a_file(draw: random.Random, folder: Path, _: Path) -> list[str]:
    def swap(data: bytearray) -> None:
        size = min(draw.choice([1, 4, 64, 4096, MIB]), len(data) // 2)
        one = draw.randrange(len(data) - 2 * size + 1)
        other = draw.randrange(one + size, len(data) - size + 1)
        if size == MIB and len(data) >= 2 * MIB:  # whole blocks change places
            one, other = (MIB * i for i in draw.sample(range(len(data) // MIB), 2))
        data[one : one + size], data[other : other + size] = (
            data[other : other + size],
            data[one : one + size],
        )

    return _change(draw, folder, swap)


def swap_ranges_between_files(draw: random.Random, folder: Path, _: Path) -> list[str]:
    names = draw.sample(_names(folder), 2)
    one, other = (bytearray((folder / name).read_bytes()) for name in names)
    size = min(draw.choice([1, 64, 4096, MIB]), len(one), len(other))
    at, to = draw.randrange(len(one) - size + 1), draw.randrange(len(other) - size + 1)
    one[at : at + size], other[to : to + size] = other[to : to + size], one[at : at + size]
    for name, data in zip(names, (one, other), strict=True):
        (folder / name).write_bytes(data)
    return names


def take_a_file_of_another_checkpoint(draw: random.Random, folder: Path, another: Path) -> list[str]:
    """Of the same model, from another step: every header is the same, and every number plausible."""
    name = draw.choice(_names(folder))
    shutil.copyfile(another / name, folder / name)
    # With the other's manifest, the files that do not belong to it are the odd ones.
    return _names(folder) if name == "fullshard.json" else [name]


def copy_a_file_over_another(draw: random.Random, folder: Path, _: Path) -> list[str]:
    one, other = draw.sample(_names(folder), 2)
    shutil.copyfile(folder / one, folder / other)
    return [other]


def put_a_folder_in_place_of_a_file(draw: random.Random, folder: Path, _: Path) -> list[str]:
    name = draw.choice(_names(folder))
    (folder / name).unlink()
    (folder / name).mkdir()
    return [name]


DAMAGES: list[Damage] = [
    flip_one_bit, flip_one_bit, flip_one_bit, flip_several_bits, overwrite_with_zeros, overwrite_with_noise,
    truncate, append, delete_a_file, swap_two_files, swap_ranges_inside_a_file, swap_ranges_between_files,
    take_a_file_of_another_checkpoint, copy_a_file_over_another, put_a_folder_in_place_of_a_file,
]  # fmt: skip


def _differs(folder: Path, sound: Path) -> bool:
    """Whether the damage did anything: two ranges that are swapped may hold the same."""
    for name in _names(sound):
        path = folder / name
        if not path.is_file() or path.read_bytes() != (sound / name).read_bytes():
            return True
    return False


def _repair(folder: Path, sound: Path, names: list[str]) -> None:
    for name in names:
        if (folder / name).is_dir():
            (folder / name).rmdir()
        shutil.copyfile(sound / name, folder / name)


@dataclass
class Report:
    """How many of each kind were tried, and what went wrong."""

    tried: Counter[str]
    failures: list[str]


def _try_to_load(run: Run, folder: Path) -> str:
    """'' for a load that succeeded, else what it raised."""
    import fullshard as fs
    from fullshard.errors import CheckpointError

    try:
        fs.load(folder, run.model, run.optimizer)
    except CheckpointError as error:
        return f"CheckpointError: {error}"
    except Exception as error:
        return f"!{type(error).__name__}: {error}"
    return ""


def _campaign(root: Path, files: str, seed: int, count: int) -> Report:
    """Save, then damage a copy again and again. On several ranks the first does the damage."""
    import fullshard as fs

    sound, another, hurt = (root / name for name in ("sound", "another", "hurt"))
    saved = Run.trained(1)
    saved.save(sound, files, 1)
    Run.trained(2).save(another, files, 2)
    run = Run.trained(3)
    before = run.digest()
    first = my_rank() == 0
    if first:
        shutil.copytree(sound, hurt)
    draw, report = random.Random(seed), Report(Counter(), [])
    while report.tried.total() < count:
        damage = DAMAGES[report.tried.total() % len(DAMAGES)]
        names = damage(draw, hurt, another) if first else []
        box: list[Any] = [damage.__name__, names, first and _differs(hurt, sound)]
        dist.broadcast_object_list(box, src=0)
        kind, names, differs = box
        if not differs:
            continue
        report.tried[kind] += 1
        answer, label = _try_to_load(run, hurt), f"{kind} of {names}"
        if not answer.startswith("CheckpointError"):
            report.failures.append(f"{label}: {answer or 'loaded'}")
        elif not any(name in answer for name in names):
            report.failures.append(f"{label}: no file named in {answer}")
        if run.digest() != before:
            report.failures.append(f"{label}: something changed")
            before = run.digest()
        dist.barrier()
        if first:
            _repair(hurt, sound, names)
        dist.barrier()
    extra = fs.load(hurt, run.model, run.optimizer)  # and repaired, it loads
    if extra["mine"]["rank"] != my_rank() or _tensors(run) != _tensors(saved):
        report.failures.append("the repaired checkpoint did not load as it was saved")
    return report


def _tensors(run: Run) -> list[list[float]]:
    values = [*run.model.parameters(), *run.model.buffers()]
    values += [v for p in run.model.parameters() for v in run.optimizer.state[p].values()]
    return [value.detach().flatten().tolist() for value in values]


def _check(reports: list[Report], count: int) -> None:
    for report in reports:
        assert report.failures == []
        assert report.tried.total() == count
    print(f"{count} of {count} found on {len(reports)} rank(s):", dict(reports[0].tried))


@pytest.mark.parametrize("files", ["shared", "parts", "several"])
def test_damage_is_found_before_anything_changes(tmp_path: Path, files: str) -> None:
    _check(ranks.run(_campaign, 1, tmp_path, files, 7, 30, timeout_s=120), 30)


@pytest.mark.parametrize("files", ["shared", "parts"])
def test_damage_is_found_on_all_ranks_before_anything_changes_on_any(tmp_path: Path, files: str) -> None:
    _check(ranks.run(_campaign, 2, tmp_path, files, 11, 15, timeout_s=120), 15)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("files", ["shared", "parts", "several"])
def test_one_thousand_damages_are_all_found_before_anything_changes(tmp_path: Path, files: str) -> None:
    _check(ranks.run(_campaign, 1, tmp_path, files, 1234, 1000, timeout_s=1100), 1000)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("files", ["shared", "parts"])
def test_two_hundred_damages_are_all_found_on_both_ranks(tmp_path: Path, files: str) -> None:
    _check(ranks.run(_campaign, 2, tmp_path, files, 4321, 200, timeout_s=1100), 200)


def _unchecked_campaign(root: Path) -> Report:
    """The same campaign against a load that does not look at checksums."""
    from fullshard.checkpoint.loading import reading

    checked, reading.Blocks._fill_checked = reading.Blocks._fill_checked, reading.Blocks._fill
    try:
        return _campaign(root, "shared", 7, 30)
    finally:
        reading.Blocks._fill_checked = checked


def test_campaign_notices_a_load_that_does_not_check_blocks(tmp_path: Path) -> None:
    (report,) = ranks.run(_unchecked_campaign, 1, tmp_path, timeout_s=120)
    text = "\n".join(report.failures)
    assert "loaded" in text
    assert "something changed" in text
    assert "flip_one_bit of ['model.safetensors']" in text


# --- one rank alone ------------------------------------------------------------------------------------


def _damage_for_one(root: Path, files: str) -> dict[str, tuple[str, bool]]:
    """What both ranks say to damage in the part of a file that only the second one reads."""
    from fullshard.checkpoint.loading import reading

    Run.trained(1, 1024, 1).save(root / "sound", files, 1)
    run, found = Run.trained(2, 1024, 1), {}
    before = run.digest()
    # One weight of 4 MiB: its second half is the second rank's, by whole blocks from the fourth MiB on.
    file = "model.safetensors" if files == "shared" else "part-00001.safetensors"
    path = root / "sound" / file
    sound = path.read_bytes()
    dist.barrier()
    if my_rank() == 0:
        damaged = bytearray(sound)
        damaged[7 * MIB // 2] ^= 4
        path.write_bytes(damaged)
    dist.barrier()
    found["a bit"] = _try_to_load(run, root / "sound"), run.digest() == before
    dist.barrier()
    if my_rank() == 0:
        path.write_bytes(sound)
    dist.barrier()

    def broken(_self: Any, _descriptor: int, _begin: int, _out: memoryview) -> None:
        raise OSError(5, "Input/output error")

    read, reading.Blocks._read = reading.Blocks._read, broken if my_rank() == 1 else reading.Blocks._read
    try:
        found["a broken disk"] = _try_to_load(run, root / "sound"), run.digest() == before
    finally:
        reading.Blocks._read = read
    found["nothing"] = _try_to_load(run, root / "sound"), run.digest() == before
    return found


@pytest.mark.parametrize("files", ["shared", "parts"])
def test_damage_that_one_rank_sees_is_raised_on_all_and_changes_nothing(tmp_path: Path, files: str) -> None:
    first, second = ranks.run(_damage_for_one, 2, tmp_path, files, timeout_s=60)
    for what in ("a bit", "a broken disk"):
        assert first[what][1], f"{what}: rank 0 has changed"
        assert second[what][1], f"{what}: rank 1 has changed"
        assert first[what][0].startswith("CheckpointError: rank 0: rank 1 reports:"), first[what]
        assert second[what][0].startswith("CheckpointError: rank 1: "), second[what]
        assert ".safetensors" in second[what][0]
    assert "Input/output error" in second["a broken disk"][0]
    assert first["nothing"] == second["nothing"] == ("", False)


# --- without the optimizer -----------------------------------------------------------------------------


def _without_optimizer(root: Path) -> dict[str, str]:
    import fullshard as fs

    saved = Run.trained(1)
    saved.save(root / "sound", "shared", 1)
    path = root / "sound" / "optimizer.safetensors"
    sound, found = path.read_bytes(), {}
    ways: dict[str, Callable[[], Any]] = {
        "a bit of its data": lambda: path.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1])),
        "its header": lambda: path.write_bytes(b"x" * 100 + sound[100:]),
        "cut short": lambda: path.write_bytes(sound[:1000]),
        "a folder": lambda: (path.unlink(), path.mkdir()),
        "gone": path.rmdir,
    }
    for way, damage in ways.items():
        damage()
        run = Run.trained(2)
        state = [v.clone() for s in run.optimizer.state.values() for v in s.values()]
        fs.load(root / "sound", run.model)
        same = all(map(torch.equal, run.model.parameters(), saved.model.parameters()))
        left = [v for s in run.optimizer.state.values() for v in s.values()]
        assert all(map(torch.equal, left, state)), f"{way}: a load without the optimizer changed it"
        found[way] = "" if same else "other values"
        found[f"{way}, with it"] = _try_to_load(run, root / "sound")
    return found


def test_damaged_optimizer_file_is_no_matter_to_a_load_without_the_optimizer(tmp_path: Path) -> None:
    (found,) = ranks.run(_without_optimizer, 1, tmp_path, timeout_s=60)
    for way, answer in found.items():
        if way.endswith("with it"):
            assert answer.startswith("CheckpointError"), way
            assert "optimizer.safetensors" in answer, way
        else:
            assert answer == "", way


# --- little memory -------------------------------------------------------------------------------------


def _counted(root: Path) -> dict[str, Any]:
    """Loads, and counts how often each byte was read."""
    from fullshard.checkpoint.loading import reading

    saved = Run.trained(1)
    saved.save(root / "sound", "shared", 1)
    run, read_bytes = Run.trained(2), 0
    before = run.digest()

    def counting(self: Any, descriptor: int, begin: int, out: memoryview) -> None:
        nonlocal read_bytes
        read_bytes += len(out)
        read(self, descriptor, begin, out)

    path = root / "sound" / "model.safetensors"
    sound = path.read_bytes()
    read, reading.Blocks._read = reading.Blocks._read, counting
    try:
        path.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
        damaged = _try_to_load(run, root / "sound"), run.digest() == before
        path.write_bytes(sound)
        read_bytes = 0
        sound_answer = _try_to_load(run, root / "sound"), _tensors(run) == _tensors(saved)
        total = sum(p.stat().st_size for p in (root / "sound").glob("*.safetensors"))
        return {"damaged": damaged, "sound": sound_answer, "times read": read_bytes / total}
    finally:
        reading.Blocks._read = read


def test_load_checks_all_before_it_changes_anything_and_reads_it_about_twice(tmp_path: Path) -> None:
    (found,) = ranks.run(_counted, 1, tmp_path, timeout_s=60)
    answer, unchanged = found["damaged"]
    assert answer.startswith("CheckpointError")
    assert "model.safetensors" in answer
    assert unchanged
    assert found["sound"] == ("", True)
    assert 1.9 <= found["times read"] <= 3.0


def _changed_meanwhile(root: Path) -> str:
    """A file is overwritten between the check and the second read."""
    from fullshard.checkpoint import load

    Run.trained(1).save(root / "sound", "shared", 1)
    run, path = Run.trained(2), root / "sound" / "model.safetensors"
    apply = load.apply

    def damage_first(*args: Any) -> None:
        data = path.read_bytes()
        path.write_bytes(data[: -MIB // 2] + bytes(MIB // 2))
        apply(*args)

    load.apply = damage_first
    try:
        return _try_to_load(run, root / "sound")
    finally:
        load.apply = apply


def test_file_that_is_overwritten_during_a_load_is_found(tmp_path: Path) -> None:
    (answer,) = ranks.run(_changed_meanwhile, 1, tmp_path, timeout_s=60)
    assert answer.startswith("CheckpointError")
    assert "partly loaded" in answer
    assert "model.safetensors" in answer
