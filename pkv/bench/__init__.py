"""Measuring: loads, the engines that decode them, how they are timed, and what records of that say."""
