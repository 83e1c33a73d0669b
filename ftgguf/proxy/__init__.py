"""`ftgguf proxy`: a comparison on a client's real traffic, which it answers from A and shows to B."""
