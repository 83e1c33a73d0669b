"""Short texts from several domains: what greedy outputs are compared on. Written for this project."""

from __future__ import annotations

TEXTS = (
    "Once upon a time, in a small house at the edge of the forest, there lived a girl called Nora. Every morning she",
    'def merge(left, right):\n    """Merge two sorted lists into one sorted list."""\n    out = []\n    i = j = 0\n',
    "The boiling point of water falls with altitude because the pressure of the air above it falls. At 3000 metres",
    'Return a JSON object with the fields "name", "age" and "city" for: Maria is 34 and lives in Lisbon.\n{"name":',
    "Q: A train travels 120 km in 1.5 hours. What is its average speed in km/h?\nA: Let us think step by step.",
    "Der Zug nach München fährt heute nicht von Gleis 7, sondern von Gleis 12 ab. Bitte beachten Sie",
    "# Error log\n2024-03-01 12:00:01 ERROR worker 3: connection reset by peer (attempt 1 of 5)\n2024-03-01 12:00:03",
    "User: My build fails with 'undefined reference to main'. What does that mean?\nAssistant:",
)
