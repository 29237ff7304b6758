"""Other processes for tests, and the threads and frames of this one."""
