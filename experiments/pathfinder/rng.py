"""Random numbers that are the same on every machine and with every library version.

SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014): a state and an odd increment for
every image.
"""

from __future__ import annotations

import numpy as np

from experiments.pathfinder.compiled import compiled

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
# numba turns a uint64 and a plain int into a float.
ONE, TWO = np.uint64(1), np.uint64(2)


@compiled
def mix(z):
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@compiled
def mix_increment(z):
    z = (z ^ (z >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    z = (z ^ (z >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    z = (z ^ (z >> np.uint64(33))) | ONE
    changes, bits = 0, z ^ (z >> ONE)
    while bits:
        bits &= bits - ONE
        changes += 1
    return z ^ np.uint64(0xAAAAAAAAAAAAAAAA) if changes < 24 else z


@compiled
def stream(seed, kind, index):
    """`kind` distinguishes sets of images with the same seed. uint64 [2]: state, increment"""
    parent = mix(mix(np.uint64(seed) + GOLDEN) ^ np.uint64(kind)) + TWO * np.uint64(index) * GOLDEN
    return np.array([mix(parent + GOLDEN), mix_increment(parent + TWO * GOLDEN)], dtype=np.uint64)


@compiled
def bits64(stream):
    stream[0] += stream[1]
    return mix(stream[0])


@compiled
def uniform(stream):
    return np.float64(bits64(stream) >> np.uint64(11)) * 2.0**-53


@compiled
def below(stream, count):
    """In 0 .. count - 1, for count up to 2^32; exact to within count / 2^32."""
    return np.int64(((bits64(stream) >> np.uint64(32)) * np.uint64(count)) >> np.uint64(32))
