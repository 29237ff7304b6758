"""The layers of `sparseflash.selection`, which choose their keys at every step, trained and compared."""
