"""The models: an encoder with any mask, the classifier, and masks by name.

May import the library, its command line's `pattern_text` (a mask from text), `training`, and the settings and tasks
of `lra`.
"""
