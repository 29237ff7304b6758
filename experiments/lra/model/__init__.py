"""The models: an encoder whose attention is any mask, the classifier that answers, and masks by their names.

May import the library, its command line's `sources` (a mask from a file), `training`, and the settings and tasks of
`lra`. For all of lra but its data.
"""
