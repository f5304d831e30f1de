"""The paged KV cache: pool.py says who owns which page, paged.py is the cache itself."""
