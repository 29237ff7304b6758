"""Tests of the library, of the experiments and of the pages, in the same folders as what they are about.

Helpers of many folders:

    drawn/         Hypothesis strategies: masks, attention problems, rules as people write them
    compared/      results held against fp64, against a mask's formula, and against themselves in portions
    watched/       what a call does besides its result: waits for the GPU, kernels, the largest tensor
    processes/     other processes and ranks: forks with PyTorch imported, pools, torchrun, threads
    interpreting/  Triton's interpreter made like a GPU, and an emulator of Gluon's instructions
    compiling/     processes in which Triton compiles

and five tools with tests of their own:

    layering/      which folder may import which
    fuzzing/       random calls of the public API; on a GPU: python -m tests.fuzzing
    fitting/       whether all kernels fit in shared memory, compiled for several GPUs: python -m tests.fitting
    limits/        positions past 2^24 and tensors of more than 2^31 elements: python -m tests.limits
    mutations/     whether the tests notice small faults: python -m tests.mutations
"""
