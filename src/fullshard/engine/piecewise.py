"""Functions that a piece of a tensor can answer without the rest, by name.

A list of what is allowed, not of what is refused: a function that nobody thought of is then an error
on every rank alike, instead of a wrong number, or a refusal that depends on this rank's shape.
"""

from __future__ import annotations

_element_wise = """
__abs__ __add__ __and__ __div__ __eq__ __floordiv__ __ge__ __gt__ __iadd__ __idiv__ __imul__
__invert__ __ipow__ __isub__ __itruediv__ __le__ __lt__ __mod__ __mul__ __ne__ __neg__ __or__
__pos__ __pow__ __radd__ __rdiv__ __rmul__ __rpow__ __rsub__ __rtruediv__ __sub__ __truediv__
__xor__ abs absolute add addcdiv addcmul angle bfloat16 bitwise_and bitwise_not bitwise_or
bitwise_xor bool ceil clamp clamp_max clamp_min clip clone conj contiguous copy copysign cos cosh
cpu cuda deg2rad detach div divide double empty_like eq erf exp exp2 expm1 fill float float_power
floor floor_divide fmax fmin fmod frac full_like ge gt half heaviside hypot int isclose isfinite
isinf isnan isneginf isposinf le lerp log log10 log1p log2 logical_and logical_not logical_or
logical_xor long lt masked_fill maximum minimum mul multiply nan_to_num ne neg negative nextafter
not_equal ones_like positive pow rand_like randn_like reciprocal relu remainder requires_grad
resolve_conj resolve_neg round rsqrt rsub sgn sigmoid sign signbit sin sinh sqrt square sub subtract
tan tanh threshold to true_divide trunc type type_as view_as_real where xlogy zero zeros_like
"""
_reshapes = """
flatten permute ravel reshape reshape_as squeeze swapaxes swapdims t transpose unflatten unsqueeze view
view_as
"""
_permutes = """
permute swapaxes swapdims t transpose
"""
_about = """
__deepcopy__ __delete__ __dir__ __dlpack_device__ __format__ __hash__ __repr__ __set__ __str__
_is_view _typed_storage can_cast data_ptr dim element_size get_device has_names is_complex is_conj
is_contiguous
is_floating_point is_inference is_neg is_pinned is_shared is_signed is_storage is_tensor
ndimension new_empty new_full new_ones new_tensor new_zeros record_stream register_hook result_type
retain_grad share_memory_ storage storage_offset stride
untyped_storage
"""
_in_place_operators = """
__iadd__ __iand__ __idiv__ __ifloordiv__ __ilshift__ __imod__ __imul__ __ior__ __ipow__ __irshift__
__isub__ __itruediv__ __ixor__ __setitem__
"""
_unary = """
__get__ bfloat16 cpu cuda double float half to type type_as
"""

ELEMENT_WISE = frozenset(_element_wise.split())  # in place, with an underscore behind, too
RESHAPES = frozenset(_reshapes.split())  # the same elements in another shape
PERMUTES = frozenset(_permutes.split())  # of these: dimensions in another order
IN_PLACE_OPERATORS = frozenset(_in_place_operators.split())
ABOUT = frozenset(_about.split())  # answers about the piece itself
KNOWN = ELEMENT_WISE | ABOUT | {"__get__"}
UNARY = ABOUT | frozenset(_unary.split())  # what else is in their arguments need not fit
