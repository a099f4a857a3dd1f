"""`fullshard doctor --cluster`: the ranks that a launcher started, checked and measured together."""

from __future__ import annotations

import json
import time
from pathlib import Path
from statistics import median
from typing import Any

from fullshard.tools.cli.printing import as_json_text, write


def examine_cluster(out: Path, as_json: bool) -> int:
    """Every rank calls it; the first prints and writes the file. The exit code is the same on all."""
    from fullshard.comm import control, groups
    from fullshard.comm.plain_group import PlainGroup

    begun = time.monotonic()
    started = groups.start()
    try:
        group = PlainGroup()
        found = _examined(group, out.parent)
        found["seconds"] = round(time.monotonic() - begun, 1)
    finally:
        if started:
            control.end_groups()
    problems = [remark for remark in found["remarks"] if remark["problem"]]
    if group.rank == 0:
        write("--out", out, json.dumps(found, indent=1))
        if as_json:
            as_json_text(found)
        else:
            print(_text(found, out))
    return 1 if problems else 0


def _examined(group: Any, folder: Path) -> dict[str, Any]:
    from dataclasses import asdict

    from fullshard.comm import cluster_checks
    from fullshard.comm.probe import job_device, probe
    from fullshard.doctor import cluster
    from fullshard.tools.cluster_parity import beside_fsdp2

    device = job_device()
    wrong = cluster_checks.wrong_collectives()
    own = cluster.local_facts(folder, device)
    own["wrong"], own["skew_s"] = wrong, cluster_checks.clock_skew_s()
    own["pairs"] = [[i, j, rate] for (i, j), rate in cluster_checks.pair_rates().items()]
    facts = group.gather_values(own)
    remarks = cluster.judged(facts)
    speeds = asdict(probe(enough_s=0.1)) if group.ranks > 1 else None
    parity = beside_fsdp2(device, group)
    remarks += _parity_remarks(parity, cluster.Remark)
    return {
        "ranks": group.ranks,
        "remarks": [asdict(remark) for remark in remarks],
        "recommended": cluster.recommended(facts, speeds),
        "links": speeds,
        "parity": parity,
        "facts": facts,
    }


def _parity_remarks(parity: dict[str, Any], remark: Any) -> list[Any]:
    own = parity["fullshard"]
    if "failed" in own:
        return [remark(True, f"a small training with fullshard failed: {own['failed']}")]
    if not own["apart"] <= parity["allowed"]:
        allowed = f"{parity['allowed']:.2g} is allowed"
        text = f"losses of fullshard are {own['apart']:.2g} from unsharded ones, {allowed}"
        return [remark(True, text)]
    return []


def _text(found: dict[str, Any], out: Path) -> str:
    facts = found["facts"]
    nodes = len({fact["place"]["rank"] - fact["place"]["local_rank"] for fact in facts})
    devices = sorted({fact["device"]["name"] for fact in facts})
    lines = [f"{found['ranks']} ranks on {nodes} nodes, {', '.join(devices)}, in {found['seconds']} s"]
    for name, level in (("inside a node", "inside"), ("across nodes", "across")):
        speed = (found["links"] or {}).get(level)
        if speed:
            rate = f"{speed['bandwidth_bytes_s'] / 1e9:.3g} GB/s per rank"
            lines.append(f"links {name}: {rate}, {speed['latency_s'] * 1e6:.3g} µs per hop")
    writes = [fact["disk"]["write_bytes_s"] for fact in facts if fact["disk"]["write_bytes_s"]]
    if writes:
        lines.append(f"disk: {median(writes) / 1e9:.3g} GB/s per rank, median")
    lines.append(_parity_line(found["parity"]))
    lines += [f"{'PROBLEM' if one['problem'] else 'warning'}: {one['text']}" for one in found["remarks"]]
    lines += [f"recommended: {one}" for one in found["recommended"]]
    lines.append(f"everything is in {out}, to send")
    return "\n".join(lines)


def _parity_line(parity: dict[str, Any]) -> str:
    parts = []
    for name in ("fullshard", "FSDP2"):
        one = parity[name]
        parts.append(
            f"{name} failed"
            if "failed" in one
            else f"{name} {one['step_ms']:.1f} ms/step, {one['apart']:.2g} apart"
        )
    return f"{parity['model']}, beside unsharded training: {'; '.join(parts)}"
