"""How a tensor gets from rank to rank: one contract (`base`), and a folder or file for each kind."""
