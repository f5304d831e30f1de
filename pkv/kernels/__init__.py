"""What every stage's kernel is made of, in reading order: tile.py (the loop), merging.py, configs.py, launching.py."""
