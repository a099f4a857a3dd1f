"""Hugging Face Trainer and Accelerate, unmodified scripts on our engine.

import fullshard.hugging_face  # the only new line

From then on, a script that requests FSDP (`TrainingArguments(fsdp="full_shard auto_wrap")`, `--fsdp`, an
`fsdp_plugin`, or `accelerate launch --use_fsdp`) is sharded by fullshard. Other scripts run as before.
`turn_off()` restores the libraries.
"""

from fullshard.hugging_face.patching import turn_off, turn_on
from fullshard.hugging_face.shard_options import options

__all__ = ["options", "turn_off", "turn_on"]

turn_on()
