"""torch's own names for fully sharded data parallelism, on this engine.

from fullshard.torch_fsdp import fully_shard, FSDPModule, MixedPrecisionPolicy          # FSDP2
from fullshard.torch_fsdp import FullyShardedDataParallel, ShardingStrategy             # FSDP1

Change the import, keep the calls. What this engine cannot do raises NotSupported, which names it.
"""

from fullshard.torch_fsdp import full_state_dicts as _full_state_dicts
from fullshard.torch_fsdp import wrapped_state_dicts as _wrapped_state_dicts
from fullshard.torch_fsdp.composable import fully_shard, register_fsdp_forward_method, share_comm_ctx
from fullshard.torch_fsdp.fsdp_module import FSDPModule, UnshardHandle
from fullshard.torch_fsdp.policies import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
)
from fullshard.torch_fsdp.strategies import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    OptimStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from fullshard.torch_fsdp.wrapper import FullyShardedDataParallel

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]

_full_state_dicts.turn_on()
_wrapped_state_dicts.turn_on()
