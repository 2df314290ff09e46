"""How each op treats its factors: the notation, the table, its proof, and discovery of what is not in the table."""
