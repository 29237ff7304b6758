"""Tests of the library, of the experiments and of the pages, in the same folders as what they are about.

Helpers of many folders:

    drawn/         Hypothesis strategies: masks, attention problems, rules as people write them
    compared/      results held against fp64, against a mask's formula, and against themselves in portions
    watched/       what a call does besides its result: waits for the GPU, kernels, the largest tensor
    processes/     other processes and ranks: forks with PyTorch imported, pools, torchrun, threads
    interpreting/  Triton's interpreter made like a GPU, and an emulator of Gluon's instructions
    compiling/     processes in which Triton compiles

and three tools with tests of their own:

    layering/      which folder may import which
    fuzzing/       random calls of the public API: python -m tests.fuzzing
    mutations/     whether the tests notice small faults: python -m tests.mutations
"""
