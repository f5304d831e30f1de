"""The paged KV cache: paged.py is the cache itself, pool.py keeps track of which row owns which page."""
