"""Sharded initialization by XLA: a constructor as a StableHLO module, and its weights as `jax.Array`s."""
