"""Plans the work of a mask: the tiles of each program, the chunks of long rows, and the order in which programs
start.
"""
