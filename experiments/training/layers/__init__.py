"""Parts of transformers that the models of several trainers are made of.

May be imported by all other folders of experiments; imports the library alone.
"""
