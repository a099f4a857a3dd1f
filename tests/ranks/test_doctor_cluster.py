"""`fullshard doctor --cluster` and `--report`: what ranks measure together, what may be shown to others."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import ranks
from fullshard.comm.cluster_checks import rounds
from fullshard.doctor.cluster import judged, local_facts, recommended
from fullshard.doctor.issue_report import HIDDEN, without_secrets


def _examined(out: str) -> tuple[int, str]:
    from fullshard.tools import cli

    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = cli.main(["doctor", "--cluster", "--out", out])
    return code, printed.getvalue()


def test_ranks_check_each_other_and_the_first_writes_one_file(tmp_path: Path) -> None:
    out = tmp_path / "cluster.json"
    found = ranks.run(_examined, 2, str(out), timeout_s=60, fresh=True)
    report = json.loads(out.read_text())
    assert [code for code, _ in found] == [0, 0], report["remarks"]
    assert found[1][1] == ""
    assert "ms/step" in found[0][1]
    assert report["ranks"] == len(report["facts"]) == 2
    assert not any(fact["wrong"] for fact in report["facts"])
    assert [pair[:2] for pair in report["facts"][0]["pairs"]] == [[0, 1]]
    assert report["links"]["inside"]["bandwidth_bytes_s"] > 0
    for engine in ("fullshard", "FSDP2"):
        assert report["parity"][engine]["apart"] <= report["parity"]["allowed"], engine
        assert report["parity"][engine]["step_ms"] > 0


def _wrong_on_rank_one() -> list[str]:
    import torch.distributed as dist

    from fullshard.comm import cluster_checks, groups

    groups.start()
    original = dist.all_reduce

    def lossy(values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        work = original(values, *args, **kwargs)
        if values.dtype == torch.bfloat16 and dist.get_rank() == 1:
            values[0] += 1
        return work

    dist.all_reduce = lossy
    try:
        return cluster_checks.wrong_collectives()
    finally:
        dist.all_reduce = original


def test_a_collective_with_a_wrong_result_is_named_with_its_dtype() -> None:
    assert ranks.run(_wrong_on_rank_one, 2) == [[], ["all-reduce of bfloat16"]]


@pytest.mark.parametrize("count", [1, 2, 3, 6, 7])
def test_every_pair_of_ranks_meets_once_and_no_rank_twice_at_a_time(count: int) -> None:
    pairs = list(rounds(count))
    assert sorted(pair for each in pairs for pair in each) == [
        (i, j) for i in range(count) for j in range(i + 1, count)
    ]
    assert all(len({rank for pair in each for rank in pair}) == 2 * len(each) for each in pairs)


def _facts(tmp_path: Path, count: int = 4, slow: tuple[tuple[int, int], ...] = ()) -> list[dict[str, Any]]:
    base = local_facts(tmp_path, torch.device("cpu")) | {"wrong": [], "skew_s": 0.0, "open_files": 65536}
    base["disk"] = {"free_bytes": 2**40, "write_bytes_s": 1e9}
    rates = [[i, j, 1e8 if (i, j) in slow else 1e9] for i in range(count) for j in range(i + 1, count)]
    place = {"ranks": count, "local_ranks": 2}
    return [
        base
        | {
            "matrix_product_flops": 1e12,
            "place": base["place"] | place | {"rank": rank, "local_rank": rank % 2},
            "pairs": [pair for pair in rates if rank in pair[:2]],
        }
        for rank in range(count)
    ]


def test_slow_links_slow_ranks_and_differing_hosts_are_named(tmp_path: Path) -> None:
    def texts(facts: list[dict[str, Any]]) -> list[str]:
        return [remark.text for remark in judged(facts)]

    assert texts(_facts(tmp_path)) == []
    (link,) = texts(_facts(tmp_path, slow=((0, 3),)))
    assert "ranks 0 and 3 across nodes is slow" in link
    (rank,) = texts(_facts(tmp_path, 6, tuple((i, 5) for i in range(4))))
    assert rank.startswith("rank 5: its links across nodes run at 10%")
    facts = _facts(tmp_path)
    facts[2]["versions"] = facts[2]["versions"] | {"torch": "1.0"}
    facts[1]["wrong"], facts[2]["skew_s"] = ["all-gather of int8"], 7.0
    facts[0]["open_files"], facts[3]["matrix_product_flops"] = 1024, 1e11
    facts[2]["disk"] = {"free_bytes": 2**30, "write_bytes_s": 1e7}
    found = "\n".join(texts(facts))
    for part in (
        "on rank 0 and 1.0 on rank 2",
        "rank 1: the result of all-gather of int8 is wrong",
        "rank 2: its clock is +7.00 s",
        "rank 0: only 1024 open files",
        "rank 3 computes at 10% of the median",
        "rank 2: 1.0 GiB are free",
        "rank 2 writes to disk at 1% of the median",
    ):
        assert part in found
    assert any(
        "hybrid" in line for line in recommended(_facts(tmp_path, 4, ((0, 2), (0, 3), (1, 2), (1, 3))))
    )


def test_the_links_that_are_recommended_for_a_plan_are_those_of_all_ranks_together(tmp_path: Path) -> None:
    """A pair alone is faster than each rank of a job whose ranks share a link."""
    speeds = {"inside": {"bandwidth_bytes_s": 2e9}, "across": {"bandwidth_bytes_s": 1e9}}
    pairs = ((0, 2), (0, 3), (1, 2), (1, 3))
    last = recommended(_facts(tmp_path, 4, pairs), speeds)[-1]
    assert "plan MODEL --ranks 4 " in last
    assert "--node-ranks 2 --link 1GB/s --inside 2GB/s" in last
    alone = recommended(_facts(tmp_path, 2), {"inside": {"bandwidth_bytes_s": 2e9}, "across": None})
    assert "--link 2GB/s plans" in alone[-1]


def test_a_report_has_no_secrets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from fullshard.tools import cli

    monkeypatch.setenv("MY_SERVICE_TOKEN", "abcdef-very-secret")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for text in (
        "login failed for abcdef-very-secret",
        "--api-key 12345678 --lr 1",
        "password=hunter2222",
        "https://user:hunter2222@host/path",
        "https://abcdefgh12345@host/path",
        "Authorization: Bearer abcdefgh12345",
        "hf_abcdefghijklmnop",
    ):
        cleaned = without_secrets(text)
        assert HIDDEN in cleaned, text
        for secret in ("abcdef-very", "12345678", "hunter", "abcdefgh"):
            assert secret not in cleaned
    assert without_secrets("unit 'blocks.3', 12 tokens per step") == "unit 'blocks.3', 12 tokens per step"
    out = tmp_path / "report.json"
    assert cli.main(["doctor", "--report", "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    assert report["variables"]["OMP_NUM_THREADS"] == "1"
    assert "abcdef" not in out.read_text()
    assert report["versions"]["torch"]
