"""Wording: checks.py says what is wrong with an argument and what to pass, counts.py writes numbers in sentences."""
