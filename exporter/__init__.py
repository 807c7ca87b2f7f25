"""gumiho-export: reads checkpoints, traces ``graphs``, packs weights, writes bundles."""

import runtime  # noqa: F401  first, since it handles interruptions while libraries load
