"""Tables of every private name and every patch of PyTorch, JAX and Python that Firstloss depends on.

`torch_names`, `jax_names` and `python_names` have a row for each private name; `patches` has one for each function
that Firstloss replaces. docs/compatibility.md shows the rows. A name is looked up when it is first imported; using a
name that the installed version lacks raises an error that names it.
"""
