"""The rows of the flag table, by subject."""
