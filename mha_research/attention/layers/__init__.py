"""Parts of an attention module that hold no attention themselves: projections, products, adapters, extra keys."""
