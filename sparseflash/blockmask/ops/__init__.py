"""Operations on masks that are exact to the score, in time and memory proportional to the live tiles.

They are the operators and methods of `BlockMask` (`a & b`, `mask.crop(...)`, ...), which document them; each module
here implements one of them. They share `tilelist`: the tiles of all patterns as one list, so that bits are computed
once per distinct tile, however often it is stored.

They may import `blockmask`.
"""
