"""An Ollama registry and a Hugging Face Hub on loopback, one ASGI app, with every fault as a switch."""

from .app import FakeSource, Faults
from .server import Running, running

__all__ = ["FakeSource", "Faults", "Running", "running"]
