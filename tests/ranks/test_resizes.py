"""The same numbers on another number of ranks: uneven shares, micro-batches, and a run that is resized,
beside one process that is not sharded."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.data import DataLoader, Dataset, default_collate
from transformers import GPT2Config, GPT2LMHeadModel

import fullshard as fs
import ranks
from cases import whole_gradients
from fullshard.errors import FullshardError

BATCH, MICRO, STEPS = 10, 2, 5  # five micro-batches: neither 2, 3 nor 4 ranks have equally many
RESIZES = ((4, 0, 2), (2, 2, 3), (3, 3, 4), (1, 4, STEPS))  # ranks, and from which step to which


class Texts(Dataset[Any]):
    """Sentences of different lengths: labels of -100 are not predicted."""

    def __len__(self) -> int:
        return 37

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, 64, (12,), generator=generator)
        labels = tokens.clone()
        labels[4 + index % 8 :] = -100
        return {"input_ids": tokens, "labels": labels}


def _model(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=64,
        n_positions=16,
        n_embd=24,
        n_layer=2,
        n_head=2,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
    )
    return GPT2LMHeadModel(config)


def _losses(model: nn.Module, batch: Any) -> torch.Tensor:
    """The mean over samples of each sample's mean over its tokens."""
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
    labels = batch["labels"][:, 1:]
    losses = nn.functional.cross_entropy(logits.transpose(1, 2), labels, ignore_index=-100, reduction="none")
    return (losses.sum(1) / (labels != -100).sum(1)).mean()


def _by_token(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(**batch).loss


def _tokens(batch: Any) -> int:
    return int((batch["labels"][:, 1:] != -100).sum())


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    # eps far above Adam's own: where a gradient is zero but for rounding, Adam divides noise by noise.
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)


def _mesh(strategy: str, size: int) -> Any:
    shapes = {1: (1, 1), 2: (2, 1), 3: (3, 1), 4: (2, 2)}
    names = ("replicate", "shard")
    return init_device_mesh("cpu", shapes[size], mesh_dim_names=names) if strategy == "hybrid" else None


def _sharded(strategy: str, dropout: float = 0.0, **options: Any) -> nn.Module:
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    size = torch.distributed.get_world_size()
    return fs.shard(_model(dropout), strategy=strategy, mesh=_mesh(strategy, size), **options)


def _values(model: nn.Module) -> dict[str, torch.Tensor]:
    with fs.full(model):
        return {name: p.detach().clone() for name, p in model.named_parameters()}


Case = dict[str, Any]
PLAIN: list[Case] = [
    {"strategy": "zero3"},
    {"strategy": "hybrid", "micro": 3, "accumulate": True},
    {"strategy": "zero2", "by_token": True},
    {"strategy": "replicate", "by_token": True, "micro": MICRO, "accumulate": True},
]
FIXED: list[Case] = [
    {"strategy": "zero3", "micro": MICRO, "dropout": 0.2},
    {"strategy": "zero2", "micro": 3, "by_token": True, "state": "8bit"},
    {"strategy": "hybrid", "micro": MICRO, "precision": "bf16", "checkpoint_activations": True},
    {"strategy": "replicate", "micro": MICRO},
    {"strategy": "zero1", "micro": MICRO, "precision": "bf16", "offload": "host"},
]


class _Ahead:
    """A loader that has fetched a few batches more than the loop has, as worker processes do."""

    def __init__(self, dataset: Dataset[Any], batches: fs.Batches) -> None:
        self._dataset, self._batches = dataset, batches

    def __iter__(self) -> Iterator[Any]:
        fetched: deque[Any] = deque()
        for indices in self._batches:
            fetched.append(default_collate([self._dataset[index] for index in indices]))
            if len(fetched) > 3:
                yield fetched.popleft()
        yield from fetched


def _train(case: Case, folder: str, start: int, stop: int, reduce: str = "auto") -> Any:
    """The steps from `start` to `stop` on these ranks: samples, gradient norms, and values at the end."""
    kinds = ("strategy", "precision", "checkpoint_activations", "offload", "state", "dropout")
    model = _sharded(**{k: v for k, v in case.items() if k in kinds}, reduce=reduce)
    optimizer = _optimizer(model)
    batches = fs.Batches(len(Texts()), BATCH, micro_batch_size=case.get("micro"), seed=3)
    loader = _Ahead(_Numbered(), batches)
    if start:
        assert batches.resume(fs.load(f"{folder}/{start}", model, optimizer)["batches"]) == start
    samples: list[list[int]] = []
    norms = []
    loss_of, count = (_by_token, _tokens) if case.get("by_token") else (_losses, None)
    for step, given in batches.steps(loader, count=count):
        micro_batches = given if "micro" in case else [given]
        samples.append([])
        weights = given.weights if "micro" in case else [1]
        for number, batch in enumerate(micro_batches):
            if "dropout" in case:
                torch.manual_seed(100 * step + given.numbers[number])
            samples[-1] += batch.pop("index").tolist() if weights[number] else []
            if case.get("accumulate") and number + 1 < len(micro_batches):
                with fs.accumulate(model):
                    loss_of(model, batch).backward()
            else:
                loss_of(model, batch).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 == stop:
            fs.save(f"{folder}/{stop}", model, optimizer, extra={"batches": batches.state()})
            break
    return samples, norms, _values(model)


class _Numbered(Texts):
    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {**super().__getitem__(index), "index": torch.tensor(index)}


def _train_all(cases: list[Case], folder: str, start: int, stop: int, reduce: str) -> list[Any]:
    return [_train(case, f"{folder}/{number}", start, stop, reduce) for number, case in enumerate(cases)]


def _resized(cases: list[Case], folder: Path, reduce: str) -> list[Any]:
    """By case: the samples of each step, norms, and the values at the end of a run that was resized."""
    parts = [ranks.run(_train_all, n, cases, str(folder), a, b, reduce, init=True) for n, a, b in RESIZES]
    found = []
    for number in range(len(cases)):
        samples, norms = [], []
        for by_rank in parts:
            of_ranks = [of_rank[number] for of_rank in by_rank]
            samples += [
                sorted(chain.from_iterable(step)) for step in zip(*(s for s, _, _ in of_ranks), strict=True)
            ]
            norms += of_ranks[0][1]
        found.append((samples, norms, parts[-1][0][number][2]))
    return found


def _alone(by_token: bool) -> Any:
    """The same training on one process, not sharded, on the entire global batch at once."""
    model, batches = _model(), fs.Batches(len(Texts()), BATCH, seed=3, rank=0, ranks=1)
    optimizer, norms, samples = _optimizer(model), [], []
    loader = DataLoader(Texts(), batch_sampler=batches)
    for step, batch in batches.steps(loader):
        samples.append(sorted(batches.indices(step)))
        (_by_token if by_token else _losses)(model, batch).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 == STEPS:
            break
    return samples, norms, dict(model.named_parameters())


def test_a_run_that_changes_its_number_of_ranks_equals_one_process(tmp_path: Path) -> None:
    expected = {by_token: _alone(by_token) for by_token in (False, True)}
    for case, (samples, norms, values) in zip(PLAIN, _resized(PLAIN, tmp_path, "auto"), strict=True):
        right_samples, right_norms, right = expected[case.get("by_token", False)]
        assert samples == right_samples, case
        torch.testing.assert_close(norms, right_norms, rtol=1e-4, atol=1e-6)
        for name, value in values.items():
            torch.testing.assert_close(
                value, right[name].detach(), rtol=1e-4, atol=2e-5, msg=f"{case} {name}"
            )


def test_with_a_fixed_order_of_sums_every_number_of_ranks_has_the_same_bits(tmp_path: Path) -> None:
    resized = _resized(FIXED, tmp_path / "resized", "fixed")
    undisturbed = ranks.run(_train_all, 4, FIXED, str(tmp_path / "4"), 0, STEPS, "fixed", init=True)[0]
    one = ranks.run(_train_all, 1, FIXED, str(tmp_path / "1"), 0, STEPS, "fixed", init=True)[0]
    for case, (_, norms, values), on_four, on_one in zip(FIXED, resized, undisturbed, one, strict=True):
        assert norms == on_four[1] == on_one[1], case
        for name, value in values.items():
            assert torch.equal(value, on_one[2][name]), (case, name)
            assert torch.equal(value, on_four[2][name]), (case, name)
        if "dropout" not in case:
            right_norms = _alone(case.get("by_token", False))[1]
            rtol = 2e-2 if "precision" in case or "state" in case else 1e-4
            torch.testing.assert_close(norms, right_norms, rtol=rtol, atol=1e-6)


# --- loops of other shapes ------------------------------------------------------------------------------


DATA = torch.randn(23, 6, generator=torch.Generator().manual_seed(1))


class _Twice(nn.Module):
    """One layer is used twice, so that its gradients may come in two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.inner(self.inner(x)))


def _small() -> nn.Module:
    torch.manual_seed(0)
    return _Twice()


def _loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def _raised(call: Any) -> str:
    try:
        call()
    except FullshardError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def _expected(samples: list[int], penalty: float = 0.0) -> dict[str, torch.Tensor]:
    model = _small()
    loss = _loss(model, DATA[samples])
    (loss + penalty * sum(p.square().sum() for p in model.parameters())).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _agrees(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    before = [p.detach().clone() for p in model.parameters()]
    found = whole_gradients(model)
    with torch.no_grad():
        for p, value in zip(model.parameters(), before, strict=True):
            p.copy_(value)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-7)
    model.zero_grad()


def _right_loops() -> None:
    """Each on three ranks of a batch of seven, or of micro-batches: the gradient of one process."""
    model = fs.shard(_small(), merge_units=0)
    first = fs.Batches(23, 7).indices(0)
    for samples in fs.Batches(23, 7, epochs=1):  # as in README: no loop that counts
        _loss(model, DATA[samples]).backward()
        break
    else:
        raise AssertionError
    _agrees(model, _expected(first))
    del samples

    batches, others = fs.Batches(23, 7), fs.Batches(23, 5, epochs=1)
    for _, x in batches.steps(DataLoader(DATA, batch_sampler=batches)):  # with an evaluation inside
        for _, y in others.steps(DataLoader(DATA, batch_sampler=others)):
            with torch.no_grad():
                model(y)
        loss = _loss(model, x)
        penalty = fs.penalty(model, lambda _, p: p.square())
        (loss + 0.1 * penalty).backward()
        break
    _agrees(model, _expected(first, 0.1))

    for micro in (2, 5):  # four micro-batches, and two: one rank has none
        batches = fs.Batches(23, 7, micro_batch_size=micro)
        for _, micro_batches in batches.steps(DataLoader(DATA, batch_sampler=batches)):
            for x in micro_batches:
                out = model(x).square()
                out[:, :1].mean().mul(1 / 3).backward(retain_graph=True)  # two backwards of one forward
                out[:, 1:].mean().mul(2 / 3).backward()
            break
        _agrees(model, _expected(first))

    fixed = fs.shard(_small(), merge_units=0, reduce="fixed")
    batches = fs.Batches(23, 7, micro_batch_size=2)
    for _, micro_batches in batches.steps(DataLoader(DATA, batch_sampler=batches)):
        for x in micro_batches:
            model(x)[:, :1].square().mean().mul(1 / 3).backward()
            fixed(x)[:, :1].square().mean().mul(1 / 3).backward()
            fixed(x)[:, 1:].square().mean().mul(2 / 3).backward()
            model(x)[:, 1:].square().mean().mul(2 / 3).backward()
        break
    _agrees(fixed, _expected(first))
    _agrees(model, _expected(first))

    found = _fixed_by_definition(first)
    assert all(map(torch.equal, *found)), "not the tree that the documents define"

    # A rank whose batch has nothing to predict: its loss is not a number, and does not count.
    batches, rank = fs.Batches(23, 7), torch.distributed.get_rank()
    loader = DataLoader(DATA, batch_sampler=batches)
    for _, x in batches.steps(loader, count=lambda x: len(x) if torch.distributed.get_rank() else 0):
        (_loss(model, x) * (1 if rank else float("nan"))).backward()
        break
    _agrees(model, _expected(first[3:]))


def _fixed_by_definition(first: list[int]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The gradients of four micro-batches under reduce='fixed', and as one process adds them up by hand."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    model, alone, leaves = fs.shard(build(), reduce="fixed"), build(), []
    batches = fs.Batches(23, 7, micro_batch_size=2)
    for _, micro_batches in batches.steps(DataLoader(DATA, batch_sampler=batches)):
        for x in micro_batches:
            _loss(model, x).backward()
        break
    for samples in (first[0:2], first[2:4], first[4:6], first[6:7]):
        gradients = torch.autograd.grad(_loss(alone, DATA[samples]), list(alone.parameters()))
        leaves.append([gradient * (len(samples) / 7) for gradient in gradients])
    by_hand = [(a + b) + (c + d) for a, b, c, d in zip(*leaves, strict=True)]
    for value in ("inf", "nan"):  # a norm that is not finite stays what it is
        kept = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        with torch.no_grad():
            for p in model.parameters():
                p.grad = p.grad * 0 + float(value)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert str(float(norm)) == value
        for p, gradient in zip(model.parameters(), kept, strict=True):
            p.grad = gradient
    return [value for value in whole_gradients(model).values() if value is not None], by_hand


def _wrong_loops() -> dict[str, str]:
    """What each rank raises."""
    found = {}
    model = fs.shard(_small())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(DATA, batch_sampler=fs.Batches(23, 7))
    x = next(iter(loader))
    found["lost"] = _raised(_loss(model, x).backward)

    one, two = iter(fs.Batches(23, 7)), iter(fs.Batches(23, 8))
    loss = _loss(model, DATA[next(one)]) + _loss(model, DATA[next(two)])
    found["two loops"] = _raised(loss.backward)
    del one, two, loss

    batches = fs.Batches(23, 8, micro_batch_size=2)
    for _, micro_batches in batches.steps(DataLoader(DATA, batch_sampler=batches)):
        losses = [_loss(model, x) for x in micro_batches]
        found["after the loop"] = _raised(sum(losses).backward)
        break
    del losses
    batches.resume(0)
    for _, micro_batches in batches.steps(DataLoader(DATA, batch_sampler=batches)):
        loss = torch.stack([_loss(model, x) for x in micro_batches]).mean()
        for _ in micro_batches:
            loss.backward()
            break
        found["one backward for all"] = _raised(optimizer.step)
        break
    model.zero_grad()

    plain = nn.Linear(6, 1)
    for samples in fs.Batches(23, 7):
        plain(DATA[samples]).mean().backward()
        found["not sharded"] = _raised(torch.optim.SGD(plain.parameters(), lr=0.1).step)
        break

    fixed = fs.shard(_small(), reduce="fixed")
    found["no micro-batches"] = _raised(_loss(fixed, DATA).backward)
    batches.resume(0)
    for _, micro_batches in batches.steps(DataLoader(DATA, batch_sampler=batches)):
        for x in micro_batches:
            _loss(fixed, x).backward()
            found["before the last"] = _raised(torch.optim.SGD(fixed.parameters(), lr=0.1).step)
            found["in a closure"] = _raised(
                lambda: torch.optim.SGD(fixed.parameters(), lr=0.1).step(lambda: torch.zeros(()))
            )
            break
        break
    fixed.zero_grad()
    batches.resume(0)
    for _, micro_batches in batches.steps(DataLoader(DATA, batch_sampler=batches)):
        for number, x in enumerate(micro_batches):
            if number:
                found["one left out"] = _raised(_loss(fixed, x).backward)
        break
    mesh = init_device_mesh("cpu", (1, 3), mesh_dim_names=("dp", "tp"))
    parallel = parallelize_module(nn.Sequential(nn.Linear(6, 6)), mesh["tp"], {"0": ColwiseParallel()})
    found["tensor parallelism"] = _raised(lambda: fs.shard(parallel, mesh=mesh["dp"], reduce="fixed"))
    eight_bit = fs.Precision(wire=torch.int8)
    found["8 bits"] = _raised(lambda: fs.shard(_small(), precision=eight_bit, reduce="fixed"))
    return found


def test_loops_of_many_shapes_have_the_gradient_of_one_process() -> None:
    ranks.run(_right_loops, 3, init=True)


def test_a_loop_whose_weights_are_not_known_is_an_error() -> None:
    for found in ranks.run(_wrong_loops, 3, init=True):
        for case, message in {
            "lost": "hold its iterator",
            "two loops": "gradients cannot have the weights of both",
            "after the loop": "a backward outside the loop over the micro-batches",
            "one backward for all": "1 missing",
            "not sharded": "without a backward of a sharded model",
            "no micro-batches": "reduce='fixed' sums micro-batches",
            "before the last": "for each batch of this rank (1 missing)",
            "in a closure": "before the last micro-batch of the global batch",
            "one left out": "one had no backward",
            "tensor parallelism": "reduce='fixed' for a tensor-parallel model",
            "8 bits": "8-bit blocks of precision=fs.Precision(wire=torch.int8)",
        }.items():
            assert message in found[case], (case, found[case])
