"""How an engine is checked and timed, on one load or on a grid of them."""
