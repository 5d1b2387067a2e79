"""What tiled drivers share: their protocol, derivative rules, sizes, and biases along a line of distances."""
