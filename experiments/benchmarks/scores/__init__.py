"""What changed scores cost: time over plain attention, and beside FlexAttention with the same `score_mod`.

It may import `timing`, `interpreter` and `fresh_process` of the benchmarks, `flexattention` of the speed benchmark,
`experiments.training`, and the library.
"""
