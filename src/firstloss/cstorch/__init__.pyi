"""The types of the names, which `__init__.py` imports on first use."""

from typing import Any

from firstloss import (
    Pad as Pad,
)
from firstloss import (
    backend as backend,
)
from firstloss import (
    checkpoint_closure as checkpoint_closure,
)
from firstloss import (
    compile as compile,
)
from firstloss import (
    current_backend as current_backend,
)
from firstloss import (
    current_executor as current_executor,
)
from firstloss import (
    current_torch_device as current_torch_device,
)
from firstloss import (
    deferred as deferred,
)
from firstloss import (
    deferred_init as deferred_init,
)
from firstloss import (
    errors as errors,
)
from firstloss import (
    from_numpy as from_numpy,
)
from firstloss import (
    full as full,
)
from firstloss import (
    full_like as full_like,
)
from firstloss import (
    init_program as init_program,
)
from firstloss import (
    is_deferred as is_deferred,
)
from firstloss import (
    load as load,
)
from firstloss import (
    mark_sharding as mark_sharding,
)
from firstloss import (
    materialize_module as materialize_module,
)
from firstloss import (
    materialize_tensor as materialize_tensor,
)
from firstloss import (
    metrics as metrics,
)
from firstloss import (
    ones as ones,
)
from firstloss import (
    ones_like as ones_like,
)
from firstloss import (
    register_lowering as register_lowering,
)
from firstloss import (
    run_stablehlo as run_stablehlo,
)
from firstloss import (
    save as save,
)
from firstloss import (
    save_initialized as save_initialized,
)
from firstloss import (
    shard as shard,
)
from firstloss import (
    step_closure as step_closure,
)
from firstloss import (
    timeline as timeline,
)
from firstloss import (
    to_numpy as to_numpy,
)
from firstloss import (
    trace as trace,
)
from firstloss import (
    use_cs as use_cs,
)
from firstloss import (
    zeros as zeros,
)
from firstloss import (
    zeros_like as zeros_like,
)

from . import amp as amp
from . import distributed as distributed
from . import nn as nn
from . import optim as optim
from . import profiler as profiler
from . import utils as utils
from .accepted import add_debug_name as add_debug_name
from .accepted import current_pol as current_pol
from .accepted import device_annotation as device_annotation
from .accepted import get_debug_name as get_debug_name
from .accepted import make_constant as make_constant
from .accepted import name_scope as name_scope
from .accepted import pol as pol
from .accepted import register_decomposition as register_decomposition
from .accepted import set_debug_scope as set_debug_scope
from .install import install as install
from .on_device import device as device
from .on_device import tensor as tensor

# Modules that exist in `sys.modules` only; see submodules.py.
backends: Any
core: Any
experimental: Any
mesh: Any
sparse: Any
storage: Any
