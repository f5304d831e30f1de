"""How pkv speaks: checks.py says what is wrong with an argument and what to pass, counts.py numbers in sentences."""
