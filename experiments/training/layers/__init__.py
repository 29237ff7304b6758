"""Parts of transformers that the models of several trainers are made of.

May import the library alone. For the models of all trainers.
"""
