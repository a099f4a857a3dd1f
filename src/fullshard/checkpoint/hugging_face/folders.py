"""Hugging Face models: safetensors files and an index, read straight into shards.

The files may use other names than the model, and hold other tensors: one per expert, where the model has
one for all experts. For a transformers model, transformers' own table of conversions gives the mapping.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from fullshard.checkpoint.files import unreadable
from fullshard.checkpoint.format.budget import read_json
from fullshard.checkpoint.format.headers import natural_order
from fullshard.checkpoint.format.manifest import NAME, check_file_name
from fullshard.checkpoint.hugging_face.conversions import Rows
from fullshard.checkpoint.loading.reading import Blocks, Foreign, Stored, add_unique, tensors_and_needs
from fullshard.checkpoint.parameters import buffers, canonical, sites, tied_names
from fullshard.comm.groups import as_bytes
from fullshard.engine.runtime import Runtime, runtime_of
from fullshard.errors import CheckpointError, DamagedCheckpoint

_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLED = re.compile(r"pytorch_model(-\d+-of-\d+)?\.bin(\.index\.json)?")
_OURS = re.compile(r"(optimizer|part|rank|extra)(-\d{5})?(-of-\d{5})?\.safetensors")
_UNFINISHED = re.compile(r"\..+\.(saving|retired)-[0-9a-f]{16}")
_BLOCK_BYTES = 2**20
_COMPARED_BYTES = 8 * 2**20  # at a time, of each of two tensors
_AGAIN = "Download or copy it again."
_CONVERT = (
    "Convert it once with transformers: "
    "model_class.from_pretrained(path).save_pretrained(other_path, save_original_format=False)."
)


def is_model(path: Path) -> bool:
    """Whether open_model should open this path, or raise the error about it."""
    if path.is_dir():
        names = [entry.name for entry in path.iterdir()]
        return any(n == _INDEX or n.endswith(".safetensors") or _PICKLED.fullmatch(n) for n in names)
    return path.is_file() and (path.suffix == ".safetensors" or bool(_PICKLED.fullmatch(path.name)))


def open_model(path: Path) -> Pretrained:
    """A folder that `save_pretrained` wrote, or one safetensors file. Only headers are read."""
    try:
        folder, files = (path, _files(path)) if path.is_dir() else (path.parent, _file(path))
    except OSError as error:
        raise unreadable(repr(str(path)), error) from error
    source = Pretrained(path, Blocks(folder, None, _BLOCK_BYTES))
    source.blocks.named = "" if path.is_dir() else path.name
    try:
        for file, expected in files.items():
            if not (folder / file).is_file():
                raise DamagedCheckpoint(f"{str(path)!r} has no {file!r}, which its index names", _AGAIN)
            tensors, needs = tensors_and_needs(source.blocks, file)
            if path.is_dir() and needs == NAME:
                raise _without_manifest(path)
            absent = sorted(expected - set(tensors))
            if absent:
                raise DamagedCheckpoint(
                    f"{file!r} in {str(path)!r} does not hold {absent[0]!r}, which the index lists there",
                    _AGAIN,
                )
            add_unique(source.model, tensors, file)
    except BaseException:
        source.close()
        raise
    return source


def _without_manifest(folder: Path) -> DamagedCheckpoint:
    return DamagedCheckpoint(
        f"{str(folder)!r} holds files of a fullshard checkpoint but no {NAME!r}: the save was not finished, "
        "or the copy is incomplete",
        "Use another checkpoint; fs.latest(root) returns the newest complete one. The path of a "
        "safetensors file loads that file alone, unchecked.",
    )


def _file(path: Path) -> dict[str, set[str]]:
    if _PICKLED.fullmatch(path.name):
        raise _pickled(path)
    return {path.name: set()}


def _files(folder: Path) -> dict[str, set[str]]:
    """The files of a model, and the names that its index lists for each."""
    names = sorted(entry.name for entry in folder.iterdir())
    if any(map(_OURS.fullmatch, names)) or _UNFINISHED.fullmatch(folder.name):
        raise _without_manifest(folder)
    if _FILE in names:
        return {_FILE: set()}
    if _INDEX in names:
        return _indexed(folder / _INDEX)
    if any(map(_PICKLED.fullmatch, names)):
        raise _pickled(folder)
    files = [name for name in names if name.endswith(".safetensors")]
    incomplete = any(name.startswith("model-") for name in files)  # numbered files, and no index
    raise (DamagedCheckpoint if incomplete else CheckpointError)(
        f"{str(folder)!r} has neither {_FILE!r} nor {_INDEX!r}",
        f"Give the path of a file, such as {files[0]!r}.",
    )


def _pickled(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{str(path)!r} stores the model as a pickle, which can run code when it is read",
        "Convert it once with transformers: model_class.from_pretrained(path).save_pretrained(other_path) "
        "writes safetensors (before version 5 with safe_serialization=True).",
    )


def _indexed(index: Path) -> dict[str, set[str]]:
    content = read_json(index)
    where = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(where, dict) or not where:
        raise DamagedCheckpoint(f"{str(index)!r} has no weight_map", _AGAIN)
    files: dict[str, set[str]] = defaultdict(set)
    for name, file in where.items():
        files[check_file_name(file)].add(name)
    return files


class Pretrained(Foreign):
    """A model's safetensors files, with the names of transformers."""

    def fit(self, model: nn.Module, names: set[str]) -> None:
        runtime = runtime_of(model)
        inner, prefix = pretrained_in(model)
        if inner is not None:
            self._refuse_quantized(inner)
            fitting = _Fitting(str(self.folder), inner, _Names.of(runtime, model, inner, prefix))
            self.model = fitting.renamed(self.model)
            self.may_lack = fitting.may_lack()
        for one, other in tied_names(model).items():
            if one in self.model and other in self.model and self.model[one] != self.model[other]:
                self._check_same(runtime, one, other)

    def _refuse_quantized(self, inner: Any) -> None:
        """Quantized codes have the names of weights, and would be loaded as weights."""
        config: Any = None
        with contextlib.suppress(OSError, DamagedCheckpoint):  # a single file has no config
            config = read_json(self.folder / "config.json")
        method = config.get("quantization_config") if isinstance(config, dict) else None
        if method and getattr(inner, "hf_quantizer", None) is None:
            raise CheckpointError(
                f"{str(self.folder)!r} holds quantized weights ({str(method)[:100]})",
                "Load and dequantize it with transformers, and save the result.",
            )

    def _check_same(self, runtime: Runtime, one: str, other: str) -> None:
        """Check that both names of a tied tensor have the same values. Each rank compares a part."""
        a, b = self.model[one], self.model[other]
        rank, ranks = runtime.comm.members.index(runtime.comm.world_rank), runtime.comm.all_ranks
        same = (a.tensor.shape, a.tensor.dtype) == (b.tensor.shape, b.tensor.dtype)
        start, stop = (a.tensor.num_elements * r // ranks for r in (rank, rank + 1))
        step = max(1, _COMPARED_BYTES // a.tensor.dtype.itemsize)
        for at in range(start, stop if same else start, step):
            parts = [torch.empty(min(step, stop - at), dtype=a.tensor.dtype) for _ in (a, b)]
            for stored, part in zip((a, b), parts, strict=True):
                self.read(stored, at, at + part.numel(), part)
            same = same and torch.equal(as_bytes(parts[0]), as_bytes(parts[1]))
        if not same:
            raise CheckpointError(
                f"{one!r} and {other!r} have different values in {str(self.folder)!r}, and are one tensor in "
                "the model",
                "Build the model without tying them, for example with config.tie_word_embeddings = False.",
            )


def pretrained_in(model: nn.Module) -> tuple[Any, str]:
    """The transformers model that this is, or that it has as its only one, and the prefix of its names."""
    kind: Any = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    outermost: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules() if kind is not None else ():
        inside = any(not other or name.startswith(f"{other}.") for other, _ in outermost)
        if isinstance(module, kind) and not inside:
            outermost.append((name, module))
    if len(outermost) != 1:
        return None, ""
    name, module = outermost[0]
    return module, canonical(f"{name}.") if name else ""


@dataclass
class _Names:
    """The model's names as they would be without wrappers and adapters, and their unsharded shapes."""

    here: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))  # by plain name
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)  # by plain name
    all: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, runtime: Runtime, model: nn.Module, inner: Any, prefix: str) -> _Names:
        shapes = {site.name: site.global_shape for site in sites(runtime, model)}
        shapes |= {name: tuple(buffer.shape) for name, buffer in buffers(model).items()}
        tied = tied_names(model).items()
        shapes |= {name: shapes[other] for name, other in tied if other in shapes}
        adapted = hasattr(model, "peft_config") or getattr(inner, "_hf_peft_config_loaded", False)
        names = cls(all=set(shapes))
        for name, shape in shapes.items():
            plain = name.removeprefix(prefix)
            plain = _without_adapters(plain) if adapted else plain
            names.here[plain].append(name)
            names.shapes[plain] = shape
        return names


def _without_adapters(name: str) -> str:
    """The name that a parameter had before peft wrapped its module."""
    return re.sub(r"\.(base_layer|original_module|modules_to_save\.[^.]+)\.", ".", name)


class _Fitting:
    """Finds the model's tensors among those of the files, as transformers' from_pretrained would."""

    def __init__(self, folder: str, inner: Any, names: _Names) -> None:
        self._folder, self._inner, self._names = folder, inner, names
        known = _transforms(inner)
        self._converters = [t for t in known if hasattr(t, "operations")]
        self._renamings = [t for t in known if not hasattr(t, "operations")]
        self._mapping: Mapping[str, str] = getattr(inner, "_checkpoint_conversion_mapping", None) or {}
        self._prefix = f"{prefix}." if (prefix := getattr(inner, "base_model_prefix", "")) else ""
        self._ignored = _any_of(self._unexpected())

    def renamed(self, files: Mapping[str, Stored]) -> dict[str, Stored]:
        """The same tensors, by the model's names for them."""
        by_name: dict[str, Stored] = {}
        unmatched: dict[str, Stored] = {}
        conversions: dict[str, _Conversion] = {}
        # In natural order: converters stack experts in the order in which they are added.
        for key, stored in sorted(files.items(), key=lambda item: natural_order(item[0])):
            name, converter, pattern = self._target(key)
            if key in self._names.all and key not in self._names.here:
                unmatched[key] = stored  # the name already includes wrappers: keep it
            elif name not in self._names.here:
                if not (self._ignored(key) or self._ignored(name)):
                    unmatched[key] = stored
            elif converter is not None:
                made = conversions.setdefault(name, _Conversion(self._folder, name, converter))
                made.parts.append((pattern, key, stored))
            elif name in by_name or (name != key and name in files):
                unmatched[key] = stored  # both the old name and the new one are there
            else:
                by_name[name] = stored
        for conversion in conversions.values():
            add_unique(
                by_name, conversion.run(self._names.shapes, self._inner.config), "the converted tensors"
            )
        here = self._names.here
        return unmatched | {name: stored for n, stored in by_name.items() for name in here.get(n, [n])}

    def may_lack(self) -> frozenset[str]:
        """Names that transformers does not require either: they keep their initial values."""
        patterns = [*(getattr(self._inner, "_keys_to_ignore_on_load_missing", None) or ())]
        patterns += map(re.escape, getattr(self._inner, "_keys_to_ignore_on_save", None) or ())
        optional = _any_of(patterns)
        return frozenset(name for n, names in self._names.here.items() if optional(n) for name in names)

    def _target(self, key: str) -> tuple[str, Any, str]:
        """The model's name for a tensor, and its converter, if any, with the pattern that matched."""
        name = key
        for before, after in self._mapping.items():
            name = re.sub(before, after, name)
        for renaming in self._renamings:
            name = renaming.rename_source_key(name)[0]
        used, pattern = None, None
        for converter in self._converters:
            name, pattern = converter.rename_source_key(name)
            if pattern is not None:
                used = converter
                break
        name, as_it_is = self._with_prefix(name), self._with_prefix(key)
        if name not in self._names.here and as_it_is in self._names.here:
            return as_it_is, None, ""  # it already has the new name
        return name, used, pattern or ""

    def _with_prefix(self, name: str) -> str:
        """The name with or without the prefix of the base model, and with modern names of LayerNorm."""
        for spelling in (name, re.sub(r"LayerNorm\.(gamma|beta)$", _modern, name)):
            changed = spelling.removeprefix(self._prefix)
            for known in (spelling, changed if changed != spelling else self._prefix + spelling):
                if known in self._names.here:
                    return known
        return name

    def _unexpected(self) -> list[str]:
        """Patterns of tensors in old files that models now compute themselves."""
        patterns = [*(getattr(self._inner, "_keys_to_ignore_on_load_unexpected", None) or ())]
        computed = [name for name, _ in self._inner.named_buffers()]
        if any(name.endswith("rotary_emb.inv_freq") for name in computed):
            patterns.append(r"rotary_emb\.inv_freq$")
        if any(name.endswith("position_ids") for name in computed):
            patterns.append(r"(^|\.)position_ids$")
        return patterns


def _transforms(inner: Any) -> list[Any]:
    """The renamings and conversions of transformers for this model; none before its version 5."""
    try:
        known = importlib.import_module("transformers.conversion_mapping")
        return list(known.get_model_conversion_mapping(inner))
    except (ImportError, AttributeError):
        return []


def _any_of(patterns: Iterable[str]) -> Callable[[str], bool]:
    compiled = [re.compile(pattern) for pattern in patterns]
    return lambda name: any(pattern.search(name) for pattern in compiled)


def _modern(match: re.Match[str]) -> str:
    return "LayerNorm." + {"gamma": "weight", "beta": "bias"}[match[1]]


@dataclass
class _Conversion:
    """A converter of transformers, and the stored tensors from which it makes tensors of the model."""

    folder: str
    target: str
    converter: Any
    parts: list[tuple[str, str, Stored]] = field(default_factory=list)  # pattern, name in the files, location

    def run(self, shapes: Mapping[str, tuple[int, ...]], config: Any) -> dict[str, Stored]:
        try:
            rows = Rows([stored for _, _, stored in self.parts])
            labels = {name: SimpleNamespace(shape=torch.Size(rows.labelled(s))) for name, s in shapes.items()}
            stand_in = SimpleNamespace(get_parameter=labels.__getitem__)  # the model's own are sharded
            return rows.follow(lambda labels: self._converted(labels, stand_in, config))
        except Exception as error:  # the converter's own code, on labels
            names = [name for _, name, _ in self.parts]
            more = f" and {len(names) - 2} more" if len(names) > 2 else ""
            raise CheckpointError(
                f"{self.target!r} is stored in {self.folder!r} as {', '.join(map(repr, names[:2]))}{more}, "
                f"which cannot be converted while reading (by {self.converter.operations}): {error}",
                _CONVERT,
            ) from error

    def _converted(self, labels: list[torch.Tensor], model: Any, config: Any) -> Any:
        converter = copy.deepcopy(self.converter)
        for (pattern, name, _), values in zip(self.parts, labels, strict=True):
            converter.add_tensor(self.target, name, pattern, values)
        return converter.convert(self.target, model=model, config=config)
