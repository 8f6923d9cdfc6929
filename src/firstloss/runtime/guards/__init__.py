"""Guards: what must still be as it was for a compiled step to be right, and what a step leaves in Python when it ends.

- `snapshot.py` walks all that a step's Python can reach, and copies what can be changed there;
- `recording.py` notes, while the step is traced, which code runs and which attributes it reads;
- `sources.py` makes guards of the two, with `value_guards.py` of what is in what was read;
- `guard_set.py` checks them at each call, and says what has changed;
- `effects.py` compares the snapshot with what there is afterwards, and repeats the difference at later calls, with
  `reconstruct.py` of the tensors, containers and objects that are new at each.
"""
