"""What was measured: lines in files, and the numbers that are derived from them."""
