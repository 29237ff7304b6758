"""The limits of GPU architectures."""

# Bytes of shared memory that a program may use, by compute capability (90 for 9.0).
SHARED_LIMITS = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
