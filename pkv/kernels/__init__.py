"""The parts of every stage's kernel, in reading order: tile.py (the tile loop), merging.py, configs.py, launching.py."""
