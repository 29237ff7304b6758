"""`python -m sparseflash`: the command line; see sparseflash/cli."""

from sparseflash.cli import main

main()
