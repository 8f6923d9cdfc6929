"""A Llama in Flax NNX, initialized as in Flax's guide: jitted, with sharding constraints on its weights.

An equivalent of transformers' Llama, with the same shapes and distributions but other numbers. Its layers are a Python
loop, as in transformers.
"""

from __future__ import annotations

from typing import Any


def initialise(fields: dict[str, int], mesh: Any) -> Any:
    """All weights, each sharded over the mesh's axis along the dimension that Firstloss would shard by default."""
    import jax
    from flax import nnx

    ways = mesh.devices.size
    axis = mesh.axis_names[0]
    hidden, inner, vocabulary = fields["hidden_size"], fields["intermediate_size"], fields["vocab_size"]
    keys = hidden // fields["num_attention_heads"] * fields["num_key_value_heads"]

    def named(*shape: int) -> tuple[str | None, ...]:
        dim = max((d for d in range(len(shape)) if shape[d] % ways == 0), key=lambda d: shape[d])
        return tuple(axis if d == dim else None for d in range(len(shape)))

    def normal(*shape: int) -> Any:
        return nnx.with_partitioning(nnx.initializers.normal(0.02), named(*shape))

    def linear(inputs: int, outputs: int, rngs: Any) -> Any:
        return nnx.Linear(inputs, outputs, use_bias=False, kernel_init=normal(inputs, outputs), rngs=rngs)

    def norm(rngs: Any) -> Any:
        ones = nnx.with_partitioning(nnx.initializers.ones_init(), named(hidden))
        return nnx.RMSNorm(hidden, scale_init=ones, rngs=rngs)

    class Layer(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.q, self.o = linear(hidden, hidden, rngs), linear(hidden, hidden, rngs)
            self.k, self.v = linear(hidden, keys, rngs), linear(hidden, keys, rngs)
            self.gate, self.up = linear(hidden, inner, rngs), linear(hidden, inner, rngs)
            self.down = linear(inner, hidden, rngs)
            self.before, self.after = norm(rngs), norm(rngs)

    class Llama(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.embedding = nnx.Embed(vocabulary, hidden, embedding_init=normal(vocabulary, hidden), rngs=rngs)
            for number in range(fields["num_hidden_layers"]):
                setattr(self, f"layer_{number}", Layer(rngs))
            self.norm = norm(rngs)
            self.head = linear(hidden, vocabulary, rngs)

    @nnx.jit
    def create() -> Any:
        model = Llama(nnx.Rngs(0))
        state = nnx.state(model)
        specs = nnx.get_partition_spec(state)
        constrained = jax.lax.with_sharding_constraint(state, specs)
        nnx.update(model, constrained)
        return model

    with jax.set_mesh(mesh):
        state = nnx.state(create())
    return [leaf for leaf in jax.tree.leaves(state) if getattr(leaf, "dtype", None) == "float32"]
