"""Dtype at rest, in compute and on the wire.

A lane has six dtypes: `rest` (the shard, what the optimizer sees), `compute` (the full value), `gather`
(parameters between ranks), `wire` (gradients between ranks), `sum` (what gradients are added up in) and
`gradients` (the gradient shard). On several nodes there are two more: `gather_across` and `across`, of
parameters and of sums of gradients between nodes. int8 on the wire means blocks of 256 values with one
scale each (see `quantise`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fullshard.errors import OptionError
from fullshard.keywords import checked_keywords

BLOCK = 256  # values that share a scale in 8-bit blocks
ROW_ALIGN_BYTES = 16
STATE_ROW_BYTES = 4 + BLOCK  # of a block of optimizer state at rest: its scale, then its values
STATE_DTYPES = (torch.float32, torch.bfloat16)  # of states that may rest in blocks
# Every dtype of torch by its name, as files and messages have it.
DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}


_OTHER_NAMES = {
    **dict.fromkeys(
        ("param_dtype", "param", "parameters", "dtype", "forward", "cast_forward_inputs", "compute_dtype"),
        "Write compute=torch.bfloat16.",
    ),
    **dict.fromkeys(
        ("reduce_dtype", "grads", "gradients", "sum", "accumulate"), "Write reduce=torch.float32."
    ),
    **dict.fromkeys(("output_dtype", "output"), "Write outputs=torch.float32."),
    **dict.fromkeys(
        ("communication_data_type", "grad_comm_dtype", "send"),
        "Write wire=..., the dtype of gradients on the wire.",
    ),
    **dict.fromkeys(("inter_node", "across_nodes", "between_nodes", "internode"), "Write across=torch.int8."),
    **dict.fromkeys(
        ("buffer_dtype", "buffers", "keep_low_precision_grads", "cast_root_forward_inputs"),
        "Leave it out: buffers keep their dtype, and inputs are cast to compute.",
    ),
    **dict.fromkeys(
        ("loss_scale", "scaler", "grad_scaler"),
        "Leave it out: torch.amp.GradScaler works as without sharding.",
    ),
}


@checked_keywords(_OTHER_NAMES)
@dataclass(frozen=True)
class Precision:
    """How a run computes. None means: as the parameter is.

    compute: dtype of the full value, and of floating point inputs of units.
    gather:  dtype of parameters between ranks: None as computed, torch.int8 in 8-bit blocks.
    wire:    dtype of gradients between ranks; None sends them as computed, torch.int8 in 8-bit blocks.
    across:  dtype between nodes; None is as inside. torch.int8 sends parameters and sums of gradients there
        in 8-bit blocks, whatever is sent inside a node; a floating point dtype concerns gradients alone.
    error_feedback: what 8-bit gradients leave out is added to the next ones; costs 2 bytes a parameter.
    reduce:  dtype in which gradients are summed; never narrower than fp32 unless given here.
    outputs: dtype of the model's floating point outputs; None leaves them.
    """

    compute: torch.dtype | None = None
    wire: torch.dtype | None = None
    reduce: torch.dtype = torch.float32
    outputs: torch.dtype | None = None
    gather: torch.dtype | None = None
    error_feedback: bool = True
    across: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.gather not in (None, torch.int8):
            raise OptionError(
                f"Precision.gather is {self.gather!r}",
                "Give torch.int8, or None to send what is computed with.",
            )
        if not isinstance(self.error_feedback, bool):
            raise OptionError(f"Precision.error_feedback is {self.error_feedback!r}", "Give True or False.")
        for field in ("compute", "wire", "reduce", "outputs", "across"):
            value = getattr(self, field)
            in_blocks = field in ("wire", "across") and value == torch.int8
            if (value is None and field != "reduce") or in_blocks:
                continue
            if not isinstance(value, torch.dtype) or not value.is_floating_point:
                raise OptionError(
                    f"Precision.{field} is {value!r}, which is not a floating point dtype",
                    "Give a torch dtype such as torch.bfloat16.",
                )


@dataclass(frozen=True)
class LaneDtypes:
    """The dtypes of one lane."""

    rest: torch.dtype
    compute: torch.dtype
    wire: torch.dtype
    sum: torch.dtype
    gather: torch.dtype
    across: torch.dtype | None = None  # None: as inside a node, or there are no nodes
    gather_across: torch.dtype | None = None
    state: torch.dtype | None = None  # of what optimizers keep: None as they make it
    # One rank's gradients of one backward: no sum, so they rest as they were packed.
    as_computed: bool = False
    split: bool = False  # on the host, masters may rest as their compute values and what restores them

    @property
    def gradients(self) -> torch.dtype:
        return self.packed if self.as_computed else self.rest

    @property
    def narrowest_bytes(self) -> int:
        return min(dtype.itemsize for dtype in (self.rest, self.compute, self.wire))

    @property
    def in_blocks(self) -> bool:
        """Some of it is sent or rests in 8-bit blocks, so intervals are multiples of a block."""
        gathered = self.eight_bit_gather or self.eight_bit_gather_across
        return gathered or self.eight_bit_wire or self.eight_bit_across or self.eight_bit_state

    @property
    def exact_gather(self) -> bool:
        """Values that were gathered are those that were sent."""
        return not (self.eight_bit_gather or self.eight_bit_gather_across)

    @property
    def eight_bit_gather_across(self) -> bool:
        """Between nodes only: inside them, values are sent as they are computed with."""
        return self.gather_across == torch.int8 and not self.eight_bit_gather

    @property
    def eight_bit_state(self) -> bool:
        """What optimizers keep rests in 8-bit blocks, see `engine.step.low_bit`."""
        return self.state == torch.int8

    def state_bytes(self, num_elements: int) -> int:
        """At rest, of one value that an optimizer keeps for each element."""
        if self.eight_bit_state:
            return -(-num_elements // BLOCK) * STATE_ROW_BYTES
        return num_elements * self.rest.itemsize

    def training_bytes(self, num_elements: int, trains: bool) -> int:
        """Of elements at rest; where they train, with gradients and Adam's state."""
        rest = num_elements * self.rest.itemsize
        trained = num_elements * self.gradients.itemsize + 2 * self.state_bytes(num_elements)
        return rest + trained if trains else rest

    @property
    def eight_bit_across(self) -> bool:
        return self.eight_bit_wire if self.across is None else self.across == torch.int8

    @property
    def packed_across(self) -> torch.dtype:
        """Of a node's sums of gradients, where they are not sent in blocks."""
        return self.packed if self.across is None or self.eight_bit_across else self.across

    @property
    def packed_back(self) -> torch.dtype:
        """Of the sum over nodes on its way back to replicas: not rounded, unless a dtype was chosen."""
        return self.sum if self.across is None or self.eight_bit_across else self.across

    @property
    def eight_bit_gather(self) -> bool:
        return self.gather == torch.int8 and self.compute != torch.int8

    @property
    def eight_bit_wire(self) -> bool:
        return self.wire == torch.int8 and self.compute != torch.int8

    @property
    def packed(self) -> torch.dtype:
        """Of the buffer in which gradients are laid end to end."""
        return self.compute if self.eight_bit_wire else self.wire


PRESETS = {
    "fp32": Precision(),
    "bf16": Precision(compute=torch.bfloat16),
    "fp16": Precision(compute=torch.float16),
}


# What other libraries call a preset.
_OTHER_VALUES = {
    "bf16": ("bfloat16", "bf16_mixed", "torch.bfloat16", "bf16_true", "amp", "mixed"),
    "fp16": ("float16", "half", "16", "16_mixed", "fp16_mixed", "torch.float16", "f16"),
    "fp32": ("float32", "32", "32_true", "full", "none", "no", "float", "torch.float32"),
}


def parse(precision: str | Precision) -> Precision:
    if isinstance(precision, Precision):
        return precision
    if isinstance(precision, str) and precision in PRESETS:
        return PRESETS[precision]
    plain = str(precision).lower().replace("-", "_")
    near = next((f"Did you mean {name!r}? " for name, others in _OTHER_VALUES.items() if plain in others), "")
    raise OptionError(
        f"unknown precision {precision!r}",
        f"{near}Choose one of {', '.join(map(repr, PRESETS))}, or give an fs.Precision.",
    )


def lane_dtypes(
    dtype: torch.dtype,
    trainable: bool,
    precision: Precision,
    scattered: bool = False,
    crosses: bool = False,
    gathers_across: bool = False,
    eight_bit_state: bool = False,
    one_backward: bool = False,
    split_masters: bool = False,
) -> LaneDtypes:
    """Resolve one lane. Only real floating point values are ever cast.

    Trainable low-precision parameters get fp32 masters under mixed precision: an update smaller
    than half a bf16 step would be lost every time. Frozen ones stay as they are: nothing updates
    them, and an fp32 copy of a frozen base would double its memory. Gradients that are `scattered` are
    summed by the backend, so they are sent in the dtype of the sum. `crosses`: sums of gradients go between
    nodes; `gathers_across`: parameters do, too. `one_backward` and `split_masters`: see `fs.Offload`.
    """
    if not dtype.is_floating_point or dtype.itemsize < 2:
        return LaneDtypes(dtype, dtype, dtype, dtype, dtype)
    rest, compute = dtype, precision.compute or dtype
    if precision.compute is not None and trainable and dtype.itemsize < 4:
        rest = torch.float32
    total = torch.float64 if rest == torch.float64 else precision.reduce
    wire, gather = precision.wire or compute, precision.gather or compute
    if torch.float64 in (rest, compute):  # more than fp32 was requested: 8 bits would contradict that
        wire, gather = (compute if dtype == torch.int8 else dtype for dtype in (wire, gather))
    if scattered and wire != torch.int8:
        wire = total
    across = precision.across if crosses and torch.float64 not in (rest, compute) else None
    gather_across = across if gathers_across and across == torch.int8 else None
    total = torch.float32 if torch.int8 in (wire, across) else total
    state = torch.int8 if eight_bit_state and rest in STATE_DTYPES else None
    is_cast = trainable and compute == torch.bfloat16 and rest == torch.float32
    as_computed, split = one_backward and is_cast, split_masters and is_cast
    return LaneDtypes(rest, compute, wire, total, gather, across, gather_across, state, as_computed, split)


def packed_bytes(num_elements: int) -> int:
    """What a row of so many elements takes on the wire."""
    if num_elements < 0 or num_elements % BLOCK:
        raise ValueError(f"a row of {num_elements} elements does not divide into blocks of {BLOCK}")
    size = num_elements + 4 * (num_elements // BLOCK)
    return (size + ROW_ALIGN_BYTES - 1) // ROW_ALIGN_BYTES * ROW_ALIGN_BYTES
