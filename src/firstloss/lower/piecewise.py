"""How a primitive is computed piece by piece: which dimensions it can be cut along, and by what parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jax import lax

Params = dict[str, Any]


class Along(NamedTuple):
    """How a value is cut into logical shards.

    Attributes:
        dim: the dimension.
        outer: how often the logical shards follow each other in it: more than once if the batch was not the first of
            the dimensions that were merged to it.
    """

    dim: int
    outer: int = 1


class Request(NamedTuple):
    """An equation that is to be cut into `shards` along a factor.

    Attributes:
        params: its parameters, maybe cut along another factor already.
        at, to: for each operand and result the dimension of that factor, or None.
        outer: of the operands and of the results, as in `Along`.
    """

    eqn: Any
    params: Params
    at: tuple[int | None, ...]
    to: tuple[int | None, ...]
    shards: int
    outer: tuple[int, int] = (1, 1)

    @property
    def operands(self) -> tuple[Along | None, ...]:
        """How the operands are cut."""
        return tuple(None if dim is None else Along(dim, self.outer[0]) for dim in self.at)

    @property
    def results(self) -> tuple[Along | None, ...]:
        """How the results are cut."""
        return tuple(None if dim is None else Along(dim, self.outer[1]) for dim in self.to)

    def local(self, shape: Sequence[int], dim: int | None) -> tuple[int, ...]:
        """The shape of one logical shard."""
        return tuple(size // self.shards if i == dim else size for i, size in enumerate(shape))


_Cut = Callable[[Request], Params | None]  # the parameters for one logical shard; None if it cannot be cut so


def _as_it_is(request: Request) -> Params | None:
    return {}


def _unless(*names: str) -> _Cut:
    """Along all dimensions but those of the parameters `names`."""

    def cut(request: Request) -> Params | None:
        for name in names:
            dims = request.params[name]
            if request.at[0] in (dims if isinstance(dims, (tuple, list)) else (dims,)):
                return None
        return {}

    return cut


def _new_shape(name: str) -> _Cut:
    """The parameter `name` is the result's shape."""

    def cut(request: Request) -> Params | None:
        return {name: request.local(request.params[name], request.to[0]), "sharding": None}

    return cut


def _slice(request: Request) -> Params | None:
    params, (dim, *_) = request.params, request.at
    size = request.eqn.invars[0].aval.shape[dim]
    if params["start_indices"][dim] or params["limit_indices"][dim] != size:
        return None
    if params["strides"] is not None and params["strides"][dim] != 1:
        return None
    return {"limit_indices": request.local(params["limit_indices"], dim)}


def _pad(request: Request) -> Params | None:
    (dim, *_) = request.at
    return {} if dim is not None and request.params["padding_config"][dim] == (0, 0, 0) else None


def _dynamic_slice(request: Request) -> Params | None:
    dim, sizes = request.at[0], request.params["slice_sizes"]
    if dim is None or sizes[dim] != request.eqn.invars[0].aval.shape[dim]:
        return None
    return {"slice_sizes": request.local(sizes, dim)}


def _dynamic_update_slice(request: Request) -> Params | None:
    base, update = request.at[:2]
    shapes = [atom.aval.shape for atom in request.eqn.invars[:2]]
    return {} if base is not None and base == update and shapes[0][base] == shapes[1][base] else None


def _batched(count: Callable[[Params], int]) -> _Cut:
    """Along all dimensions but so many last ones."""

    def cut(request: Request) -> Params | None:
        last = [atom.aval.ndim - count(request.params) for atom in request.eqn.invars]
        dims = zip(request.at, last, strict=True)
        return {} if all(dim is not None and dim < end for dim, end in dims) else None

    return cut


def _top_k(request: Request) -> Params | None:
    return {} if request.at[0] != request.eqn.invars[0].aval.ndim - 1 else None


def _window(request: Request) -> Params | None:
    """Windows over other dimensions."""
    params, dim = request.params, request.at[0]
    if dim is None:
        return None
    sizes = {"window_dimensions": 1, "window_strides": 1, "padding": (0, 0), "base_dilation": 1, "window_dilation": 1}
    return {} if all(tuple(params[n])[dim] == one for n, one in sizes.items() if n in params) else None


def _gather(request: Request) -> Params | None:
    params = request.params
    numbers, sizes, dim = params["dimension_numbers"], params["slice_sizes"], request.at[0]
    if dim is None or dim in numbers.operand_batching_dims:
        return {}
    if sizes[dim] != request.eqn.invars[0].aval.shape[dim]:
        return None
    return {"slice_sizes": request.local(sizes, dim)}


def _scatter(request: Request) -> Params | None:
    base, indices, updates = request.at
    if base is None:
        return {} if request.eqn.primitive.name in SUMS else None
    batching = base in request.params["dimension_numbers"].operand_batching_dims
    return {} if updates is not None and (indices is not None) == batching else None


def _convolution(request: Request) -> Params | None:
    params, numbers = request.params, request.params["dimension_numbers"]
    if request.to[0] is None:
        of_channels = request.at == (numbers.lhs_spec[1], numbers.rhs_spec[1])  # which are summed
        return {} if of_channels and params["feature_group_count"] == 1 else None
    is_batch = request.at[0] == numbers.lhs_spec[0] and request.at[1] is None
    return {} if is_batch and params["batch_group_count"] == 1 else None


def _split(request: Request) -> Params | None:
    return {} if request.at[0] != request.params["axis"] else None


def _random_bits(request: Request) -> Params | None:
    return {"shape": request.local(request.params["shape"], request.to[0])}


def _iota(request: Request) -> Params | None:
    params = request.params
    if request.to[0] == params["dimension"]:
        return None
    return {"shape": request.local(params["shape"], request.to[0]), "sharding": None}


_ELEMENTWISE = """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e bitcast_convert_type cbrt ceil
    clamp clz complex conj convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1
    floor ge gt igamma igamma_grad_a igammac imag integer_pow is_finite le lgamma log log1p logistic lt max min mul
    ne neg nextafter not optimization_barrier or polygamma population_count pow random_gamma_grad real
    reduce_precision regularized_incomplete_beta rem round rsqrt select_n shift_left shift_right_arithmetic
    shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh xor zeta
""".split()

_CUTS: dict[str, _Cut] = {
    **dict.fromkeys(_ELEMENTWISE, _as_it_is),
    **dict.fromkeys(("dot_general", "squeeze", "stack", "transpose", "unstack"), _as_it_is),
    **{f"reduce_{kind}": _as_it_is for kind in ("sum", "max", "min", "prod", "and", "or", "xor")},
    **dict.fromkeys(("argmax", "argmin"), _unless("axes")),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), _unless("axis")),
    **dict.fromkeys(("sort", "concatenate"), _unless("dimension")),
    "rev": _unless("dimensions"),
    "top_k": _top_k,
    "broadcast_in_dim": _new_shape("shape"),
    "reshape": _new_shape("new_sizes"),
    "iota": _iota,
    "slice": _slice,
    "pad": _pad,
    "split": _split,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "gather": _gather,
    **dict.fromkeys(("scatter", "scatter-add", "scatter_add", "scatter-mul", "scatter_mul"), _scatter),
    "conv_general_dilated": _convolution,
    **dict.fromkeys(
        (
            *("reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min"),
            *("select_and_scatter_add", "select_and_gather_add"),
        ),
        _window,
    ),
    **dict.fromkeys(("cholesky", "triangular_solve"), _batched(lambda params: 2)),
    "fft": _batched(lambda params: len(params["fft_lengths"])),
    "random_bits": _random_bits,
}

# Those with results that have dimensions which no operand has.
_MAKERS = {"broadcast_in_dim", "iota", "random_bits"}

# Those with the same bits whatever the shape of the shard, since they are rounded once, element by element, or not at
# all. (In which order XLA sums a shard, and how it computes an exponential of it, depends on the shard's shape.)
EXACT = set(
    """
    abs add add_any and bitcast_convert_type broadcast_in_dim ceil clamp concatenate convert_element_type copy
    copy_p div eq floor ge gt integer_pow iota is_finite le lt max min mul ne neg not optimization_barrier or pad
    reduce_precision reshape rev round select_n shift_left shift_right_arithmetic shift_right_logical sign slice
    split sqrt square squeeze stack stop_gradient sub transpose unstack xor
    """.split()
)
PRODUCTS = {"mul", "square", "integer_pow", "div"}  # a quotient may be computed as a product

# How the results of logical shards are joined, if the cut dimension is not one of the result's.
SUMS: dict[str, Callable[[Any, Any], Any]] = {
    **dict.fromkeys(("reduce_sum", "dot_general", "conv_general_dilated", "scatter-add", "scatter_add"), lax.add),
    "reduce_prod": lax.mul,
    "reduce_max": lax.max,
    "reduce_min": lax.min,
    "reduce_and": lax.bitwise_and,
    "reduce_or": lax.bitwise_or,
    "reduce_xor": lax.bitwise_xor,
}


def local_params(request: Request) -> Params | None:
    """The parameters that change for one logical shard; None if it cannot be cut so."""
    name = request.eqn.primitive.name
    if name not in _CUTS or name not in SUMS and None in request.to:
        return None
    if name not in _MAKERS and all(dim is None for dim in request.at):
        return None
    return _CUTS[name](request)


def binder(eqn: Any, changed: Params | None) -> Callable[..., Sequence[Any]]:
    """How an equation is computed; `changed` are the parameters for one logical shard, None: whole."""
    params = {**eqn.params, **(changed or {})}
    primitive = eqn.primitive
    if changed is not None and primitive.name == "conv_general_dilated" and params["batch_group_count"] == 1:
        return lambda data, kernel: (_channels_last(data, kernel, params),)

    def bind(*operands: Any) -> Sequence[Any]:
        results = primitive.bind(*operands, **params)
        return results if primitive.multiple_results else (results,)

    return bind


def _channels_last(data: Any, kernel: Any, params: Params) -> Any:
    """A convolution of (batch, *space, channels) with (*space, in, out). On a CPU, XLA has a library for these, and
    transposes others, but only outside of loops: in a loop they would be computed by a plain one, ten times slower."""
    numbers = params["dimension_numbers"]
    (batch, channels, *space), (out, in_, *window) = numbers.lhs_spec, numbers.rhs_spec
    data = lax.transpose(data, (batch, *space, channels))
    kernel = lax.transpose(kernel, (*window, in_, out))
    last = len(space) + 1
    dims = lax.ConvDimensionNumbers(
        (0, last, *range(1, last)), (last, last - 1, *range(last - 1)), (0, last, *range(1, last))
    )
    result = lax.conv_general_dilated(
        data,
        kernel,
        params["window_strides"],
        params["padding"],
        params["lhs_dilation"],
        params["rhs_dilation"],
        dims,
        params["feature_group_count"],
        precision=params["precision"],
        preferred_element_type=params["preferred_element_type"],
    )
    order = (numbers.out_spec[0], *numbers.out_spec[2:], numbers.out_spec[1])
    return lax.transpose(result, [order.index(dim) for dim in range(len(order))])
