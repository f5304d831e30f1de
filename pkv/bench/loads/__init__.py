"""What a benchmark decodes: batches, traces, and loads by name."""
