"""Guards, which check before each call that a compiled step is still valid, and side effects of steps on Python
objects.

- `kinds/` has a class for each kind of object, which says what guards do with it (`kind.py`), and `states.py` one for
  each kind of mutable state;
- `snapshot.py` walks everything that a step's Python code can reach, and copies its mutable state;
- `recording.py` records which code runs and which attributes it reads while the step is traced;
- `sources.py` makes guards from both, with `stored_names.py` for what the step sets and `value_guards.py` for what is
  reached from there;
- `guard_set.py` checks them at each call, and reports what has changed;
- `effects.py` compares the snapshot with the state after the trace, and replays the differences at later calls;
  `reconstruct.py` creates the tensors, containers and objects that are new at each call.
"""
