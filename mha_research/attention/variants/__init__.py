"""One file a kind of attention, with all that a config must know of it."""
