"""The parts of every stage's kernel, in reading order: tile.py (tile loop), merging.py, configs.py, launching.py."""
