"""Programs as Model Zoo's documentation writes them, with its imports changed."""
