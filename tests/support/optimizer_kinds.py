"""Optimizers of one's own, by what their step looks at: element-wise ones, then others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Plain(torch.optim.Optimizer):
    """Momentum; `update` is what subclasses change."""

    def __init__(self, params: Any, lr: float = 0.05, **settings: Any) -> None:
        super().__init__(params, {"lr": lr, "momentum": 0.9, **settings})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else torch.enable_grad()(closure)()
        self.calls += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["step"] = state.get("step", 0) + 1
                    kept = state.setdefault("kept", torch.zeros_like(p))
                    kept.mul_(group["momentum"]).add_(p.grad)
                    p.add_(self.update(p, kept, group, state), alpha=-float(group["lr"]))
        return loss

    def update(self, p: torch.Tensor, kept: torch.Tensor, group: Any, state: Any) -> torch.Tensor:
        return kept


class Signed(Plain):
    def update(self, p: torch.Tensor, kept: torch.Tensor, group: Any, state: Any) -> torch.Tensor:
        return kept.sign() + 0.1 * p


class ByGradientNorm(Plain):
    """Norms of gradients are global on shards, so it is right."""

    def update(self, p: torch.Tensor, kept: torch.Tensor, group: Any, state: Any) -> torch.Tensor:
        return kept / (1 + p.grad.norm())  # type: ignore[union-attr]


class WithForeach(Plain):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if closure is not None:
            closure()
        for group in self.param_groups:
            ps = [p for p in group["params"] if p.grad is not None]
            torch._foreach_add_(ps, [p.grad for p in ps], alpha=-group["lr"])


class StateInConstructor(Plain):
    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, **settings)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["sum"] = torch.full_like(p, 0.1)

    def update(self, p: torch.Tensor, kept: torch.Tensor, group: Any, state: Any) -> torch.Tensor:
        return kept / state["sum"].addcmul_(kept, kept).sqrt()


class CountsInState(Plain):
    """Counts steps under a name among the states, and in a state of one element."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        counts = self.state.setdefault("all", {"steps": 0})  # type: ignore[call-overload]
        counts["steps"] += 1
        self.count = counts["steps"]
        super().step()
        return loss

    def update(self, p: torch.Tensor, kept: torch.Tensor, group: Any, state: Any) -> torch.Tensor:
        weight = state.setdefault("weight", torch.zeros(1)).mul_(0.9).add_(1)
        return kept / weight / self.count


class OwnKernel(Plain):
    """A kernel that is not torch's: it gets plain gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    torch.ops.fullshard_tests.descend(p, p.grad, group["lr"])


@torch.library.custom_op("fullshard_tests::descend", mutates_args=("p",))
def _descend(p: torch.Tensor, gradient: torch.Tensor, rate: float) -> None:
    p.sub_(rate * gradient.sign())


class CompiledInside(Plain):
    """Compiles the update of a parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    _compiled_update(p, p.grad, group["lr"])


@torch.compile(backend="eager", dynamic=True)
def _compiled_update(p: torch.Tensor, gradient: torch.Tensor, rate: float) -> None:
    p.sub_(rate * gradient.sign())


def compiled_adamw(params: Any) -> torch.optim.Optimizer:
    """AdamW with a compiled step."""
    optimizer = torch.optim.AdamW(params, lr=0.01, eps=1e-4)
    optimizer.step = torch.compile(optimizer.step, backend="eager")  # type: ignore[method-assign]
    return optimizer


class CountsInList(Plain):
    """Counts calls where a step in several of them does not set it back."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.counts = [getattr(self, "counts", [0])[0] + 1]
        return super().step(closure)

    def update(self, p: torch.Tensor, kept: torch.Tensor, group: Any, state: Any) -> torch.Tensor:
        return kept / self.counts[0]


class DecaysAll(Plain):
    """Also changes parameters without a gradient."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(0.99)
        return loss


class KeepsBuffers(Plain):
    """Keeps what it has for a parameter beside the states."""

    def update(self, p: torch.Tensor, kept: torch.Tensor, group: Any, state: Any) -> torch.Tensor:
        buffers = self.__dict__.setdefault("buffers", {})
        return buffers.setdefault(p, torch.zeros_like(p)).mul_(0.5).add_(kept)  # type: ignore[no-any-return]


class NestedState(Plain):
    """Keeps tensors in a container in a state."""

    def update(self, p: torch.Tensor, kept: torch.Tensor, group: Any, state: Any) -> torch.Tensor:
        past = state.setdefault("past", [torch.zeros_like(p), torch.zeros_like(p)])
        past[0].mul_(0.5).add_(kept)
        return past[0]  # type: ignore[no-any-return]


class ByBlocks(Plain):
    """Scales blocks of 256 elements: right where no block is cut."""

    def update(self, p: torch.Tensor, kept: torch.Tensor, group: Any, state: Any) -> torch.Tensor:
        out = kept.flatten().clone()
        for block in out.split(256):
            block.div_(block.abs().max() + 1e-3) if block.numel() else None
        return out.view_as(p)


class Coded(torch.Tensor):
    """A tensor of bytes and scales, as libraries keep states in: few functions are defined on it."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Coded:
        made: Coded = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)
        made.codes, made.scale = codes, scale
        return made

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        pass

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        return ["codes", "scale"], {"bits": 8, "dtype": self.dtype}

    @classmethod
    def __tensor_unflatten__(cls, parts: Any, settings: Any, size: Any, stride: Any) -> Coded:
        assert settings == {"bits": 8, "dtype": torch.float32}
        assert parts["codes"].dtype == torch.int8
        return cls(parts["codes"], parts["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale)
        raise NotImplementedError(f"{func} is not defined")

    def decoded(self) -> torch.Tensor:
        blocks = self.codes.reshape(-1, 256).float() * self.scale[:, None]
        return blocks.view(self.codes.shape)

    @staticmethod
    def of(values: torch.Tensor) -> Coded:
        blocks = values.reshape(-1, 256)
        scale = blocks.abs().amax(1) / 127 + 1e-12
        return Coded((blocks / scale[:, None]).round().to(torch.int8).view(values.shape), scale)


class InTensorsOfItsOwn(Plain):
    """Keeps large states in blocks of 256 elements of what it is given, in tensors of its own class."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    kept = state.get("kept", torch.zeros_like(p))
                    kept = kept.decoded() if isinstance(kept, Coded) else kept
                    kept = kept * group["momentum"] + p.grad
                    p.add_(kept, alpha=-group["lr"])
                    state["kept"] = Coded.of(kept) if p.numel() >= 4096 and not p.numel() % 256 else kept


# ---- not element-wise


class ByParameterNorm(Plain):
    def update(self, p: torch.Tensor, kept: torch.Tensor, group: Any, state: Any) -> torch.Tensor:
        return kept * p.norm()


class ByUpdateNorm(Plain):
    def update(self, p: torch.Tensor, kept: torch.Tensor, group: Any, state: Any) -> torch.Tensor:
        return kept / kept.square().mean().sqrt().clamp(min=1.0)


class BySumOverAll(Plain):
    """A number over all parameters, kept in the group, that scales the next step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        group = self.param_groups[0]
        total = sum(float(s["kept"].abs().sum()) for s in self.state.values())
        group["d"] = max(group.get("d", 1e-6), 1e-6 * total)
        return super().step(closure)

    def update(self, p: torch.Tensor, kept: torch.Tensor, group: Any, state: Any) -> torch.Tensor:
        return kept * self.param_groups[0]["d"]


class Late(Plain):
    """Element-wise for 500 steps."""

    def update(self, p: torch.Tensor, kept: torch.Tensor, group: Any, state: Any) -> torch.Tensor:
        return kept if state["step"] <= 500 else kept * p.norm()


class LateInSteps(Late):
    """The same, counted by the optimizer."""

    def update(self, p: torch.Tensor, kept: torch.Tensor, group: Any, state: Any) -> torch.Tensor:
        return kept if self.calls <= 9_999 else kept / (p.abs().amax() + 1)


class ByRow(Plain):
    def update(self, p: torch.Tensor, kept: torch.Tensor, group: Any, state: Any) -> torch.Tensor:
        return (
            kept if p.dim() < 2 else kept / (1 + kept.flatten(1).abs().mean(1).view(-1, *[1] * (p.dim() - 1)))
        )


class ByShape(Plain):
    def update(self, p: torch.Tensor, kept: torch.Tensor, group: Any, state: Any) -> torch.Tensor:
        return kept * p.numel() ** 0.5


class Noisy(Plain):
    def update(self, p: torch.Tensor, kept: torch.Tensor, group: Any, state: Any) -> torch.Tensor:
        return kept + 0.1 * torch.randn_like(p)


class RarelyClipped(Plain):
    """The norm has an effect in rare steps only, which no trial meets."""

    def update(self, p: torch.Tensor, kept: torch.Tensor, group: Any, state: Any) -> torch.Tensor:
        norm = kept.norm()
        return kept / norm if norm > 1e9 else kept


class BySetting(Plain):
    """Element-wise or not, as its groups' settings say."""

    def update(self, p: torch.Tensor, kept: torch.Tensor, group: Any, state: Any) -> torch.Tensor:
        return kept * p.norm() if group.get("scaled") else kept


class FromSizeOn(Plain):
    """States of large parameters are treated in another way."""

    def update(self, p: torch.Tensor, kept: torch.Tensor, group: Any, state: Any) -> torch.Tensor:
        return kept.half().float() if p.numel() >= 4096 else kept


class Wrapper(torch.optim.Optimizer):
    """As several libraries write them: the base class is not initialised, so the step has no hooks."""

    def __init__(self, optimizer: torch.optim.Optimizer, normalised: bool) -> None:
        self.optimizer, self.normalised = optimizer, normalised

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(1 / (p.norm() + 1) if self.normalised else 0.5)
        return self.optimizer.step(closure)


# ---- by entire tensors, each by itself, in the shape in which they are well known


class Lamb(torch.optim.Optimizer):
    """Adam's update, scaled by a trust ratio per tensor."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                first, second = group["betas"]
                state["exp_avg"].lerp_(p.grad, 1 - first)
                state["exp_avg_sq"].mul_(second).addcmul_(p.grad, p.grad, value=1 - second)
                update = state["exp_avg"] / (1 - first ** group["step"])
                update /= (state["exp_avg_sq"] / (1 - second ** group["step"])).sqrt() + 1e-6
                update += group["weight_decay"] * p
                norm, ratio = p.norm(), update.norm()
                trust = torch.where((norm > 0) & (ratio > 0), norm / ratio, torch.ones_like(norm))
                p.sub_(group["lr"] * trust * update)
        return loss


class Shampoo(Plain):
    """A preconditioner per axis, in a list."""

    def update(self, p: torch.Tensor, kept: torch.Tensor, group: Any, state: Any) -> torch.Tensor:
        if p.dim() == 0:
            return kept
        if "sides" not in state:
            state["sides"] = [torch.eye(n, dtype=p.dtype, device=p.device) for n in p.shape]
        out = kept
        for side in state["sides"]:
            flat = out.reshape(len(side), -1)
            side.add_(flat @ flat.T)
            values, vectors = torch.linalg.eigh(side)
            root = vectors @ torch.diag(values.clamp(min=1e-6) ** -0.25) @ vectors.T
            out = (root @ flat).view(out.shape).movedim(0, -1)
        return out


class MixedMuon(torch.optim.Optimizer):
    """Newton-Schulz for groups with `use_muon`, Adam for the others, in one class."""

    def __init__(self, params: Any) -> None:
        params = list(params)
        matrices = [p for p in params if p.dim() >= 2]
        others = [p for p in params if p.dim() < 2]
        groups = [{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}]
        super().__init__(groups, {"lr": 0.02})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if group["use_muon"]:
                    kept = state.setdefault("momentum_buffer", torch.zeros_like(p))
                    kept.lerp_(p.grad, 0.05)
                    p.add_(
                        _newton_schulz(p.grad.lerp(kept, 0.95).flatten(1)).view(p.shape), alpha=-group["lr"]
                    )
                else:
                    state["step"] = state.get("step", 0) + 1
                    kept = state.setdefault("exp_avg", torch.zeros_like(p)).lerp_(p.grad, 0.1)
                    squares = state.setdefault("exp_avg_sq", torch.zeros_like(p))
                    squares.lerp_(p.grad.square(), 0.05)
                    scale = 1 - 0.95 ** state["step"]
                    p.addcdiv_(kept, (squares / scale).sqrt() + 1e-8, value=-group["lr"])


def _newton_schulz(matrix: torch.Tensor) -> torch.Tensor:
    x = matrix.bfloat16()
    if len(x) > x.shape[1]:
        return _newton_schulz(matrix.T).T
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        products = x @ x.T
        x = 3.4445 * x + (-4.7750 * products + 2.0315 * products @ products) @ x
    return x.to(matrix.dtype)
