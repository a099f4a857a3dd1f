"""`fullshard inspect`, `verify` and `export`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fullshard.byte_sizes import parse_size
from fullshard.errors import OptionError
from fullshard.tools.cli.commands import Command
from fullshard.tools.cli.printing import print_report, progress
from fullshard.tools.cli.shared import AsJson

if TYPE_CHECKING:
    from fullshard.onnx.files import Subject

_Path = Annotated[
    Path, typer.Argument(metavar="PATH", help="A folder that fs.save or another library wrote.")
]
_Links = Annotated[bool, typer.Option("--follow-links", help="Read links that lead out of a folder.")]


def _inspect(
    path: _Path,
    tensors: Annotated[
        bool, typer.Option("--tensors", help="List every tensor with its dtype and shape.")
    ] = False,
    follow_links: _Links = False,
    json: AsJson = False,
) -> int:
    from fullshard.checkpoint.files import following_links
    from fullshard.checkpoint.tools.inspecting import inspect

    with following_links(follow_links):
        return print_report(inspect(path, tensors), json)


def _verify(path: _Path, follow_links: _Links = False, json: AsJson = False) -> int:
    from fullshard.checkpoint.files import following_links
    from fullshard.checkpoint.tools.verifying import verify

    with progress("checked") as show, following_links(follow_links):
        report = verify(path, show)
    return print_report(report, json)


def _export(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A folder that fs.save wrote.")],
    to: Annotated[Path | None, typer.Option("--to", metavar="DIR", help="A new folder.")] = None,
    onnx: Annotated[Path | None, typer.Option("--onnx", metavar="FILE", help="A new ONNX file.")] = None,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", metavar="fp32|bf16|fp16", help="Of floating-point tensors (as stored)."),
    ] = None,
    form: Annotated[
        str | None, typer.Option("--format", metavar="safetensors|dcp", help="(safetensors)")
    ] = None,
    file_size: Annotated[
        str | None,
        typer.Option("--file-size", metavar="SIZE", help="Largest size of a safetensors file (5GB)."),
    ] = None,
    no_check: Annotated[
        bool, typer.Option("--no-check", help="Do not compare the ONNX file with torch's logits.")
    ] = False,
    follow_links: _Links = False,
) -> int:
    from fullshard.checkpoint.files import following_links

    if (to is None) == (onnx is None):
        what = "neither --to nor --onnx is given" if to is None else "--to and --onnx are both given"
        raise OptionError(what, "Give --to DIR for a folder of tensors, or --onnx FILE for ONNX.")
    if onnx is not None:
        if dtype or form or file_size:
            raise OptionError("--dtype, --format and --file-size are for --to", "Leave them out with --onnx.")
        with following_links(follow_links):
            return _export_onnx(path, onnx, not no_check)
    if no_check:
        raise OptionError("--no-check is for --onnx", "Leave it out with --to.")
    assert to is not None
    with following_links(follow_links):
        return _export_tensors(path, to, dtype, form, file_size)


def _export_onnx(path: Path, file: Path, check: bool) -> int:
    from fullshard.onnx.files import export_checkpoint
    from fullshard.training.gpt import FILE

    subject = _gpt(path) if (path / FILE).is_file() else None
    print("\n".join(export_checkpoint(path, file, check, subject)))
    return 0


def _gpt(path: Path) -> Subject:
    """The built-in GPT: token ids in, logits out."""
    import torch

    from fullshard.onnx.files import Subject
    from fullshard.training.gpt import GPT, GPTConfig

    config = GPTConfig.read(path)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocabulary, (3, min(13, config.context)), generator=generator)
    return Subject(GPT(config), {"tokens": tokens})


def _export_tensors(path: Path, to: Path, dtype: str | None, form: str | None, file_size: str | None) -> int:
    from fullshard.checkpoint.tools.export import DTYPES, FORMATS, ExportOptions, export

    if dtype is not None and dtype not in DTYPES:
        raise OptionError(f"--dtype is {dtype!r}", f"Choose one of {', '.join(DTYPES)}.")
    if form is not None and form not in FORMATS:
        raise OptionError(f"--format is {form!r}", f"Choose one of {', '.join(FORMATS)}.")
    if form == "dcp" and (dtype or file_size):
        raise OptionError("--dtype and --file-size are for safetensors", "Leave them out with --format dcp.")
    options = ExportOptions(None if dtype is None else DTYPES[dtype], form or "safetensors")
    if file_size is not None:
        remedy = "Write it as 5GB or 500MiB."
        most = parse_size(file_size, "--file-size", remedy)
        if most < 1:
            raise OptionError(f"--file-size is {file_size!r}", remedy)
        options = replace(options, file_bytes=most)
    with progress("exported") as show:
        report = export(path, to, options, show)
    return print_report(report)


INSPECT = Command(
    "inspect",
    _inspect,
    "show what a checkpoint is and holds",
    """\
Only manifest and headers are read, no tensors. PATH may be
  a folder that fs.save wrote  when, by what, on how many ranks; tensors, optimizer,
                               extra values, files
  a folder of such folders     each with its step, time and size; complete or not;
                               the newest is marked
  a Hugging Face model         a folder, or one safetensors file
  a DCP folder                 of torch.distributed.checkpoint""",
    """\
examples:
  fullshard inspect runs/gpt                      list the checkpoints
  fullshard inspect runs/gpt/step-300 --tensors   every tensor, dtype and shape
  fullshard inspect runs/gpt/step-300 --json | jq .extra.step

Exit code 0: fine; 1: damaged or not finished; 2: PATH is none of these.""",
)
VERIFY = Command(
    "verify",
    _verify,
    "check every byte of a checkpoint",
    """\
Every byte is compared with the checksums in the manifest. Every damaged place is listed
with its file, its bytes and the tensors in it. Memory stays small, whatever the size.
In a folder of checkpoints, such as that of a run, each of them is checked.

fs.load checks what it reads anyway: this command is for a checkpoint that was copied, or
stored for a long time. A Hugging Face model or a DCP folder has no checksums; for these,
only the structure is checked.""",
    """\
examples:
  fullshard verify runs/gpt/step-300
  fullshard verify runs/gpt                       every checkpoint in it
  fullshard verify runs/gpt/step-300 --json | jq -r '.damage[].tensors[]'

Exit code 0: sound; 1: damaged or not finished; 2: PATH is not a checkpoint, or may not
be read. In a folder of checkpoints, one that is being saved does not count as damaged.""",
)
EXPORT = Command(
    "export",
    _export,
    "write a checkpoint's model as plain safetensors, for DCP, or as ONNX",
    """\
--to DIR writes a new folder: plain safetensors under the model's own names, config.json
and similar files, and an index if there are several safetensors files. `from_pretrained`
loads it, and it can be uploaded to the hub as it is. The parts of a save with
files='parts' are joined. Every byte is checked, tensors are streamed, and the folder
appears only when it is complete. It has no optimizer. It has a manifest, so that
`fullshard verify` works on any copy of it; if you edit config.json there, remove
fullshard.json.

--onnx FILE writes a Hugging Face model or the built-in GPT as ONNX with torch's exporter,
and compares the logits of onnxruntime with torch's.""",
    """\
examples:
  fullshard export runs/gpt/step-300 --to gpt-final --dtype bf16
  fullshard export runs/gpt/step-300 --to gpt-dcp --format dcp
  fullshard export runs/gpt/step-300 --onnx gpt.onnx

Exit code 0: done; 1: the checkpoint is damaged; 2: the target exists, or cannot be
written.""",
)
