"""ftgguf: a drop-in llama-server for Mixture-of-Experts GGUF models larger than the GPU's memory."""

__version__ = "0.1.0"
