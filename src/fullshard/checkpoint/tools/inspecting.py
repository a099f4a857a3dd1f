"""`fullshard inspect`: what a checkpoint is and holds, without reading its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fullshard.checkpoint import commit
from fullshard.checkpoint.format import manifest
from fullshard.checkpoint.format.budget import read_json
from fullshard.checkpoint.format.manifest import Count, Manifest
from fullshard.checkpoint.loading.opening import open_checkpoint
from fullshard.checkpoint.loading.planning import listed
from fullshard.checkpoint.loading.reading import Source, Stored
from fullshard.checkpoint.tools import paths
from fullshard.checkpoint.tools.previews import preview, preview_text
from fullshard.checkpoint.tools.report import Field, Report, as_bytes_text, columns, labelled, lines, plural
from fullshard.errors import CheckpointError, DamagedCheckpoint

_LISTED_FILES = 24
_FOREIGN = {"model": "a Hugging Face model", "dcp": "a folder of torch.distributed.checkpoint"}


def inspect(path: Path, tensors: bool = False) -> Report:
    """What is at a path. `tensors` adds every tensor with its dtype and shape."""
    subject = paths.identify(path)
    if subject.kind == "root":
        return _root(subject.folder)
    if subject.kind == "unfinished":
        return _unfinished(subject.folder)
    if subject.kind == "checkpoint":
        return _checkpoint(subject.folder, path, tensors)
    return _foreign(subject, tensors)


# ---- a checkpoint of fullshard


def _checkpoint(folder: Path, requested: Path, tensors: bool) -> Report:
    saved = commit.read_manifest(folder)
    problems = paths.file_problems(folder, saved)
    source: Source | None = None
    if not problems:
        try:
            source = open_checkpoint(folder)
        except DamagedCheckpoint as error:
            problems.append(error.what)
    exported = saved.layout.get("exported_from")
    what = "a model exported from a checkpoint of fullshard" if exported else "a checkpoint of fullshard"
    fields = [
        Field("kind", "checkpoint"),
        Field("id", saved.id),
        *_origin_fields(saved),
        *_crash_note(folder, requested),
        _count_field("model", _counts(saved.model, source.model if source else None)),
        _count_field("optimizer", _optimizer(saved, source)),
        Field("tied", dict(saved.tied), labelled("tied", (f"{a!r} is {b!r}" for a, b in saved.tied.items()))),
        _list_field("modules_with_state", sorted(saved.modules), "modules", "with state of their own"),
        _extra_field(saved),
        _by_rank_field(saved),
        *_file_fields(
            {name: record.size_bytes for name, record in saved.files.items()},
            {manifest.NAME: paths.size_of(folder / manifest.NAME) or 0},
        ),
        _list_field("not_in_manifest", paths.not_in_manifest(folder, saved), "beside", "not in the manifest"),
        Field("problems", problems, labelled("DAMAGED", problems)),
    ]
    if source is not None:
        fields += _tensor_fields(source) if tensors else []
        source.close()
    return Report(str(folder), what, tuple(fields), bool(problems))


def _origin_fields(saved: Manifest) -> list[Field]:
    layout, time = dict(saved.layout), _as_time(saved.saved_at_ns)
    software = ", ".join(f"{name} {version}" for name, version in saved.software.items())
    row = ("ranks", f"{layout.get('ranks')}, strategy {layout.get('strategy')}, {layout.get('files')} files")
    if layout.get("exported_from"):
        row = ("from", f"checkpoint {layout['exported_from']}")
    return [
        Field("saved_at", time, (("saved", f"{time} by {software}"),)),
        Field("saved_at_ns", saved.saved_at_ns),
        Field("software", dict(saved.software)),
        Field("layout", layout, (row,)),
    ]


def _as_time(saved_at_ns: int) -> str:
    return datetime.fromtimestamp(saved_at_ns // 10**9, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _crash_note(folder: Path, requested: Path) -> list[Field]:
    if folder == requested or folder.name == requested.name:
        return []
    note = "a crash left it under this hidden name; the next save renames it"
    return [Field("note", note, (("note", note),))]


def _counts(count: Count | None, stored: Mapping[str, Stored] | None) -> dict[str, Any]:
    """How many tensors and elements; from the files, if they could be opened, also by dtype."""
    if stored is None:
        return {} if count is None else {"tensors": count.tensors, "elements": count.elements}
    dtypes: dict[str, int] = {}
    for one in stored.values():
        dtypes[_dtype(one)] = dtypes.get(_dtype(one), 0) + one.tensor.num_elements
    return {"tensors": len(stored), "elements": sum(dtypes.values()), "dtypes": dtypes}


def _dtype(stored: Stored) -> str:
    return str(stored.tensor.dtype).removeprefix("torch.")


def _optimizer(saved: Manifest, source: Source | None) -> dict[str, Any] | None:
    state = saved.optimizer_state
    if state is None:
        return None
    counts = _counts(saved.optimizer, source.optimizer if source else None)
    try:
        groups = [
            {"parameters": len(g["parameters"]), "options": {k: preview(v) for k, v in g["options"].items()}}
            for g in state["groups"]
        ]
        keys = sorted({str(key) for by in state["state"].values() for key in by})
        return counts | {"class": str(state["class"]), "groups": groups, "state": keys}
    except (KeyError, TypeError, AttributeError):
        return counts | {"class": "malformed"}


def _count_field(kind: str, value: dict[str, Any] | None) -> Field:
    if value is None:
        return Field(kind)
    dtypes = value.get("dtypes", {})
    by_dtype = ", ".join(f"{name} {count:,}" if len(dtypes) > 1 else name for name, count in dtypes.items())
    text = f"{plural(value['tensors'], 'tensor')}, {plural(value['elements'], 'element')}"
    texts = [", ".join(filter(None, (value.get("class"), f"{text} ({by_dtype})" if by_dtype else text)))]
    for index, group in enumerate(value.get("groups", ())):
        options = sorted(group["options"].items(), key=lambda option: option[0] != "lr")
        set_options = [f"{k} {preview_text(v)}" for k, v in options if v is not None and v is not False]
        members = plural(group["parameters"], "parameter")
        texts.append(f"group {index} of {members}: {', '.join(set_options)}")
    if value.get("state"):
        texts.append(f"state {', '.join(value['state'])}")
    return Field(kind, value, labelled(kind, texts))


def _list_field(name: str, names: list[str], label: str, what: str) -> Field:
    return Field(name, names, ((label, f"{what}: {listed(names)}"),) if names else ())


def _extra_field(saved: Manifest) -> Field:
    values = {name: preview(tree) for name, tree in saved.extra.items()}
    return Field(
        "extra", values, labelled("extra", (f"{name}: {preview_text(v)}" for name, v in values.items()))
    )


def _by_rank_field(saved: Manifest) -> Field:
    """What differs between the ranks that saved."""

    def trees(kind: str) -> tuple[list[dict[str, Any]], list[str]]:
        of_ranks = [tree if isinstance(tree := rank.get(kind), dict) else {} for rank in saved.ranks]
        return of_ranks, sorted({name for tree in of_ranks for name in tree})

    (extra, extra_names), (own, own_names) = trees("extra"), trees("values")
    value: dict[str, Any] = {
        "extra": {n: [preview(tree[n]) if n in tree else "not there" for tree in extra] for n in extra_names},
        "values": {name: [rank for rank, tree in enumerate(own) if name in tree] for name in own_names},
        "optimizer": trees("optimizer")[1],
        "random": trees("random")[1],
    }
    texts = [
        f"extra {name}: {_first(map(preview_text, of), len(of), 4)}" for name, of in value["extra"].items()
    ]
    texts += [
        f"{name!r} is not the first rank's on {_first(map(str, ranks), len(ranks), 8)}"
        for name, ranks in value["values"].items()
    ]
    if value["optimizer"]:
        texts.append(f"optimizer state in blocks: {listed(value['optimizer'])}")
    if value["random"]:
        texts.append(f"random numbers: {', '.join(value['random'])}")
    return Field("by_rank", value, labelled("by rank", texts))


def _first(texts: Any, count: int, most: int) -> str:
    return ", ".join(list(texts)[:most] + ["..."] * (count > most))


def _file_fields(files: dict[str, int], beside: dict[str, int] | None = None) -> list[Field]:
    """The files with their sizes; `beside` is the manifest, which has a field of its own."""
    every = files | (beside or {})
    cells = [(name, as_bytes_text(size)) for name, size in list(every.items())[:_LISTED_FILES]]
    texts = [f"{as_bytes_text(sum(every.values()))} in {plural(len(every), 'file')}", *columns(cells, (1,))]
    if len(every) > len(cells):
        texts.append(f"and {len(every) - len(cells)} more; --json lists them all")
    fields = [Field("files", files, labelled("files", texts))]
    return fields if beside is None else [*fields, Field("manifest_bytes", sum(beside.values()))]


def _tensor_fields(source: Source) -> list[Field]:
    kinds = {"model": source.model, "optimizer": source.optimizer}
    entries: list[dict[str, Any]] = [
        {"kind": kind, "name": name, "dtype": _dtype(one), "shape": list(one.tensor.shape)}
        for kind, stored in kinds.items()
        for name, one in stored.items()
    ]
    texts = columns([(e["name"], f"{e['dtype']} {e['shape']}") for e in entries])
    split = len(source.model)
    return [
        Field("tensors", entries, lines(texts[:split]), "tensors of the model"),
        Field("", None, lines(texts[split:]), "tensors of the optimizer", in_json=False),
    ]


# ---- a folder of checkpoints, and an unfinished save


def _root(root: Path) -> Report:
    hidden = {folder: (name, kind) for folder, name, kind in paths.hidden_folders(root)}
    entries = [_entry(folder, hidden.get(folder, ("", None))[1]) for folder in paths.checkpoints_in(root)]
    # The newest as in fs.latest: complete, not an exported model, not about to be removed.
    stale = {folder.name for folder, (name, _) in hidden.items() if commit.find(root / name) != folder}
    usable = [e for e in entries if e["state"] == "complete" and not e["exported"] and e["name"] not in stale]
    newest = max(usable, key=lambda entry: entry["saved_at_ns"], default=None)
    entries = [entry | {"newest": entry is newest} for entry in entries]
    entries.sort(key=lambda entry: (entry["saved_at_ns"] or 0, entry["name"]))
    count = sum(entry["state"] == "complete" for entry in entries)
    texts = columns([_entry_cells(entry) for entry in entries], right=(3,))
    fields = Field("kind", "root"), Field("checkpoints", entries, lines(texts))
    damaged = any(entry["state"] == "damaged" for entry in entries)
    return Report(str(root), plural(count, "checkpoint"), fields, damaged)


def _entry_cells(entry: dict[str, Any]) -> tuple[str, ...]:
    state = f"{entry['state']}, newest" if entry["newest"] else entry["state"]
    return (
        entry["name"],
        "" if entry["step"] is None else f"step {entry['step']}",
        entry["saved_at"] or "",
        as_bytes_text(entry["bytes"]),
        "" if entry["ranks"] is None else plural(entry["ranks"], "rank"),
        f"{state}: {entry['note']}" if entry["note"] else state,
    )


def _entry(folder: Path, hidden: str | None) -> dict[str, Any]:
    """A checkpoint in a folder of checkpoints; `hidden` is the kind of its hidden name."""
    size = sum(paths.folder_files(folder).values())
    entry: dict[str, Any] = {
        "name": folder.name, "path": str(folder), "state": "complete", "step": None, "saved_at": None,
        "saved_at_ns": None, "bytes": size, "ranks": None, "exported": False, "note": "",
    }  # fmt: skip
    if hidden is not None and not paths.has_manifest(folder):
        return entry | {"state": "unfinished", "note": "a save in progress, or one that was interrupted"}
    try:
        saved = commit.read_manifest(folder)
    except CheckpointError as error:
        return entry | {"state": "damaged", "note": error.what}
    step, ranks = saved.extra.get("step"), saved.layout.get("ranks")
    entry |= {
        "step": step if isinstance(step, int) else None,
        "saved_at": _as_time(saved.saved_at_ns),
        "saved_at_ns": saved.saved_at_ns,
        "ranks": ranks if isinstance(ranks, int) else None,
        "exported": "exported_from" in saved.layout,
    }
    problems = paths.file_problems(folder, saved)
    if problems:
        return entry | {"state": "damaged", "note": problems[0]}
    if hidden is not None:
        note = "replaced, about to be removed" if hidden == "retired" else "about to be renamed"
        return entry | {"note": note}
    return entry | ({"note": "an exported model"} if entry["exported"] else {})


def _unfinished(folder: Path) -> Report:
    why = "It has no manifest: a save in progress, or one that was interrupted. It cannot be loaded."
    fields = Field("kind", "unfinished", (("", why),)), *_file_fields(paths.folder_files(folder))
    return Report(str(folder), "a save that was not finished", fields, True)


# ---- checkpoints of other libraries


def _foreign(subject: paths.Subject, tensors: bool) -> Report:
    source = paths.open_foreign(subject)
    try:
        fields = [Field("kind", subject.kind)]
        if subject.kind == "model":
            names = _architectures(subject.folder)
            fields.append(Field("architectures", names, (("class", ", ".join(names)),) if names else ()))
        fields.append(_count_field("model", _counts(None, source.model)))
        if source.optimizer:
            fields.append(_count_field("optimizer", _counts(None, source.optimizer)))
        fields += _file_fields(paths.folder_files(subject.folder))
        fields += _tensor_fields(source) if tensors else []
    finally:
        source.close()
    return Report(str(subject.folder), _FOREIGN[subject.kind], tuple(fields))


def _architectures(folder: Path) -> list[str]:
    path = folder / "config.json"
    if not path.is_file():
        return []
    config = read_json(path)
    names = config.get("architectures") if isinstance(config, dict) else None
    return [str(name) for name in names] if isinstance(names, list) else []
