"""Guards, which check at each call that a compiled step is still right, and side effects of steps on Python objects.

- `snapshot.py` walks everything that a step's Python can reach, and copies what can change;
- `recording.py` records, while the step is traced, the code that runs and the attributes it reads;
- `sources.py` makes guards from both, and `value_guards.py` guards on what is reached through what was read;
- `guard_set.py` checks them at each call, and reports what has changed;
- `effects.py` compares the snapshot with the state after the trace, and repeats the difference at later calls;
  `reconstruct.py` creates the tensors, containers and objects that are new at each call.
"""
