"""Tasks: where questions come from, and how an answer is read and verified."""
