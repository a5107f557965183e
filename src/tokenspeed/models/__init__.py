"""Model families: weight declarations and a pure forward, one file a family."""
