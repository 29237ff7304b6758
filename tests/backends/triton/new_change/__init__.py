"""A score modification that the library does not have, a cap with a learned gain for each head, in the files that a new
one takes: its formula (`formula.py`, which would lie in `scores/`) and its device functions (`kernels.py`, in
`backends/triton/changes/`). Two lines in `changes/kinds.py` and a name in `scores/__init__.py` would make it public.

Users write it as `scores.function(lambda s, b, h, q, k, gain: gain[h] * torch.tanh(s / gain[h]), gain)`.
"""
