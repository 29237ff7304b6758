"""What changed scores cost: time over plain attention, and beside FlexAttention with the same `score_mod`.

It may import `timing` of the benchmarks, FlexAttention as `speed` compiles it (`flexattention`), and the library.
"""
