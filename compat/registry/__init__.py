"""An Ollama registry and a Hugging Face Hub on loopback, one ASGI app, with every fault as a switch."""

from .app import FakeSource, Faults
from .server import FAST, Running, running

__all__ = ["FAST", "FakeSource", "Faults", "Running", "running"]
