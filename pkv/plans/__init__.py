"""Plans as values: which program does which tiles; with shapes, GPU profiles, counters, checks and JSON."""
