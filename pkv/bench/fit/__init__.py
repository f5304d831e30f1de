"""Costs of cards, fitted to measured or published times; and what the compiler says of kernels."""
