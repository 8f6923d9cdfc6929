"""Every private name and patch of PyTorch, JAX and Python that Firstloss depends on, as tables.

`torch_names`, `jax_names` and `python_names` have a row for every private name; `patches` has one for every function of
theirs that Firstloss replaces. docs/compatibility.md shows the rows. A name is looked up when the first module imports
it; one that is gone breaks what uses it, when it is used, by an error that names it.
"""
