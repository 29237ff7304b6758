"""The paper's table: accuracy, and training speed beside standard attention, on five tasks."""
