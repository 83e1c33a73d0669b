"""`ftgguf run`: one answer or a chat in the terminal, on an engine in this process."""
