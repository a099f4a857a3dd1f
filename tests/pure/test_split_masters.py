"""Split masters are read and written like the plain tensors they stand for, through views of any kind."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from fullshard.engine.homes.remainders import bitmap_bytes
from fullshard.engine.homes.split_masters import Halves, SplitParameter, SplitValues, address, show
from fullshard.engine.homes.transfers import Transfers
from fullshard.engine.writes import watch_data
from fullshard.errors import AtRestError, StateError

COUNT = 203


def split_of(values: Tensor) -> SplitValues:
    halves = Halves(
        torch.zeros(len(values), dtype=torch.bfloat16),
        torch.zeros(len(values), dtype=torch.int16),
        torch.zeros(bitmap_bytes(len(values)), dtype=torch.uint8),
        Transfers(torch.device("cpu")),
    )
    split = SplitValues.all_of(halves)
    split.copy_(values)
    return split


def pair(seed: int = 0) -> tuple[SplitValues, Tensor]:
    """Split and plain, with ties among them."""
    values = torch.randn(COUNT, generator=torch.Generator().manual_seed(seed))
    values[::5] = values[::5].half().float()
    return split_of(values), values


VIEWS: list[Callable[[Tensor], Tensor]] = [
    lambda t: t,
    lambda t: t[8:200].view(24, 8),
    lambda t: t[8:200].view(24, 8).t(),
    lambda t: t[8:200].view(24, 8)[:, 3],
    lambda t: t[8:200].view(2, 12, 8).permute(2, 0, 1)[1:7:2],
    lambda t: t[3:7],
    lambda t: t[5],
    lambda t: t[::7],
    lambda t: t[40:40],
    lambda t: t[1:].unsqueeze(0).squeeze(0),
    lambda t: t.split([100, 103])[1],
    lambda t: t[:9].unbind()[4],
    lambda t: t[:100].view(10, 10).diagonal(),
    lambda t: t.narrow(0, 30, 60).reshape(6, 10).select(1, 2),
    lambda t: torch.as_strided(t, (10, 3), (7, 2), 4),
    lambda t: t[:20].view(4, 5).unfold(1, 2, 2)[0],
    lambda t: t[100:110].expand(10).movedim(0, 0).detach(),
]
WRITES: list[Callable[[Tensor, Tensor], Any]] = [
    lambda t, x: t.copy_(x),
    lambda t, x: t.mul_(1.25),
    lambda t, x: t.add_(x, alpha=0.5),
    lambda t, x: t.zero_(),
    lambda t, x: t.fill_(1.00390625),  # a tie
    lambda t, x: t.lerp_(x, 0.3),
    lambda t, x: torch.add(t, x, out=t),
    lambda t, x: torch._foreach_addcmul_([t], [x], [x], 0.1),
    lambda t, x: t.masked_fill_(x > 0, -2.5),
    lambda t, x: t.__setitem__(..., x),
    lambda t, x: t.clamp_(-0.5, 0.5),
    lambda t, x: torch._foreach_copy_([t], [x]),
]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(VIEWS), st.sampled_from(WRITES)), min_size=1, max_size=4))
def test_writes_into_views_have_the_results_of_plain_tensors(steps: list[Any]) -> None:
    split, plain = pair()
    generator = torch.Generator().manual_seed(1)
    for view, write in steps:
        of_split, of_plain = view(split), view(plain)
        assert isinstance(of_split, SplitValues)
        assert (of_split.shape, of_split.stride()) == (of_plain.shape, of_plain.stride())
        values = torch.randn(of_plain.shape, generator=generator)
        write(of_split, values)
        write(of_plain, values)
        assert torch.equal(split, plain)
        assert torch.equal(split.split_values.compute, plain.bfloat16())
        assert torch.equal(of_split.sum(), of_plain.sum())


def test_views_of_the_same_elements_in_one_call_are_one_memory() -> None:
    split, plain = pair()
    for t in (split, plain):
        torch._foreach_add_([t[:50], t[25:], t[10:30]], 1.0)
        t[20:60].copy_(t[100:140])
    assert torch.equal(split, plain)


def parameter_over(split: SplitValues) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(24, 8))
    show(parameter, split[8:200].view(24, 8))
    return parameter


def test_a_parameter_stays_the_same_object_and_shows_plain_values_when_it_is_given_some() -> None:
    split, plain = pair()
    parameter = parameter_over(split)
    gradient = torch.ones(24, 8)
    parameter.grad, before = gradient, parameter._version
    assert type(parameter) is SplitParameter
    assert isinstance(parameter, nn.Parameter)
    for values in (torch.randn(5, 2), torch.randn(24, 8)):
        show(parameter, values)
        assert type(parameter) is nn.Parameter
        assert parameter.data_ptr() == values.data_ptr()
        assert parameter.grad is gradient
        assert parameter.requires_grad
        show(parameter, split[8:200].view(24, 8))
        assert parameter.grad is gradient
        assert parameter.requires_grad
    assert parameter._version == before
    assert torch.equal(parameter, plain[8:200].view(24, 8))
    parameter.requires_grad_(False)
    show(parameter, torch.zeros(1))
    assert not parameter.requires_grad


def test_what_a_parameter_has_shown_is_not_kept() -> None:
    view = pair()[0][8:200].view(24, 8)
    parameter = nn.Parameter(torch.zeros(24, 8))
    for _ in range(2):
        before = StorageWeakRef(parameter.untyped_storage())
        show(parameter, view)
        assert before.expired()
        show(parameter, torch.zeros(24, 8))


@pytest.mark.parametrize("shape", [(8, 1), (1, 8), (8,), (1,), (), (2, 1, 3)])
def test_a_graph_that_has_saved_what_a_parameter_has_shown_is_right_or_fails(shape: tuple[int, ...]) -> None:
    split, plain = pair()
    count = torch.Size(shape).numel()
    parameter = nn.Parameter(torch.zeros(shape))
    show(parameter, split[8 : 8 + count].view(shape))
    show(parameter, plain[8 : 8 + count].view(shape).clone())
    x = torch.ones(shape, requires_grad=True)
    product = (x * parameter).sum()
    show(parameter, split[8 : 8 + count].view(shape))
    if count > 1:
        with pytest.raises(RuntimeError, match="must match"):
            torch.autograd.grad(product, x)
    else:
        assert torch.equal(torch.autograd.grad(product, x)[0], parameter.detach())


class Named(nn.Parameter):
    """A class of the user's."""

    name = "mine"


def test_a_parameter_of_another_class_is_of_that_class_whatever_it_shows() -> None:
    view = pair()[0][8:200].view(24, 8)
    parameter = Named(torch.zeros(24, 8))
    for _ in range(2):
        show(parameter, view)
        assert isinstance(parameter, Named)
        assert isinstance(parameter, SplitParameter)
        assert parameter.name == "mine"
        assert torch.equal(parameter, view)
        show(parameter, torch.ones(3))
        assert type(parameter) is Named


def test_autograd_and_hooks_see_the_parameter_whatever_it_shows() -> None:
    split, _plain = pair()
    parameter, seen = nn.Parameter(torch.zeros(24, 8)), []
    parameter.register_hook(lambda gradient: seen.append("gradient"))
    parameter.register_post_accumulate_grad_hook(lambda p: seen.append("accumulated"))
    view = split[8:200].view(24, 8)
    for values in (view, torch.randn(24, 8), view):
        show(parameter, values)
        parameter.grad = None
        parameter.square().sum().backward()
        assert torch.equal(parameter.grad, 2 * parameter.detach())  # type: ignore[arg-type]
        assert seen == ["gradient", "accumulated"]
        seen.clear()


def test_edits_through_data_and_of_data_are_noticed() -> None:
    watch_data()
    split, plain = pair()
    parameter = parameter_over(split)
    kept = parameter.data
    assert type(kept) is SplitValues
    assert not isinstance(kept, nn.Parameter)
    kept[0].zero_()
    plain[8:16] = 0
    assert kept._version == 1
    assert torch.equal(split, plain)
    parameter.data = torch.ones(24, 8)  # values of its own, until the lane takes them
    assert type(parameter) is nn.Parameter
    assert torch.equal(split, plain)
    parameter.data = kept
    assert type(parameter) is SplitParameter
    assert address(parameter) == address(kept)


def test_copies_are_plain_tensors() -> None:
    split, plain = pair()
    parameter, expected = parameter_over(split), plain[8:200].view(24, 8)
    file = io.BytesIO()
    torch.save(parameter.detach(), file)
    file.seek(0)
    copies = [
        parameter.clone(),
        parameter.detach().clone(),
        parameter.double().float(),
        parameter.contiguous() + 0,
        copy.deepcopy(parameter),
        copy.deepcopy(parameter.detach()),
        torch.load(file),
        torch.from_numpy(np.array(parameter.detach())),
        torch.tensor(parameter.tolist()),
        nn.utils.parameters_to_vector([parameter]).view(24, 8),
    ]
    for index, copied in enumerate(copies):
        assert type(copied) in (Tensor, nn.Parameter), index
        assert torch.equal(copied, expected), index
    made = [torch.empty_like(parameter), torch.zeros_like(parameter), parameter.new_ones(3)]
    assert [(type(each), each.dtype) for each in made] == 3 * [(Tensor, torch.float32)]
    assert repr(parameter) == repr(nn.Parameter(expected.clone()))


def test_what_needs_memory_is_a_copy_that_cannot_be_written_or_refused() -> None:
    parameter = parameter_over(pair()[0])
    with pytest.raises(ValueError, match="read-only"):
        parameter.detach().numpy()[0] = 1
    with pytest.raises(RuntimeError, match="requires grad"):
        parameter.numpy()
    with pytest.raises(AtRestError, match=r"data_ptr of a parameter at rest.*p\.detach\(\)\.clone\(\)"):
        parameter.data_ptr()
    with pytest.raises(AtRestError, match="another dtype"):
        parameter.data.view(torch.int32)
    with pytest.raises(AtRestError, match="other memory"):
        parameter.data.resize_(3)


# --- what cannot be right -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["t_", "unsqueeze_", "squeeze_", "transpose_", "as_strided_"])
def test_a_change_of_shape_in_place_is_refused_and_changes_nothing(name: str) -> None:
    split, plain = pair()
    square = split[:64].view(1, 8, 8)
    arguments = {"unsqueeze_": (0,), "transpose_": (1, 2), "as_strided_": ((4, 4), (4, 1), 0)}.get(name, ())
    values = square[0] if name == "t_" else square
    with pytest.raises(AtRestError, match=f"{name} of a parameter at rest.*in place"):
        getattr(values, name)(*arguments)
    assert torch.equal(split, plain)


TAKERS: list[Callable[[Tensor], Any]] = [
    np.from_dlpack,
    torch.from_dlpack,
    torch._neg_view,
    lambda t: t.share_memory_(),
    lambda t: t.data_ptr(),
    lambda t: t.apply_(lambda x: x),
    lambda t: t.map_(t, lambda x, _: x),
    lambda t: t.storage().fill_(0),
    lambda t: t.untyped_storage().fill_(0),
    lambda t: t.untyped_storage().copy_(torch.zeros(24, 8).untyped_storage()),
    lambda t: t.untyped_storage().resize_(0),
    lambda t: t.untyped_storage().share_memory_(),
    lambda t: t.untyped_storage().__setitem__(0, 1),
    lambda t: t.untyped_storage().tolist(),
    lambda t: t.untyped_storage().data_ptr(),
    lambda t: copy.deepcopy(t.untyped_storage()),
    lambda t: pickle.dumps(t.untyped_storage()),
    lambda t: t.set_(torch.zeros(3)),
    lambda t: torch.zeros(3).set_(t),
]


def test_what_other_code_takes_memory_from_is_refused() -> None:
    split, plain = pair()
    parameter = parameter_over(split)
    for take in TAKERS:
        with pytest.raises(AtRestError, match=r"split_masters.*p\.detach\(\)\.clone\(\)"):
            take(parameter.detach())
    assert torch.equal(split, plain)


def test_torch_itself_raises_where_it_would_use_a_pointer_that_is_null() -> None:
    values = parameter_over(pair()[0]).detach()
    for take in (torch.Tensor.data_ptr, torch.utils.dlpack.to_dlpack, torch.Tensor.apply_):
        with pytest.raises((RuntimeError, TypeError)):
            take(values)
    with pytest.raises(RuntimeError):
        torch.Tensor.untyped_storage(values).fill_(0)


def test_storages_tell_their_size_and_which_are_the_same() -> None:
    split, plain = pair()
    parameter = parameter_over(split)
    for of_split, of_plain in ((parameter, plain[8:200]), (parameter.data[3], plain[8:16])):
        storage = of_split.untyped_storage()
        assert storage.nbytes() == of_plain.untyped_storage().nbytes()
        assert storage._cdata == split.untyped_storage()._cdata
        assert storage.device == of_plain.untyped_storage().device
    assert not parameter.is_shared()
    assert not StorageWeakRef(parameter.untyped_storage()).expired()
    assert parameter.untyped_storage()._cdata != pair()[0].untyped_storage()._cdata


def test_collectives_into_one_are_refused_because_what_they_write_would_be_lost(tmp_path: Any) -> None:
    parameter = parameter_over(pair()[0])
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    try:
        for collective in (torch.distributed.all_reduce, lambda t: torch.distributed.broadcast(t, 0)):
            with pytest.raises(AtRestError, match="written by other ranks"):
                collective(parameter.data)
    finally:
        torch.distributed.destroy_process_group()


def test_an_operator_that_does_not_declare_what_it_writes_writes_all_the_same() -> None:
    def negate(x: Tensor) -> None:
        x.neg_()

    library = torch.library.Library("fullshard_test", "FRAGMENT")
    library.define("negate(Tensor x) -> ()")
    library.impl("negate", negate, "CompositeExplicitAutograd")
    split, plain = pair()
    torch.ops.fullshard_test.negate(split[8:20])
    plain[8:20].neg_()
    assert torch.equal(split, plain)


def test_a_weak_reference_of_torch_is_an_error_with_a_remedy() -> None:
    view = pair()[0][8:200].view(24, 8)
    parameter = nn.Parameter(torch.zeros(24, 8))
    show(parameter, view)
    weak = torch._C._WeakTensorRef(parameter)
    with pytest.raises(StateError, match="record_shapes=False"):
        show(parameter, torch.zeros(3))
    assert torch.equal(parameter, view)
    del weak
    show(parameter, torch.zeros(3))


def test_inference_mode_reads_and_writes_and_training_goes_on() -> None:
    watch_data()
    split, plain = pair()
    parameter = parameter_over(split)
    with torch.inference_mode():
        seen = [parameter.detach(), parameter[0], parameter.view(-1), parameter.data]
        parameter.data.mul_(2)
        plain[8:200] *= 2
        assert torch.equal(seen[0], plain[8:200].view(24, 8))
    assert torch.equal(split, plain)
    assert parameter.data._version == 0
    parameter.square().sum().backward()
    assert torch.equal(parameter.grad, 2 * parameter.detach())  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_another_default_dtype_changes_nothing(dtype: torch.dtype) -> None:
    split, plain = pair()
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        for t in (split, plain):
            t[3:16].copy_(plain[40:53] / 3)
            t[16:24].fill_(1 / 3)
        view = split[8:200].view(24, 8)
        parameter = nn.Parameter(torch.zeros(24, 8, dtype=torch.float32))
        show(parameter, view)
        show(parameter, torch.zeros(2, dtype=torch.float32))
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(split, plain)


def test_a_parameter_given_to_itself_stays_as_it_is() -> None:
    split, plain = pair()
    parameter = parameter_over(split)
    parameter.data = parameter
    assert torch.equal(parameter, plain[8:200].view(24, 8))


def test_elements_between_those_of_a_view_that_overlaps_itself_stay() -> None:
    split, plain = pair()
    for t in (split, plain):
        t[:20].as_strided((3, 3), (2, 2), 1).fill_(0.25)
    assert torch.equal(split, plain)
