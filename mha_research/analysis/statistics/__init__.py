"""Claims and the rule that judges them, its power and calibration, and what is shown beside it."""
