"""gumiho-export: reads checkpoints, traces ``graphs``, packs weights, writes bundles."""
