"""The speed of links between ranks, measured by all of them."""

from __future__ import annotations

import contextlib
import io
import json
import os
from typing import Any

import torch.distributed as dist

import ranks
from fullshard.comm import probe as probing
from fullshard.comm.probe import probe
from fullshard.link_speeds import ClusterSpeeds, recall_speeds
from fullshard.tools import cli

NODES = ((0, 2), (1, 2), (0, 1))  # by rank: index in its node, ranks of its node


def _measure(cache: str, second_port: int) -> dict[str, Any]:
    os.environ.update(XDG_CACHE_HOME=cache, FULLSHARD_CLUSTER="test")
    probing._LARGEST_BYTES["cpu"] = 2**20  # of the command too, which has no such option
    one_node = probe(enough_s=0.01)
    started_for_it = not dist.is_initialized()
    # At the first port, a rank may reach the store that rank 0 is about to close.
    os.environ["MASTER_PORT"] = str(second_port)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"] = map(str, NODES[rank])
    uneven = probe(enough_s=0.01)
    still_there = dist.is_initialized()
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = cli.main(["env", "--probe", "--json"])
    dist.barrier()
    return {
        "one node": one_node,
        "uneven": uneven,
        "groups": (started_for_it, still_there),
        "command": (code, out.getvalue()),
        "remembered": recall_speeds(),
    }


def test_ranks_measure_each_level_and_agree_and_the_first_one_remembers(tmp_path: Any) -> None:
    found = ranks.run(_measure, 3, str(tmp_path), ranks.free_port(), fresh=True)
    for rank in found:
        for name in ("one node", "uneven"):
            speeds = rank[name]
            assert isinstance(speeds, ClusterSpeeds)
            first = found[0][name]
            assert (speeds.inside, speeds.across) == (first.inside, first.across)
            for level in filter(None, (speeds.inside, speeds.across)):
                assert level.bandwidth_bytes_s > 0
                assert level.latency_s > 0
        assert rank["one node"].inside.ranks == 3
        assert rank["one node"].across is None
        assert rank["uneven"].inside.ranks == rank["uneven"].across.ranks == 2
        assert rank["groups"] == (True, True)
        assert rank["command"][0] == 0
        assert rank["remembered"] == found[0]["remembered"]
    printed = json.loads(found[0]["command"][1])["links"]
    assert printed["inside"]["ranks"] == printed["across"]["ranks"] == 2
    assert [rank["command"][1] for rank in found[1:]] == ["", ""]
    assert found[0]["remembered"].across.bandwidth_bytes_s == printed["across"]["bandwidth_bytes_s"]
