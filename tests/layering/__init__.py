"""The imports between the folders of the repository."""
