"""Changes of scores, one file a kind: its device functions, what the host gives them, and how its gradients are summed.

`kind.py` says what such a file has, and `kinds.py` lists the files; `scores/` defines what each change computes. May
import scores, the library's cache and limits, and from this package alignment, availability, portable and schedule.
"""
