"""Objects by key: one safetensors file a chunk, published whole or not at all. Start at ``tiers.py`` (the interface) and ``engine.py``."""
