"""What every implementation computes: operands, masks, biases, dropout, statistics, and the mathematics of one tile."""
