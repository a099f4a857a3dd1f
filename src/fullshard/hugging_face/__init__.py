"""Hugging Face Trainer and Accelerate, unmodified scripts on our engine.

import fullshard.hugging_face  # the only new line

A script that asks for FSDP (`TrainingArguments(fsdp="full_shard auto_wrap")`, `--fsdp`, an `fsdp_plugin`, or
`accelerate launch --use_fsdp`) is sharded by fullshard from then on. One that does not ask runs untouched.
"""

from fullshard.hugging_face.own_options import options
from fullshard.hugging_face.seams import turn_on

__all__ = ["options", "turn_on"]

turn_on()
