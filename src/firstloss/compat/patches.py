"""The functions of PyTorch that Firstloss replaces, and when; importing Firstloss replaces none.

A row says what is replaced and why. The replacement is a function in the module that needs it, decorated with
`@replaces(name)`; it receives the original as its first argument, and calls it unless deferred tensors or an open
capture are involved. If someone else has replaced a function in the meantime, theirs is left alone.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from ..errors import CompatibilityError
from ..interpreter import Undo
from .locks import fork_safe_lock
from .names import lookup

# From the first deferred tensor on, as it may turn up anywhere.
DEFERRED = "from the first deferred tensor on"
# While a `deferred` context is open or a step is traced, in any thread.
CAPTURE = "during a capture"
# While a step is traced.
TRACE = "while a step is traced"
# Once there is a deferred tensor and others have imported the module.
IMPORTED = "from the first deferred tensor on, once others have imported it"


class Patch(NamedTuple):
    """A function that is replaced.

    Attributes:
        when: the period in which it is replaced.
        why: what eager PyTorch does there that deferred tensors do not support.
        also: other names of the same function.
        optional: whether nothing needs replacing if PyTorch lacks the function.
        static: whether it belongs to a class but receives no instance.
        module: for `IMPORTED`, the module that others must have imported.
    """

    when: str
    why: str
    also: tuple[str, ...] = ()
    optional: bool = False
    static: bool = False
    module: str = ""


_VECTORS = "It uses another algorithm without vectors, whose bits differ: run at once"
_MEMORY = "It accesses memory through tensors, which a capture would record"
_SPARSE = "A compiled step has no sparse gradients"
_FAST_PATH = "Its fast path decides by a mask's values, and calls kernels for nested tensors"
_COUNT = "It reads a count as a Python number"
_READS = "It reads a tensor's memory, bypassing the dispatcher"
_DRAW = "Drawn anew at each call, instead of being part of the compiled step"
_COPY = "Every rank has the recipe, so nothing needs to be sent"
_DYNAMO = "torch._dynamo.variables.builder"
_PLANNER = "torch.distributed.checkpoint.default_planner"
_ZERO = "deepspeed.runtime.zero.partition_parameters"
_ACCELERATE = "accelerate.utils.modeling"
DTENSOR = "torch.distributed.tensor"

# Methods of tensors that read their memory.
READ_IN_MEMORY = ("tolist", "numpy", "__array__", "__dlpack__", "data_ptr", "__repr__", "__format__")

# Functions of numbers in Python's `math`.
MATH_FUNCTIONS = (
    "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "copysign", "cos", "cosh", "degrees", "erf", "erfc",
    "exp", "expm1", "fabs", "fmod", "gamma", "hypot", "isfinite", "isinf", "isnan", "lgamma", "log", "log10", "log1p",
    "log2", "pow", "radians", "remainder", "sin", "sinh", "sqrt", "tan", "tanh",
)  # fmt: skip

# Functions that draw from the global generators of Python and NumPy, and change nothing else.
PYTHON_DRAWS = (
    "betavariate", "binomialvariate", "choice", "choices", "expovariate", "gammavariate", "gauss", "getrandbits",
    "lognormvariate", "normalvariate", "paretovariate", "randint", "random", "randrange", "sample", "triangular",
    "uniform", "vonmisesvariate", "weibullvariate",
)  # fmt: skip
NUMPY_DRAWS = (
    "beta", "binomial", "chisquare", "choice", "dirichlet", "exponential", "f", "gamma", "geometric", "gumbel",
    "hypergeometric", "laplace", "logistic", "lognormal", "logseries", "multinomial", "multivariate_normal",
    "negative_binomial", "noncentral_chisquare", "noncentral_f", "normal", "pareto", "permutation", "poisson", "power",
    "rand", "randint", "randn", "random", "random_integers", "random_sample", "ranf", "rayleigh", "sample",
    "standard_cauchy", "standard_exponential", "standard_gamma", "standard_normal", "standard_t", "triangular",
    "uniform", "vonmises", "wald", "weibull", "zipf",
)  # fmt: skip

PATCHES = {
    # -- tensors --
    "torch.Tensor.data": Patch(DEFERRED, "Assignment bypasses the dispatcher"),
    "torch.Tensor.__new__": Patch(DEFERRED, "A C++ tensor cannot have two Python classes", static=True),
    "torch.Tensor._make_subclass": Patch(DEFERRED, "As above", static=True),
    "torch.nn.Parameter.__new__": Patch(DEFERRED, "As above", static=True),
    "torch.Tensor.__deepcopy__": Patch(CAPTURE, "It copies the storage of a real tensor, which a capture would record"),
    "torch.utils.swap_tensors": Patch(DEFERRED, "It rejects tensors with weak references, which storages keep"),
    "torch.utils.dlpack.to_dlpack": Patch(DEFERRED, "It takes the memory's address", ("torch.to_dlpack",)),
    "torch.autograd.backward": Patch(DEFERRED, "For a step's result: an error that says why it has no graph"),
    "torch.autograd.grad": Patch(DEFERRED, "As above"),
    "torch.UntypedStorage.copy_": Patch(CAPTURE, _MEMORY),
    "torch.UntypedStorage.fill_": Patch(CAPTURE, _MEMORY),
    "torch.UntypedStorage.__getitem__": Patch(CAPTURE, _MEMORY),
    "torch.UntypedStorage.__setitem__": Patch(CAPTURE, _MEMORY),
    "torch.UntypedStorage._share_fd_cpu_": Patch(CAPTURE, _MEMORY, optional=True),
    "torch.UntypedStorage._share_filename_cpu_": Patch(CAPTURE, _MEMORY, optional=True),
    **{
        f"torch.linalg.{name}": Patch(DEFERRED, _VECTORS)
        for name in ("eigvalsh", "svdvals", "cond", "matrix_norm", "norm")
    },
    **{
        f"torch.{name}": Patch(DEFERRED, "They read a bit of the tensor, bypassing its class")
        for name in ("is_conj", "is_neg", "resolve_conj", "resolve_neg")
    },
    # -- random numbers --
    "torch.random.get_rng_state": Patch(CAPTURE, "The real state, not a ticket", ("torch.get_rng_state",)),
    "torch.random.set_rng_state": Patch(DEFERRED, "A ticket is no state after the capture", ("torch.set_rng_state",)),
    "torch.random.manual_seed": Patch(
        DEFERRED, "Counted: a generator does not reveal that it was reseeded with its seed", ("torch.manual_seed",)
    ),
    "torch.nn.init._no_grad_trunc_normal_": Patch(DEFERRED, "It reads values to know when to stop", optional=True),
    # -- modules --
    "torch.nn.Module.to_empty": Patch(DEFERRED, "It would drop recipes and leave memory uninitialized"),
    "torch.nn.parameter.UninitializedTensorMixin.materialize": Patch(CAPTURE, "It sets the class of a tensor"),
    "torch.compile": Patch(DEFERRED, "Dynamo is patched once imported; in a step, control flow is not compiled"),
    f"{_DYNAMO}.VariableBuilder.__call__": Patch(IMPORTED, "Dynamo needs values", optional=True, module=_DYNAMO),
    f"{_PLANNER}.DefaultLoadPlanner.resolve_tensor": Patch(
        IMPORTED, "A deferred weight gets memory for the file's values", module=_PLANNER
    ),
    # -- other libraries --
    f"{_ACCELERATE}.retie_parameters": Patch(
        IMPORTED, "It detects tied weights that were not loaded by the meta device",
        ("accelerate.big_modeling.retie_parameters",), optional=True, module=_ACCELERATE,
    ),
    "deepspeed.runtime.engine.DeepSpeedEngine._broadcast_model": Patch(
        IMPORTED, "Deferred weights are the same on all ranks", optional=True, module="deepspeed.runtime.engine"
    ),
    f"{_ZERO}.Init._convert_to_zero_parameters": Patch(
        IMPORTED, "Each rank computes its own part of a deferred weight", optional=True, module=_ZERO
    ),
    # -- DTensor --
    **{
        f"{DTENSOR}.placement_types.{kind}._shard_tensor": Patch(IMPORTED, _COPY, optional=True, module=DTENSOR)
        for kind in ("Shard", "_StridedShard")
    },
    f"{DTENSOR}.placement_types.mesh_broadcast": Patch(IMPORTED, _COPY, module=DTENSOR),
    f"{DTENSOR}._api._FromTorchTensor.forward": Patch(
        IMPORTED, "A shard given to `DTensor.from_local` is not part of a whole", static=True, module=DTENSOR
    ),
    **{
        f"torch.nn.init.{name}": Patch(
            IMPORTED, "DTensor lacks its operations; computed as on one process", module=DTENSOR
        )
        for name in ("orthogonal_", "sparse_", "dirac_")
    },
    "torch.nn.Embedding._fill_padding_idx_with_zero": Patch(IMPORTED, "DTensor would edit a copy", module=DTENSOR),
    "torch.nn.EmbeddingBag._fill_padding_idx_with_zero": Patch(IMPORTED, "As above", module=DTENSOR),
    # -- steps --
    "torch.Tensor.item": Patch(TRACE, "It is called by the class, too: `map(torch.Tensor.item, losses)`"),
    "torch.UntypedStorage.resize_": Patch(TRACE, "It bypasses the dispatcher"),
    "torch.compiler._is_compiling_flag": Patch(TRACE, "Libraries take paths without branches on values"),
    "torch._higher_order_ops.cond.CondOp.__call__": Patch(TRACE, "Captured as a region, not compiled by Dynamo"),
    "torch._higher_order_ops.while_loop.WhileLoopOp.__call__": Patch(TRACE, "As above"),
    "torch._higher_order_ops.scan.ScanOp.__call__": Patch(TRACE, "As above"),
    "torch._higher_order_ops.utils._hop_compile_and_call": Patch(TRACE, "As above", optional=True),
    "torch.nn.parallel.DistributedDataParallel.forward": Patch(TRACE, "It sends gradients from C++", optional=True),
    "torch.utils.checkpoint._CheckpointFrame.__init__": Patch(TRACE, "It starts behind an optimization barrier"),
    "torch.utils.checkpoint.detach_variable": Patch(TRACE, "As above"),
    "torch.nn.modules.batchnorm._BatchNorm.forward": Patch(TRACE, _COUNT),
    "torch.nn.SyncBatchNorm.forward": Patch(TRACE, _COUNT),
    "torch.embedding": Patch(TRACE, _SPARSE),
    "torch.embedding_bag": Patch(TRACE, _SPARSE),
    "torch.gather": Patch(TRACE, _SPARSE),
    **{f"math.{name}": Patch(TRACE, "It would specialize the step on a number") for name in MATH_FUNCTIONS},
    **{f"random.{name}": Patch(TRACE, _DRAW, optional=True) for name in PYTHON_DRAWS},
    **{f"numpy.random.{name}": Patch(TRACE, _DRAW, optional=True) for name in NUMPY_DRAWS},
    "torch.from_numpy": Patch(TRACE, "What is drawn at each call is an input"),
    "builtins.print": Patch(TRACE, "It prints values that only the device has: after the step"),
    "logging.Logger.handle": Patch(TRACE, "Likewise, it logs them after the step"),
    "builtins.max": Patch(TRACE, "It compares numbers that only the device has"),
    "builtins.min": Patch(TRACE, "As above"),
    "torch.nn.TransformerEncoder.forward": Patch(TRACE, _FAST_PATH),
    "torch.backends.mha.get_fastpath_enabled": Patch(TRACE, _FAST_PATH),
    "torch.optim.swa_utils.AveragedModel.update_parameters": Patch(TRACE, _COUNT),
    "torch.optim._adafactor._single_tensor_adafactor": Patch(TRACE, "It reads values"),
    "torch.optim._adafactor._multi_tensor_adafactor": Patch(TRACE, "It reads values"),
    "torch.amp.GradScaler.scale": Patch(TRACE, "It decides on the host: a warning says what to use instead"),
    "torch.tensor": Patch(CAPTURE, _READS),
    "torch.as_tensor": Patch(CAPTURE, _READS),
    "torch.asarray": Patch(CAPTURE, _READS),
    "torch.Tensor.new_tensor": Patch(CAPTURE, _READS),
    "torch.tensor_split": Patch(TRACE, _READS),
    **{
        f"torch._sobol_engine_{name}": Patch(CAPTURE, "It accesses memory directly")
        for name in ("initialize_state_", "scramble_", "ff_", "draw")
    },
    "torch.linalg.matrix_rank": Patch(TRACE, "It does not write to `out`"),
    **{
        f"torch.Tensor.{name}": Patch(TRACE, _READS)
        for name in ("tensor_split", *READ_IN_MEMORY)
    },
    **{f"gc.{name}": Patch(TRACE, "Garbage collection is paused") for name in ("enable", "disable", "isenabled")},
    "torch.optim.lr_scheduler.LRScheduler.step": Patch(TRACE, "Schedulers step in Python, after the traced step"),
}  # fmt: skip

_ABSENT = object()
_lock = fork_safe_lock()
_replacements: dict[str, Any] = {}  # functions, or properties
deferred_installed: bool = False  # whether the replacements for deferred tensors are, which each of them asks
modules_seen: int = 0  # the number of modules at the last `install_imported`, which each deferred tensor compares
_holders: dict[str, list[Any]] = {DEFERRED: [], CAPTURE: [], TRACE: []}  # who has entered each set of patches
_latest: dict[str, tuple[Any, Any, Any]] = {}  # by name: an original, its replacement, and what was made of both
_awaited: dict[str, list[Callable[[], None]]] = {}  # by module, what to do once others have imported it
# By name, for each place: (owner, attribute, original, replacement).
_installed: dict[str, list[tuple[Any, str, Any, Any]]] = {}


def replaces(*names: str) -> Callable[[Any], Any]:
    """Make the decorated function, `f(original, *args, **kwargs)`, the replacement of the functions `names`.

    For a property, it is given the replacing property.
    """

    def register(function: Any) -> Any:
        for name in names:
            _replacements[name] = function
            if PATCHES[name].when == IMPORTED:
                when_imported(PATCHES[name].module, functools.partial(_install_once, name, function))
            elif _holders[PATCHES[name].when]:
                _install_once(name, function)
        return function

    return register


def enter(when: str, holder: Any) -> None:
    """Install the replacements of `when` on behalf of `holder`, unless they are installed.

    Raises:
        CompatibilityError: if this PyTorch lacks a function that must be replaced; nothing is replaced then.
    """
    global deferred_installed
    with _lock:
        holders = _holders[when]
        if not holders:
            names = [name for name, patch in PATCHES.items() if patch.when == when and name in _replacements]
            originals = [_originals(name) for name in names]
            _warm_device_constructors()
            for name, found in zip(names, originals, strict=True):
                if name not in _installed:
                    _install(name, _replacements[name], found)
        holders.append(holder)
        deferred_installed = deferred_installed or when == DEFERRED


def leave(when: str, holder: Any) -> None:
    """Undo `enter`: the last holder to leave restores the originals. May be called twice."""
    global deferred_installed
    with _lock:
        holders = _holders[when]
        holders[:] = [other for other in holders if other is not holder]
        if not holders:
            deferred_installed = deferred_installed and when != DEFERRED
            for name in [name for name in _installed if PATCHES[name].when == when]:
                _uninstall(name)


def when_imported(module: str, action: Callable[[], None]) -> None:
    """Register an action for the first `install_imported` after others have imported `module`."""
    _awaited.setdefault(module, []).append(action)


def install_imported() -> None:
    """Install the replacements of modules that others have imported by now; they stay.

    Called for the first deferred tensor after an import, so no deferred tensor reaches a module without them.
    """
    global modules_seen
    seen = len(sys.modules)
    for name in tuple(_awaited):
        module = sys.modules.get(name)
        if module is None:
            continue
        if getattr(module.__spec__, "_initializing", False):  # a thread is importing it
            seen = 0
            continue
        with _lock:
            for action in _awaited.get(name, ()):
                action()
            _awaited.pop(name, None)
    modules_seen = seen if _awaited else len(sys.modules)


def _install_once(name: str, replacement: Any) -> None:
    if name not in _installed:
        _install(name, replacement, _originals(name))


def swap(undo: Undo, name: str, new: Any) -> None:
    """Replace `name` by `new`, until `undo` runs."""
    assert PATCHES[name].when == TRACE, name
    owner, attribute = _owner(name)
    undo(_set, owner, attribute, vars(owner).get(attribute, _ABSENT))
    setattr(owner, attribute, new)


def original(name: str) -> Any:
    """The function `name`, or its original if it is replaced."""
    current = lookup(name)
    return getattr(current, "__wrapped__", current) if name in _installed else current


def unreplaced(function: Any) -> Any:
    """The original of a replacement that code has kept; other values as they are."""
    return next((found for found, _, new in _latest.values() if new is function), function)


def is_installed(name: str) -> bool:
    """Whether the replacement of `name` is installed."""
    return name in _installed


@functools.cache
def _owner(name: str) -> tuple[Any, str]:
    path, _, attribute = name.rpartition(".")
    return lookup(path), attribute


@functools.cache
def _warm_device_constructors() -> None:
    """Enter a `torch.device` context once: the first entry looks up, and caches, the functions that it affects."""
    import torch

    with torch.device("cpu"):
        torch.empty(0)


def _originals(name: str) -> list[tuple[Any, str, Any]]:
    """Where the function `name` is: (owner, attribute, function), of each of its names.

    Raises:
        CompatibilityError: if this PyTorch lacks it, and it must be replaced.
    """
    found = []
    for path in (name, *PATCHES[name].also):
        try:
            owner, attribute = _owner(path)
            found.append((owner, attribute, getattr(owner, attribute)))
        except (ImportError, AttributeError) as error:
            if path != name or PATCHES[name].optional:
                continue
            import torch

            raise CompatibilityError(
                f"torch {torch.__version__} has no {name}, which Firstloss must replace ({PATCHES[name].why}). "
                "Use a version of torch that Firstloss is tested with (docs/compatibility.md)."
            ) from error
    return found


def _install(name: str, replacement: Any, originals: list[tuple[Any, str, Any]]) -> None:
    for owner, attribute, found in originals:
        new = _replaced(name, found, replacement)
        _installed.setdefault(name, []).append((owner, attribute, vars(owner).get(attribute, _ABSENT), new))
        setattr(owner, attribute, staticmethod(new) if PATCHES[name].static else new)


def _replaced(name: str, original: Any, replacement: Any) -> Any:
    """What takes the place of `original`: the same for all names of a function, and in all captures."""
    known = _latest.get(name)
    if known is None or known[0] is not original or known[1] is not replacement:
        new = _wrapper(original, replacement) if callable(original) else replacement
        known = _latest[name] = original, replacement, new
    return known[2]


def is_replacement(name: str, function: Any) -> bool:
    """Whether `function` takes the place of `name` at present."""
    return any(new is function for *_, new in _installed.get(name, ()))


def _wrapper(original: Callable[..., Any], replacement: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    return replaced


def _uninstall(name: str) -> None:
    for owner, attribute, before, new in _installed.pop(name):
        if getattr(owner, attribute, None) is new:  # otherwise someone else wraps ours, which calls the original
            _set(owner, attribute, before)


def _set(owner: Any, attribute: str, value: Any) -> None:
    if value is not _ABSENT:
        setattr(owner, attribute, value)
    elif attribute in vars(owner):
        delattr(owner, attribute)
