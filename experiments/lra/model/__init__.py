"""The models: an encoder with any mask, the classifier, and masks by name.

May import the library, its command line's `sources` (a mask from a file), `training`, and the settings and tasks of
`lra`.
"""
