"""`fullshard inspect`: what a checkpoint is and holds, without reading its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fullshard.checkpoint import commit
from fullshard.checkpoint.format import manifest
from fullshard.checkpoint.format.headers import parse_json
from fullshard.checkpoint.format.manifest import Manifest
from fullshard.checkpoint.opening import open_checkpoint
from fullshard.checkpoint.reading import Source, Stored
from fullshard.checkpoint.tools.commands import (
    Damaged,
    Report,
    as_damage,
    checkpoints_in,
    file_problems,
    folder_files,
    hidden_folders,
    identify,
    is_whole,
    open_foreign,
    read_manifest,
    size_of,
    strangers,
)
from fullshard.checkpoint.tools.wording import as_bytes_text, as_time, listed, plain, plural, printable, shown
from fullshard.errors import CheckpointError

_SHOWN_FILES = 24


def inspect(path: Path, tensors: bool = False) -> Report:
    """What is at a path. `tensors` adds every tensor with its dtype and shape."""
    subject = identify(path)
    if subject.kind == "root":
        return _root(subject.folder)
    if subject.kind == "unfinished":
        return _unfinished(subject.folder)
    if subject.kind == "checkpoint":
        return _checkpoint(subject.folder, path, tensors)
    return _foreign(subject.folder, subject.kind, tensors)


# ---- a checkpoint of ours


def _checkpoint(folder: Path, asked: Path, tensors: bool) -> Report:
    said = read_manifest(folder)
    problems = [f"{name} {what}" for name, what in file_problems(folder, said).items()]
    data: dict[str, Any] = {
        "kind": "checkpoint",
        "path": str(folder),
        "id": said.id,
        "saved_at": as_time(said.saved_at_ns),
        "saved_at_ns": said.saved_at_ns,
        "software": dict(said.software),
        "layout": dict(said.layout),
        "files": {name: record.size_bytes for name, record in said.files.items()},
        "manifest_bytes": size_of(folder / manifest.NAME) or 0,
        "not_in_manifest": strangers(folder, said),
        "model": {"tensors": said.model.tensors, "elements": said.model.elements},
        "optimizer": _optimizer(said),
        "tied": dict(said.tied),
        "modules_with_state": sorted(said.modules),
        "extra": {name: plain(tree) for name, tree in said.extra.items()},
        "by_rank": _by_rank(said),
        "problems": problems,
    }
    if not problems:
        try:
            source = open_checkpoint(folder)
        except CheckpointError as error:
            if not isinstance(as_damage(error), Damaged):
                raise
            problems.append(error.what)
        else:
            _add_tensors(data, source, tensors)
            source.close()
    if folder != asked and folder.name != asked.name:
        data["note"] = "a crash left it under this hidden name; the next save puts it in its place"
    return Report(tuple(_checkpoint_lines(data)), data, bool(problems))


def _optimizer(said: Manifest) -> dict[str, Any] | None:
    state = said.optimizer_state
    if state is None:
        return None
    found: dict[str, Any] = {"tensors": said.optimizer.tensors, "elements": said.optimizer.elements}
    try:
        found["class"] = str(state["class"])
        found["groups"] = [
            {"parameters": len(g["parameters"]), "options": {k: plain(v) for k, v in g["options"].items()}}
            for g in state["groups"]
        ]
        found["state"] = sorted({str(key) for by in state["state"].values() for key in by})
    except (KeyError, TypeError, AttributeError):
        found["class"] = "malformed"
    return found


def _by_rank(said: Manifest) -> dict[str, Any]:
    """What differs between the ranks that saved."""

    def trees(kind: str) -> tuple[list[dict[str, Any]], list[str]]:
        found = [rank.get(kind) for rank in said.ranks]
        each = [tree if isinstance(tree, dict) else {} for tree in found]
        return each, sorted({name for tree in each for name in tree})

    (extra, extra_names), (own, own_names) = trees("extra"), trees("values")
    return {
        "extra": {
            name: [plain(tree[name]) if name in tree else "not there" for tree in extra]
            for name in extra_names
        },
        "values": {name: [rank for rank, tree in enumerate(own) if name in tree] for name in own_names},
        "optimizer": trees("optimizer")[1],
        "random": trees("random")[1],
    }


def _add_tensors(data: dict[str, Any], source: Source, tensors: bool) -> None:
    kinds = {"model": source.model, "optimizer": source.optimizer}
    for kind, stored in kinds.items():
        if data.get(kind) is None:
            if not stored:
                continue
            data[kind] = {}
        elements: dict[str, int] = {}
        for one in stored.values():
            name = _dtype(one)
            elements[name] = elements.get(name, 0) + one.tensor.num_elements
        data[kind] |= {"tensors": len(stored), "elements": sum(elements.values()), "dtypes": elements}
    if tensors:
        data["tensors"] = [
            {"kind": kind, "name": name, "dtype": _dtype(one), "shape": list(one.tensor.shape)}
            for kind, stored in kinds.items()
            for name, one in stored.items()
        ]


def _dtype(stored: Stored) -> str:
    return str(stored.tensor.dtype).removeprefix("torch.")


def _checkpoint_lines(data: dict[str, Any]) -> list[str]:
    layout, software = data["layout"], data["software"]
    exported = layout.get("exported_from")
    what = "a model exported from a checkpoint of fullshard" if exported else "a checkpoint of fullshard"
    rows = [("saved", f"{data['saved_at']} by {', '.join(f'{k} {v}' for k, v in software.items())}")]
    if exported:
        rows.append(("from", f"checkpoint {exported}"))
    else:
        rows.append(
            (
                "ranks",
                f"{layout.get('ranks')}, strategy {layout.get('strategy')}, {layout.get('files')} files",
            )
        )
    if "note" in data:
        rows.append(("note", data["note"]))
    rows += _tensor_rows(data)
    rows += [("tied", f"{other!r} is {name!r}") for other, name in data["tied"].items()]
    if data["modules_with_state"]:
        rows.append(("modules", f"with state of their own: {listed(data['modules_with_state'])}"))
    rows += [("extra", f"{name}: {shown(value)}") for name, value in data["extra"].items()]
    rows += _rank_rows(data["by_rank"])
    rows += _file_rows(data["files"] | {manifest.NAME: data["manifest_bytes"]})
    if data["not_in_manifest"]:
        rows.append(("beside", f"not in the manifest: {listed(data['not_in_manifest'])}"))
    rows += [("DAMAGED", problem) for problem in data["problems"]]
    return [f"{printable(data['path'])}: {what}", *_aligned(rows), *_tensor_lines(data)]


def _tensor_rows(data: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [("model", _counted(data["model"]))]
    state = data.get("optimizer")
    if not state:
        return rows
    rows.append(("optimizer", ", ".join(filter(None, (state.get("class"), _counted(state))))))
    for index, group in enumerate(state.get("groups", ())):
        options = sorted(group["options"].items(), key=lambda option: option[0] != "lr")
        said = ", ".join(f"{k} {shown(v)}" for k, v in options if v is not None and v is not False)
        rows.append(("", f"group {index} of {plural(group['parameters'], 'parameter')}: {said}"))
    if state.get("state"):
        rows.append(("", f"state {', '.join(state['state'])}"))
    return rows


def _counted(said: Mapping[str, Any]) -> str:
    dtypes = said.get("dtypes", {})
    more = ", ".join(f"{name} {count:,}" if len(dtypes) > 1 else name for name, count in dtypes.items())
    text = f"{plural(said['tensors'], 'tensor')}, {plural(said['elements'], 'element')}"
    return f"{text} ({more})" if more else text


def _rank_rows(by_rank: dict[str, Any]) -> list[tuple[str, str]]:
    rows = []
    for name, each in by_rank["extra"].items():
        more = ", ..." if len(each) > 4 else ""
        rows.append(("by rank", f"extra {name}: {', '.join(shown(v) for v in each[:4])}{more}"))
    for name, own in by_rank["values"].items():
        which = ", ".join(map(str, own[:8])) + (", ..." if len(own) > 8 else "")
        rows.append(("by rank", f"{name!r} is not the first rank's on {which}"))
    if by_rank["optimizer"]:
        rows.append(("by rank", f"optimizer state in blocks: {listed(by_rank['optimizer'])}"))
    if by_rank["random"]:
        rows.append(("by rank", f"random numbers: {', '.join(by_rank['random'])}"))
    return rows


def _file_rows(files: dict[str, int]) -> list[tuple[str, str]]:
    rows = [("files", f"{as_bytes_text(sum(files.values()))} in {plural(len(files), 'file')}")]
    shown = list(files.items())[:_SHOWN_FILES]
    width = max((len(name) for name, _ in shown), default=0)
    rows += [("", f"{name:<{width}}  {as_bytes_text(size):>9}") for name, size in shown]
    if len(files) > len(shown):
        rows.append(("", f"and {len(files) - len(shown)} more; --json lists them all"))
    return rows


def _tensor_lines(data: dict[str, Any]) -> list[str]:
    if "tensors" not in data:
        return []
    width = max((len(printable(one["name"])) for one in data["tensors"]), default=0)
    lines = []
    for kind in ("model", "optimizer"):
        own = [one for one in data["tensors"] if one["kind"] == kind]
        if own:
            lines += ["", f"tensors of the {kind}"]
        lines += [f"  {printable(one['name']):<{width}}  {one['dtype']} {one['shape']}" for one in own]
    return lines


def _aligned(rows: list[tuple[str, str]]) -> list[str]:
    lines, before = [], ""
    for label, text in rows:
        shown = "" if label == before and label != "DAMAGED" else label
        lines.append(f"  {shown:<9}  {printable(text)}")
        before = label or before
    return lines


# ---- a folder of checkpoints, and one that never became one


def _root(root: Path) -> Report:
    hidden = {folder: (name, kind) for folder, name, kind in hidden_folders(root)}
    found = [
        _listed(folder, hidden[folder][1] if folder in hidden else None) for folder in checkpoints_in(root)
    ]
    # The newest as fs.latest has it: complete, no exported model, nothing that is about to be removed.
    stale = {folder.name for folder, (name, _) in hidden.items() if commit.find(root / name) != folder}
    usable = [o for o in found if o["state"] == "complete" and not o["exported"] and o["name"] not in stale]
    newest = max(usable, key=lambda one: one["saved_at_ns"], default=None)
    for one in found:
        one["newest"] = one is newest
    found.sort(key=lambda one: (one["saved_at_ns"] or 0, one["name"]))
    lines = [f"{printable(str(root))}: {plural(sum(o['state'] == 'complete' for o in found), 'checkpoint')}"]
    width = max(len(printable(one["name"])) for one in found)
    for one in found:
        step = "" if one["step"] is None else f"step {one['step']}"
        ranks = "" if one["ranks"] is None else plural(one["ranks"], "rank")
        state = f"{one['state']}, newest" if one["newest"] else one["state"]
        state += f": {one['note']}" if one["note"] else ""
        lines.append(
            f"  {printable(one['name']):<{width}}  {step:<12}  {one['saved_at'] or '':<23}  "
            f"{as_bytes_text(one['bytes']):>9}  {ranks:<9}  {printable(state)}"
        )
    data = {"kind": "root", "path": str(root), "checkpoints": found}
    return Report(tuple(lines), data, any(one["state"] == "damaged" for one in found))


def _listed(folder: Path, hidden: str | None) -> dict[str, Any]:
    size = sum(folder_files(folder).values())
    one: dict[str, Any] = {
        "name": folder.name, "path": str(folder), "state": "complete", "step": None, "saved_at": None,
        "saved_at_ns": None, "bytes": size, "ranks": None, "exported": False, "note": "",
    }  # fmt: skip
    if hidden is not None and not is_whole(folder):
        return one | {"state": "unfinished", "note": "a save under way, or one that was cut off"}
    try:
        said = read_manifest(folder)
    except CheckpointError as error:
        return one | {"state": "damaged", "note": error.what}
    step, ranks = said.extra.get("step"), said.layout.get("ranks")
    one |= {
        "step": step if isinstance(step, int) else None,
        "saved_at": as_time(said.saved_at_ns),
        "saved_at_ns": said.saved_at_ns,
        "ranks": ranks if isinstance(ranks, int) else None,
        "exported": "exported_from" in said.layout,
    }
    problems = [f"{name} {what}" for name, what in file_problems(folder, said).items()]
    if problems:
        one |= {"state": "damaged", "note": problems[0]}
    elif hidden is not None:
        one["note"] = "replaced, about to be removed" if hidden == "retired" else "about to be renamed"
    elif one["exported"]:
        one["note"] = "an exported model"
    return one


def _unfinished(folder: Path) -> Report:
    files = folder_files(folder)
    data = {"kind": "unfinished", "path": str(folder), "files": files}
    rows = [("", "It has no manifest: a save under way, or one that was cut off. It cannot be loaded.")]
    lines = [f"{printable(str(folder))}: a save that was not finished", *_aligned(rows + _file_rows(files))]
    return Report(tuple(lines), data, True)


# ---- checkpoints of others


def _foreign(folder: Path, kind: str, tensors: bool) -> Report:
    source = open_foreign(folder, kind)
    try:
        names = {"model": "a Hugging Face model", "dcp": "a folder of torch.distributed.checkpoint"}
        data: dict[str, Any] = {"kind": kind, "path": str(folder), "files": folder_files(folder), "model": {}}
        _add_tensors(data, source, tensors)
    finally:
        source.close()
    rows = _tensor_rows(data)
    if kind == "model":
        data["architectures"] = _architectures(folder)
        if data["architectures"]:
            rows.insert(0, ("class", ", ".join(data["architectures"])))
    lines = [f"{printable(str(folder))}: {names[kind]}", *_aligned(rows + _file_rows(data["files"]))]
    return Report((*lines, *_tensor_lines(data)), data)


def _architectures(folder: Path) -> list[str]:
    path = folder / "config.json"
    if not path.is_file() or path.stat().st_size > 2**20:
        return []
    said = parse_json(str(path), path.read_bytes())
    named = said.get("architectures") if isinstance(said, dict) else None
    return [str(name) for name in named] if isinstance(named, list) else []
