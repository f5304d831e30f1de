"""Who does which tiles, as data: shapes, cards as values, plans, what plans cost, how they are checked and written."""
