"""A tensor-parallel model that is sharded too: its parameters, gradients, state, checkpoints, refusals."""

from __future__ import annotations

import copy
import gc
import math
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ranks
import reference
import tensor_parallel_models as models
from cases import refusal
from engines import BLOCKS, shard_blocks
from reference import adamw

SIZES = (7, 11)  # uneven parts
UP, DOWN = "blocks.0.mlp.up.weight", "blocks.1.mlp.down.weight"


def _mesh(dp: int = 2, tp: int = 2) -> DeviceMesh:
    return models.new_mesh(dp, tp)


def _cut(mesh: DeviceMesh, **sizes: Any) -> models.Gpt:
    model = models.build(*SIZES, **sizes)
    models.columns_and_rows(model, mesh["tp"])
    return model


def _sharded(mesh: DeviceMesh, **options: Any) -> models.Gpt:

    return shard_blocks(_cut(mesh), mesh=mesh["dp"], **options)


def _batches(steps: int) -> list[list[models.Batch]]:
    return models.batches(steps, vocabulary=SIZES[1])


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: models.Batch) -> float:
    loss = models.loss_of(model, batch)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def _plain_gradients(steps: int = 0) -> dict[str, Tensor]:
    """Of the unsharded model, after so many steps, on the next global batch."""
    model = models.build(*SIZES)
    for pieces in _batches(steps + 1)[-1:]:
        for piece in pieces:
            (models.loss_of(model, piece) / len(pieces)).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


# --- the user's own objects ----------------------------------------------------------------------------


def _objects() -> dict[str, Any]:
    import fullshard as fs

    mesh = _mesh()
    model = _cut(mesh)
    before = dict(model.named_parameters())
    model.get_parameter(UP).note = "kept"
    heard: list[str] = []
    model.get_parameter(UP).register_post_accumulate_grad_hook(lambda p: heard.append("done"))
    model.get_parameter(UP).register_hook(lambda g: heard.append(type(g).__name__))
    made_before = {  # before sharding: they hold these very objects
        "default": torch.optim.AdamW(model.parameters(), lr=0.0),
        "foreach": torch.optim.AdamW(model.parameters(), lr=0.0, foreach=True),
        "fused": torch.optim.AdamW(model.parameters(), lr=0.0, fused=True),
        "sgd": torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9),
    }
    parts = [weakref.ref(p._local_tensor) for p in before.values() if isinstance(p, DTensor)]
    fs.shard(model, mesh=mesh["dp"])
    gc.collect()
    after = dict(model.named_parameters())
    batch = _batches(1)[0][mesh["dp"].get_local_rank()]
    models.loss_of(model, batch).backward()
    for optimizer in made_before.values():
        optimizer.step()
    cut = after[UP]
    with fs.full(model):
        inside = dict(model.named_parameters())
        types = {name: type(p).__name__ for name, p in inside.items()}
        inside_same = all(p is before[name] for name, p in inside.items())
        note_inside = inside[UP].note
        shape_inside = tuple(inside[UP].shape)
    return {
        "same objects": all(p is before[name] for name, p in after.items()) and list(after) == list(before),
        "same inside fs.full": inside_same,
        "parameters": all(isinstance(p, nn.Parameter) for p in after.values()),
        "plain at rest": not any(isinstance(p, DTensor) for p in after.values()),
        "attributes": cut.note == note_inside == "kept",
        "hooks": heard == ["DTensor", "done"],
        "nothing whole is kept": parts and not any(part() is not None for part in parts),
        "repr": repr(cut).startswith("Parameter containing"),
        "dims": cut.dim() == 2 and cut.shape[1] == 1,
        "inside": types[UP] == "DTensor" and types["blocks.0.scale"] == "Parameter",
        "whole inside": shape_inside == (SIZES[0], models.WIDTH),
        "state": all(v.shape == cut.shape for v in (made_before["fused"].state[cut]["exp_avg"],)),
    }


def test_parameters_stay_the_same_objects_and_are_plain_at_rest() -> None:
    for rank, found in enumerate(ranks.run(_objects, 4, init=True, timeout_s=120)):
        assert all(found.values()), (rank, found)


# --- gradients -----------------------------------------------------------------------------------------


def _norms(strategy: str) -> dict[str, Any]:
    mesh = _mesh()
    model = _sharded(mesh, strategy=strategy)
    models.loss_of(model, _batches(1)[0][mesh["dp"].get_local_rank()]).backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    found = {
        "each": {name: float(g.norm()) for name, g in grads.items()},
        "each, scaled": {name: float((g * 2.0).norm()) for name, g in grads.items()},
        "sums": {name: float(g.sum()) for name, g in grads.items()},
        "means": {name: float(g.mean()) for name, g in grads.items()},
        "largest": {name: float(g.abs().max()) for name, g in grads.items()},
        "largest of all": float(nn.utils.get_total_norm(grads.values(), math.inf)),
        "all": float(nn.utils.get_total_norm(grads.values())),
    }
    for name, parameter in model.named_parameters():  # a gradient of the user's own
        if name in (UP, "norm.weight"):
            parameter.grad = parameter.grad.clone().as_subclass(Tensor)
    found["own"] = float(nn.utils.get_total_norm([p.grad for p in model.parameters()]))
    found["joined"] = refusal(lambda: torch.cat([g.flatten() for g in grads.values()]).norm())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler.scale(torch.ones(()))
    model.zero_grad()
    models.loss_of(model, _batches(1)[0][mesh["dp"].get_local_rank()]).backward()
    if mesh.get_rank() == 3:  # one element of a part that no other rank has
        model.get_parameter(DOWN).grad.part.view(-1)[-1:].fill_(math.inf)
    before = [p.detach().clone() for p in model.parameters()]
    scaler.step(optimizer)
    scaler.update()
    kept = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    found["scaler"] = (kept, scaler.get_scale())
    return found


@pytest.mark.parametrize("strategy", ["zero3", "replicate"])
def test_norms_and_loss_scaling_count_every_element_once(strategy: str) -> None:
    found = ranks.run(_norms, 4, strategy, init=True, timeout_s=120)
    whole = _plain_gradients()
    for values in found:
        for name, g in whole.items():
            for what, expected in (
                ("each", g.norm()),
                ("each, scaled", 2 * g.norm()),
                ("sums", g.sum()),
                ("means", g.mean()),
                ("largest", g.abs().max()),
            ):
                gap = abs(values[what][name] - float(expected))
                assert gap < 2e-6 + 1e-5 * abs(float(expected)), (what, name, values[what][name], expected)
        total = float(torch.stack([g.norm() for g in whole.values()]).norm())
        assert math.isclose(values["all"], total, rel_tol=1e-5)
        assert math.isclose(values["own"], total, rel_tol=1e-5)
        assert math.isclose(
            values["largest of all"], max(float(g.abs().max()) for g in whole.values()), rel_tol=1e-5
        )
        assert values["all"] == found[0]["all"]
        assert values["scaler"] == (True, 2.0), "an inf on one rank must skip the step on every rank"
        assert values["joined"][0] == "GradientError", values["joined"]


def _half() -> list[float]:
    mesh = _mesh()
    model = _sharded(mesh, precision="bf16")
    optimizer = adamw(model.parameters())
    dp = mesh["dp"].get_local_rank()
    return [_step(model, optimizer, pieces[dp]) for pieces in _batches(2)]


def test_bf16_computes_near_the_fp32_losses() -> None:
    found = ranks.run(_half, 4, init=True, timeout_s=120)
    expected = reference.train(models.build(*SIZES), _batches(2), models.loss_of, adamw, 2, clip=0.5)
    for step, loss in enumerate(expected.losses):
        mean = sum(losses[step] for losses in found) / 4
        assert abs(mean - loss) < 0.03, (step, mean, loss)
        assert found[0][step] == found[1][step], "both ranks of a tensor-parallel group see one loss"


# --- whole values and state ----------------------------------------------------------------------------


def _values(folder: str) -> dict[str, Any]:
    import torch.distributed.checkpoint as dcp

    import fullshard as fs

    mesh = _mesh()
    plain = {n: p.detach() for n, p in models.build(*SIZES).named_parameters()}
    found: dict[str, Any] = {}
    for strategy in ("zero3", "replicate"):
        model = _sharded(mesh, strategy=strategy)
        state = model.state_dict()
        found[f"{strategy} shapes"] = all(tuple(state[n].shape) == tuple(p.shape) for n, p in plain.items())
        with fs.full(model):
            whole = models.whole(model)
            found[f"{strategy} values"] = all(torch.equal(whole[n], p) for n, p in plain.items())
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(2.0)
            out = model(_batches(1)[0][0][0])
        with fs.full(model, writeback=False):
            found[f"{strategy} edits"] = all(
                torch.equal(v, 2 * plain[n]) for n, v in models.whole(model).items()
            )
            with torch.no_grad():  # edits that are not kept
                for parameter in model.parameters():
                    parameter.mul_(3.0)
        with torch.no_grad():
            found[f"{strategy} forward"] = torch.allclose(out, model(_batches(1)[0][0][0]), atol=1e-6)
        model.load_state_dict({n: 3 * p for n, p in plain.items()} | {"calls": torch.zeros(3)})
        with fs.full(model):
            tripled = models.whole(model)
            model.load_state_dict({n: 5 * p for n, p in plain.items()} | {"calls": torch.zeros(3)})
        found[f"{strategy} loaded"] = all(torch.equal(v, 3 * plain[n]) for n, v in tripled.items())
        with fs.full(model, writeback=False):
            found[f"{strategy} loaded inside"] = all(
                torch.equal(v, 5 * plain[n]) for n, v in models.whole(model).items()
            )
        whole = {n: _whole(v) for n, v in model.state_dict().items()}
        found[f"{strategy} full tensors"] = all(torch.equal(whole[n], 5 * p) for n, p in plain.items())
        model.load_state_dict(_cut(mesh).state_dict())  # of a model that is tensor-parallel alone
        with fs.full(model, writeback=False):
            found[f"{strategy} loaded cut"] = all(
                torch.equal(v, plain[n]) for n, v in models.whole(model).items()
            )
        found[f"{strategy} optimizer"] = _optimizer_state_travels(model, mesh)
        twin = copy.deepcopy(model)
        optimizer, mine = adamw(twin.parameters()), _batches(1)[0][mesh["dp"].get_local_rank()]
        alone = [_step(m, o, mine) for m, o in ((twin, optimizer), (model, adamw(model.parameters())))]
        found[f"{strategy} copy"] = alone[0] == alone[1]
        with fs.full(model, writeback=False), fs.full(twin, writeback=False):
            a, b = models.whole(model), models.whole(twin)
        found[f"{strategy} copies apart"] = all(torch.equal(a[n], b[n]) for n in a)
    model = _sharded(mesh)
    dcp.save(model.state_dict(), checkpoint_id=f"{folder}/dcp")
    other = models.build(*SIZES)
    for parameter in other.parameters():
        parameter.data.zero_()
    read = other.state_dict()
    dcp.load(read, checkpoint_id=f"{folder}/dcp")
    found["dcp to a plain model"] = all(torch.equal(read[n], p) for n, p in plain.items())
    state = model.state_dict()
    with fs.full(model):
        for parameter in model.parameters():
            parameter.detach().zero_()
    dcp.load(state, checkpoint_id=f"{folder}/dcp")
    with fs.full(model, writeback=False):
        found["dcp back"] = all(torch.equal(v, plain[n]) for n, v in models.whole(model).items())
    found["plan"] = fs.plan(_cut(mesh), **BLOCKS).parameter_bytes == fs.plan(model).parameter_bytes
    return found


def _whole(value: Any) -> Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def _optimizer_state_travels(model: nn.Module, mesh: DeviceMesh) -> bool:
    """Its state dict shows whole shapes, and goes back as it came, and as whole tensors."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    _step(model, optimizer, _batches(1)[0][mesh["dp"].get_local_rank()])
    before = [optimizer.state[p]["exp_avg"].clone() for p in model.parameters()]
    said = optimizer.state_dict()
    shapes = [tuple(p.shape) for p in models.build(*SIZES).parameters()]
    good = [tuple(said["state"][i]["exp_avg"].shape) for i in range(len(shapes))] == shapes
    as_it_is = {i: {k: v.clone() for k, v in s.items()} for i, s in said["state"].items()}
    as_whole = {i: {k: _whole(v).clone() for k, v in s.items()} for i, s in said["state"].items()}
    for state in (as_it_is, as_whole):
        for parameter in model.parameters():
            optimizer.state[parameter]["exp_avg"].zero_()
        optimizer.load_state_dict({**said, "state": state})
        now = [optimizer.state[p]["exp_avg"] for p in model.parameters()]
        good &= all(map(torch.equal, before, now)) and not any(isinstance(v, DTensor) for v in now)
    optimizer.zero_grad()
    return good


def test_whole_values_can_be_read_edited_loaded_and_copied(tmp_path: Path) -> None:
    for rank, found in enumerate(ranks.run(_values, 4, str(tmp_path), init=True, timeout_s=180)):
        assert all(found.values()), (rank, {k: v for k, v in found.items() if not v})


# --- checkpoints ---------------------------------------------------------------------------------------


def _save(folder: str) -> list[float]:
    """Two steps, a save, and two more on 2 x 2 ranks."""
    import fullshard as fs
    from fullshard.checkpoint import dcp

    mesh = _mesh()
    model = _sharded(mesh)
    optimizer = adamw(model.parameters())
    mine = [pieces[mesh["dp"].get_local_rank()] for pieces in _batches(4)]
    losses = [_step(model, optimizer, batch) for batch in mine[:2]]
    fs.save(f"{folder}/ours", model, optimizer, extra={"step": 2})
    fs.save(f"{folder}/parts", model, optimizer, extra={"step": 2}, files="parts", background=True).wait()
    dcp.save(f"{folder}/dcp", model, optimizer)
    return losses + [_step(model, optimizer, batch) for batch in mine[2:]]


def _resume(folder: str, dp: int, tp: int, kinds: list[str]) -> dict[str, list[float]]:
    """The two steps after the save, by so many ranks; tp=0 is a model that is not tensor-parallel."""
    import fullshard as fs

    found: dict[str, list[float]] = {}
    for kind in kinds:
        strategy = "replicate" if kind == "parts" else "zero3"
        if tp:
            mesh = _mesh(dp, tp)
            model, rank = _sharded(mesh, strategy=strategy), mesh["dp"].get_local_rank()
        else:
            model = fs.shard(models.build(*SIZES), strategy=strategy)
            rank = torch.distributed.get_rank()
        with fs.full(model):
            for parameter in model.parameters():
                parameter.detach().zero_()
        optimizer = adamw(model.parameters())
        fs.load(f"{folder}/{kind}", model, optimizer)
        share = 2 // dp
        losses = []
        for pieces in _batches(4)[2:]:
            total = 0.0
            for batch in pieces[rank * share : (rank + 1) * share]:
                loss = models.loss_of(model, batch) / share
                loss.backward()
                total += loss.item()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(total)
        found[kind] = losses
    return found


@pytest.mark.filterwarnings("ignore:saved on")
def test_checkpoint_of_tensor_parallel_ranks_holds_whole_tensors_and_resumes_on_any_others(
    tmp_path: Path,
) -> None:
    saved = ranks.run(_save, 4, str(tmp_path), init=True, timeout_s=180)
    expected = reference.train(models.build(*SIZES), _batches(4), models.loss_of, adamw, 4, clip=0.5)
    for step, loss in enumerate(expected.losses):
        assert math.isclose((saved[0][step] + saved[2][step]) / 2, loss, rel_tol=1e-5)
    from safetensors.torch import load_file

    after_two = reference.train(models.build(*SIZES), _batches(4), models.loss_of, adamw, 2, clip=0.5)
    stored = load_file(tmp_path / "ours" / "model.safetensors")
    for name, value in after_two.parameters.items():
        reference.assert_close(stored[name], value, name, rtol=2e-5, atol=2e-6)
    for dp, tp, kinds in ((2, 2, ["ours"]), (1, 2, ["dcp"]), (2, 0, ["ours", "parts"])):
        found = ranks.run(_resume, dp * max(1, tp), str(tmp_path), dp, tp, kinds, init=True, timeout_s=180)
        for kind in kinds:
            for step in range(2):
                mean = sum(f[kind][step] for f in found) / len(found)
                assert math.isclose(mean, expected.losses[2 + step], rel_tol=2e-5), (dp, tp, kind, step)


# --- building ------------------------------------------------------------------------------------------


def _meta() -> dict[str, bool]:
    import fullshard as fs

    mesh = _mesh()
    with torch.device("meta"):
        model = models.Gpt(*SIZES)
    models.columns_and_rows(model, mesh["tp"])
    before = dict(model.named_parameters())

    def initialize(module: nn.Module) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            generator = torch.Generator().manual_seed(len(name) + parameter.numel())
            with torch.no_grad():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        for buffer in module.buffers(recurse=False):
            buffer.zero_()

    plain = models.build(*SIZES)
    plain.apply(initialize)
    fs.shard(model, mesh=mesh["dp"], materialize=initialize)
    with fs.full(model, writeback=False):
        whole = models.whole(model)
    models.loss_of(model, _batches(1)[0][0]).backward()
    return {
        "values": all(torch.equal(whole[n], p) for n, p in plain.named_parameters()),
        "objects": all(p is before[n] for n, p in model.named_parameters()),
        "trains": all(p.grad is not None for p in model.parameters()),
    }


def test_meta_model_is_initialised_whole_and_then_cut() -> None:
    for rank, found in enumerate(ranks.run(_meta, 4, init=True, timeout_s=120)):
        assert all(found.values()), (rank, found)


def _hybrid() -> dict[str, list[tuple[float, float]]]:
    import fullshard as fs

    found = {}
    for outer, strategy in (("replicate", "hybrid"), ("node", "zero3")):
        mesh = models.new_mesh(2, 1, 2, names=(outer, "shard", "tp"))
        model = models.build(*SIZES)
        models.columns_and_rows(model, mesh["tp"])
        fs.shard(model, mesh=mesh, strategy=strategy)
        optimizer, steps = adamw(model.parameters()), []
        for pieces in _batches(2):
            loss = models.loss_of(model, pieces[mesh[outer].get_local_rank()])
            loss.backward()
            norm = float(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
            optimizer.step()
            optimizer.zero_grad()
            steps.append((loss.item(), norm))
        found[strategy] = steps
    return found


def test_three_axes_train_as_in_one_process() -> None:
    found = ranks.run(_hybrid, 4, init=True, timeout_s=120)
    expected = reference.train(models.build(*SIZES), _batches(2), models.loss_of, adamw, 2, clip=0.5)
    for strategy in ("hybrid", "zero3"):
        for step in range(2):
            assert math.isclose(found[0][strategy][step][1], expected.grad_norms[step], rel_tol=2e-5)
            mean = sum(f[strategy][step][0] for f in found) / 4
            assert math.isclose(mean, expected.losses[step], rel_tol=2e-5), (strategy, step)
            assert len({f[strategy][step][1] for f in found}) == 1


# --- what is refused -----------------------------------------------------------------------------------


class _Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.plain = nn.Parameter(torch.ones(4))
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)) * self.factor * self.plain


def _pair(mesh: DeviceMesh) -> _Two:
    torch.manual_seed(0)
    return parallelize_module(_Two(), mesh, {"a": ColwiseParallel(), "b": RowwiseParallel()})


def _refusals() -> dict[str, Any]:
    from torch.distributed.fsdp import fully_shard

    import fullshard as fs

    mesh = _mesh()
    found = {
        "no mesh": refusal(lambda: fs.shard(_pair(mesh["tp"]))),
        "same axis": refusal(lambda: fs.shard(_pair(mesh["tp"]), mesh=mesh["tp"])),
        "fsdp2": refusal(lambda: fs.shard(fully_shard(_Two(), mesh=mesh["dp"]), mesh=mesh["dp"])),
    }
    both = _pair(mesh["tp"])
    fully_shard(both, mesh=mesh["dp"])
    found["fsdp2 and tp"] = refusal(lambda: fs.shard(both, mesh=mesh["dp"]))
    other = _Two()
    parallelize_module(other.a, mesh["tp"], ColwiseParallel())
    parallelize_module(other.b, mesh["dp"], ColwiseParallel())
    found["two meshes"] = refusal(lambda: fs.shard(other, mesh=mesh["dp"]))
    partial = _Two()
    summed = DTensor.from_local(torch.ones(4, 4), mesh["tp"], [Partial()], run_check=False)
    partial.a.weight = nn.Parameter(summed)
    found["partial"] = refusal(lambda: fs.shard(partial, mesh=mesh["dp"]))
    one_column = _pair(mesh["tp"])
    if mesh["tp"].get_local_rank() == 1:
        one_column.c = nn.Linear(2, 2)  # on one half of the ranks
    found["other model beside"] = refusal(lambda: fs.shard(one_column, mesh=mesh["dp"]))
    one_rank = _pair(mesh["tp"])
    if mesh.get_rank() == 3:
        one_rank.a.weight.grad = torch.zeros_like(one_rank.a.weight)
    found["one rank"] = refusal(lambda: fs.shard(one_rank, mesh=mesh["dp"]))
    late = _pair(mesh["tp"])
    loss = late.b(late.a(torch.ones(2, 4))).sum()
    fs.shard(late, mesh=mesh["dp"])
    found["backward of a forward before"] = refusal(loss.backward)
    with fs.full(late):
        loss = late(torch.ones(2, 4)).sum()
    found["backward of a forward inside"] = refusal(loss.backward)
    cut = distribute_tensor(torch.zeros(4, 4), mesh["tp"], [Shard(1)])
    found["cut otherwise"] = refusal(
        lambda: late.load_state_dict({**late.state_dict(), "a.weight": cut}, strict=False)
    )
    torch.manual_seed(mesh.get_rank() // 2)  # alike beside each other, not along 'dp'
    seeded = parallelize_module(_Two(), mesh["tp"], {"a": ColwiseParallel()})
    found["verify"] = refusal(lambda: fs.shard(seeded, mesh=mesh["dp"], initial="verify"))
    found["left out of the plan"] = refusal(lambda: _sum_of_own_tokens(mesh))
    return found


def _sum_of_own_tokens(mesh: DeviceMesh) -> None:
    """Each rank of a tensor-parallel group gives a plain parameter another part of the tokens."""
    import fullshard as fs

    model = fs.shard(_pair(mesh["tp"]), mesh=mesh["dp"], check_gradients=True)
    model.factor = 1.0 + mesh["tp"].get_local_rank()
    model(torch.ones(2, 4)).sum().backward()


def test_what_cannot_be_sharded_beside_tensor_parallelism_is_refused_by_name_on_every_rank() -> None:
    expected = {
        "no mesh": "'a.weight' is a DTensor",
        "same axis": "'a.weight' is a DTensor over ranks",
        "fsdp2": "'plain' is a DTensor over ranks",
        "fsdp2 and tp": "DTensor",
        "two meshes": "'b.weight' over",
        "partial": "'a.weight' is a DTensor with placement",
        "other model beside": "'c.weight'",
        "one rank": "has a gradient",
        "backward of a forward before": "before fs.shard",
        "backward of a forward inside": "inside fs.full",
        "cut otherwise": "not cut as the parameter is",
        "verify": "built other values",
        "left out of the plan": "which tensor parallelism has not cut",
    }
    for rank, found in enumerate(ranks.run(_refusals, 4, init=True, timeout_s=120)):
        for what, words in expected.items():
            assert words in found[what][1], (rank, what, found[what])


# --- a model of transformers ---------------------------------------------------------------------------


def _llama(folder: str) -> dict[str, Any]:
    """Built on the meta device, cut by torch, sharded, and then loaded from its own folder."""
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    import fullshard as fs

    mesh = _mesh()
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig.from_pretrained(folder))
    plan: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    for i in range(2):
        columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
        plan |= {f"model.layers.{i}.{name}": ColwiseParallel() for name in columns}
        rows = ("self_attn.o_proj", "mlp.down_proj")
        plan |= {f"model.layers.{i}.{name}": RowwiseParallel() for name in rows}
    parallelize_module(model, mesh["tp"], plan)
    fs.shard(model, mesh=mesh)
    fs.load(folder, model)
    plain = AutoModelForCausalLM.from_pretrained(folder)
    start = torch.arange(8)[None]
    generated = [m.generate(start, max_new_tokens=4, do_sample=False).tolist() for m in (model, plain)]
    optimizer, losses = adamw(model.parameters()), []
    for pieces in _batches(2):
        tokens = pieces[mesh["dp"].get_local_rank()][0]
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    fs.save(f"{folder}-trained", model, optimizer)
    return {"losses": losses, "generates": generated[0] == generated[1]}


def _llama_loss(model: nn.Module, batch: models.Batch) -> Tensor:
    return model(input_ids=batch[0], labels=batch[0]).loss


@pytest.mark.long
def test_llama_cut_by_torch_and_sharded_trains_generates_and_saves_what_from_pretrained_loads(
    tmp_path: Path,
) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    found = ranks.run(_llama, 4, str(tmp_path / "llama"), init=True, timeout_s=240)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "llama").train()
    expected = reference.train(plain, _batches(2), _llama_loss, adamw, 2, clip=0.5)
    for step, loss in enumerate(expected.losses):
        assert math.isclose(sum(f["losses"][step] for f in found) / 4, loss, rel_tol=1e-5)
    assert all(f["generates"] for f in found)
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "llama-trained")
    for name, value in trained.named_parameters():
        reference.assert_close(value.detach(), expected.parameters[name], name, rtol=2e-5, atol=2e-6)
