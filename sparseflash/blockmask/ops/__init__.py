"""Operations on masks that are exact to the score, in time and memory of the live tiles.

They are the operators and methods of `BlockMask` (`a & b`, `mask.crop(...)`, ...), documented there; each module here
does one of them. `tilelist` is what they share: the tiles of all patterns as one list, with bits that are touched once
for each distinct tile, however often it is stored.

May import `blockmask`.
"""
