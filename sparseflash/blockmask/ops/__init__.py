"""Operations on masks that are exact to the score, in time and memory proportional to the live tiles.

They share `tilelist`: the tiles of all patterns as one list, so that bits are computed once per distinct tile.
"""
